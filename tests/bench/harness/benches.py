"""All benches: the question of each, its main number, and the code that it measures."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tests.bench.harness.code import LEARNING, PLANNER, POSTGRES, PROJECT, RIG, SCHEDULE, code_hash

RESULTS = PROJECT / "tests" / "bench" / "results"
SIMULATED = "CPU, simulated engines"


@dataclasses.dataclass(frozen=True)
class Bench:
    """A bench and its row of docs/results.md."""

    name: str
    question: str
    main: str
    """Main number: a format over the `values` of the JSON; the text itself for a page without JSON."""
    code: tuple[str, ...] = ()
    """Files and folders of the product that it measures."""
    hardware: str = "CPU"
    module: str = ""
    """Its own file or folder below tests/bench; default: by its name."""
    made: str = ""
    """Date and commit of a page without JSON."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Files and folders on whose code the result depends."""
        own = f"tests/bench/{self.module or self.name}"
        return (*self.code, own if (PROJECT / own).is_dir() or self.module else f"{own}.py")

    def stored(self) -> dict[str, Any] | None:
        """Returns the content of its JSON; None without one."""
        file = RESULTS / f"{self.name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def is_outdated(self, whole: Mapping[str, Any] | None) -> bool:
        """True where a stored result is not known to be of the present code."""
        return whole is None or whole.get("code") != code_hash(self.measures)


SECTIONS: dict[str, tuple[Bench, ...]] = {
    "Schedules": (
        Bench(
            "overlap",
            "How much time per round do CGP and frontier dispatch save over serial training?",
            "{reduction_pct_R32_rolloutpipe:.1f}, {reduction_pct_R64_rolloutpipe:.1f} and "
            "{reduction_pct_R96_rolloutpipe:.1f}% less at R = 32, 64 and 96, engine of 8 slots",
            (*SCHEDULE, *RIG),
        ),
        Bench(
            "tail",
            "What does tail batching gain over synchronous training?",
            "{speedup_8x:.2f}, {speedup_16x:.2f} and {speedup_32x:.2f} times as fast at a length ratio of 8, 16 and 32",
            (*SCHEDULE, *RIG),
        ),
        Bench(
            "stream_trainer",
            "What does RollPacker's stream trainer gain where engines give their devices up to training?",
            "{speedup_adaptive:.2f} times as fast as without scaling (planner: {predicted_speedup:.2f}); largest "
            "difference of a gradient from one process's {gradient_difference:.0e}",
            (*SCHEDULE, *RIG, "learner/gradient_helper", "tests/bench/tail.py"),
        ),
        Bench(
            "inflight",
            "In-flight updates against conventional RL at equal largest lag?",
            "{tokens_per_s_ratio_both_cores:.2f} times the tokens/s of a baseline with both cores in either phase; "
            "{tokens_per_s_ratio_ideal:.2f} times an ideal one",
            (*SCHEDULE, *RIG),
        ),
        Bench(
            "mixed_policy",
            "How far from on-policy are responses whose weights change in flight?",
            "conventional responses diverge {least_conventional_over_in_flight:.1f} times as much at the same largest "
            "lag; a kept KV cache {most_kept_over_recomputed:.2f} times as much as a recomputed one",
            LEARNING,
        ),
        Bench(
            "async_ratio",
            "Speed-up by async ratio alpha?",
            "{speedup_alpha_1:.2f} at alpha 1 to {speedup_alpha_8:.2f} at alpha 8",
            (*SCHEDULE, *RIG),
        ),
        Bench(
            "paced",
            "Tail batching and the async ratio on engines with the speeds of the papers' GPUs?",
            "{tokens_speedup_tail_32x:.2f} times the tokens/s at a length ratio of 32; {tokens_speedup_alpha_2:.2f} at "
            "alpha 2",
            (*SCHEDULE, *RIG, "tests/bench/papers/inputs.py", "tests/bench/tail.py", "tests/bench/async_ratio.py"),
            "CPU, paced engines",
        ),
        Bench(
            "engines",
            "Queue scheduling, prompt replication, redundant samples over 16 engines?",
            "{queue_scheduling_speedup:.2f}, {replication_speedup:.2f} and {redundant_speedup:.2f} times as fast",
            (*SCHEDULE, *RIG),
            SIMULATED,
        ),
        Bench(
            "agentic",
            "Environment-level asynchrony and redundant environments?",
            "{speedup:.2f} and {speedup_redundant:.2f} times as fast as batch rollouts",
            (*SCHEDULE, *RIG, "actor/environments"),
            "CPU, simulated engine",
        ),
        Bench(
            "schedules",
            "Do random schedules with crashes stay exactly-once and within the lag bound?",
            "{schedules:,} schedules, {trained_twice} groups trained twice, {over_lag_bound} over the bound",
            SCHEDULE,
        ),
    ),
    "Learning": (
        Bench(
            "presets",
            "Does every preset learn?",
            "smallest gain of held-out reward {min_gain:.2f}; `rollpacker` {rollpacker_minus_serial:+.3f} to `serial`",
            LEARNING,
        ),
        Bench(
            "learning",
            "Five seeds in round mode and in flight?",
            "at least {min_end_tiny:.2f} after `tiny`'s 400 updates",
            LEARNING,
        ),
        Bench(
            "distillation",
            "On-policy distillation against RL and supervised fine-tuning on the same samples?",
            "mean of the held-out curve {area_distilled:.2f} (teacher), {area_rl:.2f} (reward), {area_both:.2f} "
            "(both), {area_sft:.2f} (supervised)",
            LEARNING,
        ),
        Bench(
            "distillation_smollm2",
            "Does SmolLM2-135M learn from a teacher trained here?",
            "held-out reward {reward_student:.2f}, then {end_distilled:.2f} (teacher of {reward_teacher:.2f}), "
            "{end_forward_kl:.2f} (its distributions), {end_rl:.2f} (reward), {end_sft:.2f} (supervised)",
            LEARNING,
        ),
        Bench(
            "task_learning",
            "Multi-turn game, tool use and code?",
            "smallest gain {min_gain_guess:.2f}, {min_gain_calculator:.2f} and {min_gain_code:.2f} over three seeds",
            (*LEARNING, "actor/environments"),
        ),
        Bench(
            "real_model",
            "Does SmolLM2-135M-Instruct learn arithmetic in 20 minutes?",
            "held-out reward {reward_base:.2f}, {reward_warm:.2f} after supervised fine-tuning, then "
            "{reward_pipelinerl:.2f} (`pipelinerl`) and {reward_rolloutpipe:.2f} (`rolloutpipe`)",
            LEARNING,
        ),
        Bench(
            "word_problems",
            "Does SmolLM2-135M-Instruct learn word problems?",
            "held-out reward on two steps {two_steps_base:.2f}, {two_steps_supervised:.2f} (supervised), "
            "{two_steps_rl:.2f}; GSM-Symbolic {gsm_symbolic_base:.2f}, {gsm_symbolic_supervised:.2f}, "
            "{gsm_symbolic_rl:.2f}",
            (*LEARNING, "configs/recipes/gsm_smollm2.py", "configs/tasks/word_problems.py"),
        ),
        Bench(
            "together",
            "Do several processes and Ray learn what one process does?",
            "late reward {alone_reward_late:.3f} (one), {together_reward_late:.3f} (several), {ray_reward_late:.3f} "
            "(Ray)",
            (*LEARNING, POSTGRES),
        ),
        Bench(
            "lora",
            "LoRA against full training of SmolLM2-135M?",
            "gain {gain_adapter:+.2f} against {gain_full:+.2f}",
            ("learner/model/lora.py", "actor/vllm/lora_serving.py", "learner/update"),
        ),
        Bench(
            "param_dtype",
            "Do parameters in bfloat16 learn like float32?",
            "{movement_part:.2f} times the movement, {gain_part:.2f} times the gain",
            ("learner/update",),
        ),
        Bench(
            "optimizers",
            "Muon against AdamW at equal updates?",
            "held-out reward {muon_minus_adamw:+.2f}; {chip_gib_muon:.1f} against {chip_gib_adamw:.1f} GiB per chip",
            ("learner/update",),
        ),
    ),
    "Correctness and faults": (
        Bench(
            "faults",
            "Does a run survive kills, partitions, full disks and corrupt files?",
            "{faults_survived} of {faults_injected} faults, {lost} groups lost, {trained_twice} trained twice",
            (*SCHEDULE, POSTGRES, "learner/checkpoint.py", "learner/restore.py", "tests/integration/faults"),
        ),
        Bench(
            "reward_kills",
            "Do killed verifiers, judges and environments cause wrong rewards?",
            "{kills} faults, {wrong_rewards} wrong rewards in {responses_checked:,} responses, {lost} group lost",
            ("actor/rewards", "actor/environments"),
        ),
        Bench(
            "families",
            "Do models match transformers and vLLM?",
            "logits within {max_abs_dlogit:.1e}; largest parity difference {max_abs_dlogprob:.1e} nats",
            ("learner/model",),
        ),
        Bench(
            "routing_replay",
            "Mismatch of a mixture of experts near ties with routing replay, and its cost?",
            "worst token {worst_replayed:.3f} nats, {worst_own:.3f} without; learner at {learner_speed_ratio:.2f} and "
            "engine at {engine_speed_ratio:.2f} times the tokens/s",
            ("learner/model/moe.py", "learner/model/routing_replay.py", "actor/vllm/routing_capture_cpu.py"),
        ),
        Bench(
            "math_forms",
            "Does `math` judge forms of answers correctly?",
            "{false_rewards_math} false reward and {missed_math} missed answer in {pairs} pairs; math-verify "
            "{false_rewards_library} and {missed_library}",
            ("actor/rewards/verifiers", "tests/actor/rewards/verifiers/math_forms.py"),
        ),
    ),
    "Components": (
        Bench(
            "learner",
            "Time per update against PyTorch and Tunix?",
            "{vs_torch_packed:.2f} times as fast as packed PyTorch",
            ("learner/update", "learner/objective", "learner/model"),
        ),
        Bench(
            "gpu",
            "One update at real model shapes on a GPU?",
            "Qwen3-1.7B: 37,783 tokens/s, 41% of the peak FLOPs",
            ("learner/update", "learner/objective", "learner/model"),
            "one H200",
            "learner_gpu.py",
            made="2026-11-26, 84265a5f",
        ),
        Bench(
            "tpu",
            "Do the presets fit TPU slices?",
            "8 of 8 cases fit; compiled only",
            ("learner/update", "learner/objective", "learner/model"),
            "no TPU",
            "learner_gpu.py",
            made="2026-11-26, 6916183b",
        ),
        Bench(
            "tpu_mfu",
            "Which share of a TPU's peak do the compiled steps imply?",
            "{mfu_dense:.0%} (7B dense) and {mfu_moe:.0%} (30B-A3B) by XLA's estimates",
            (
                "learner/update",
                "learner/objective",
                "learner/model",
                "configs/presets/tpu.py",
                "launch/tools/compile_tpu",
            ),
            "no TPU",
        ),
        Bench(
            "publish",
            "Cost of publishing weights?",
            "{publish_over_memcpy:.2f} times the speed of memcpy; deltas {delta_ratio_lr1e-6:.0f} times smaller at a "
            "learning rate of 1e-6",
            ("bridge/snapshots", "learner/publish"),
        ),
        Bench(
            "store",
            "Groups/s of the store?",
            "{sqlite_groups_per_s:.0f} (SQLite) and {postgres_groups_per_s:.0f} (PostgreSQL) groups/s of 64 KB",
            ("bridge/store",),
        ),
        Bench(
            "actor_overhead",
            "Actor against bare vLLM?",
            "{actor_over_bare:.2f} times the tokens/s",
            ("actor/loop.py", "actor/sampling.py", "actor/serving.py"),
        ),
        Bench(
            "cpu_adapters",
            "Cost of a LoRA adapter on a CPU engine?",
            "{all_of_none:.2f} times the time without one",
            ("actor/vllm/lora_cpu.py",),
        ),
        Bench(
            "rewards",
            "Gain of asynchronous rewards and the adaptive timeout?",
            "{asynchronous_speedup:.2f} and {adaptive_speedup:.2f} times as fast",
            ("actor/rewards", "actor/sandbox"),
        ),
        Bench(
            "sandbox",
            "Cost of the sandbox per program?",
            "{sandbox_added_ms:.1f} ms warm, {cold_added_ms:.0f} ms cold",
            ("actor/sandbox",),
        ),
        Bench(
            "report",
            "Report of 5,000 updates and 100,000 responses?",
            "{make_s:.1f} s, {bytes:,} bytes",
            ("launch/tools/report",),
        ),
    ),
    "Planner": (
        Bench(
            "planner",
            "Does the planner predict measured runs and PipelineRL's numbers?",
            "error up to {max_rel_error_real:.0%}; {max_rel_error_async_ratio:.0%} for async ratios",
            PLANNER,
        ),
        Bench(
            "papers",
            "Does it predict the papers' numbers from their inputs alone?",
            "median error {median_error:.0%}, at most {max_error:.0%}",
            PLANNER,
            "simulated",
        ),
        Bench(
            "parallelism",
            "The parallelism planner's rule against the paper's bare rule?",
            "{sluice_60k:.2f}, {sluice_100k:.2f} and {sluice_224k:.2f} times as fast as size 1, the bare rule "
            "{bare_60k:.2f}, {bare_100k:.2f} and {bare_224k:.2f}",
            ("actor/elastic.py", "launch/tools/plan/sim/sim_engine.py"),
            "simulated",
        ),
        Bench(
            "cluster",
            "Does it predict store and network rates?",
            "within a factor of {worst_factor_postgres:.2f}",
            ("launch/tools/plan/control_plane",),
        ),
    ),
}
BENCHES = {bench.name: bench for benches in SECTIONS.values() for bench in benches}
