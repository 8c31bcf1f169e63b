"""The configuration: frozen, validated dataclasses, one section a part of the system.

A preset (`configs/<name>.py`) is a function `get_config()` that returns a `Config`. Every field can
be overridden on the command line as `--config.section.field=value` (`configs/overrides.py`).
Checks of one section live in its `__post_init__`; checks across sections in `Config`'s.
"""

import dataclasses
import math
import re
from typing import Literal

from configs.checks import not_negative, positive
from configs.loss import LossConfig
from configs.schedule import AdmissionConfig, PublishConfig, RoundsConfig

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and when it ends."""

    name: str = "run"
    dir: str = ""
    """The run's folder; empty means runs/<name>. A folder of the same config is resumed."""
    seed: int = 0
    num_updates: int = 100
    """Optimizer steps to train for."""

    def __post_init__(self) -> None:
        """Checks this section."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"run.name must be letters, digits, '.', '_' or '-' (it names a folder), got {self.name!r}"
            )
        positive("run", num_updates=self.num_updates)
        not_negative("run", seed=self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder, and the precisions it is held in."""

    path: str = ""
    """A Hugging Face folder (config.json, safetensors, tokenizer.json). Empty: the tiny recipe below,
    made once and cached."""
    param_dtype: Dtype = "float32"
    """Master weights and optimizer state."""
    compute_dtype: Dtype = "float32"
    """Matrix products in the learner."""
    served_dtype: Dtype = "float32"
    """What is published and what the engine computes in."""
    remat: Literal["full", "attention", "dots", "none"] = "attention"
    """What the backward pass recomputes: whole layers, all but attention (with the splash and xla implementations;
    cuDNN and Pallas are recomputed), all but attention and the projections, nothing."""
    attention: Literal["auto", "splash", "cudnn", "pallas", "xla"] = "auto"
    """Implementation in the learner: auto takes the platform's (`learner/model/attention/dispatch.py`)."""
    logit_chunk_tokens: int = 0
    """Tokens a device whose logits exist at once; 0: 128 on a CPU, elsewhere what fits 512 MiB."""
    max_tokens: int = 64
    """Longest prompt and response together; also the engine's context length."""

    def __post_init__(self) -> None:
        """Checks this section."""
        positive("model", max_tokens=self.max_tokens)
        not_negative("model", logit_chunk_tokens=self.logit_chunk_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Where problems come from and how answers are judged."""

    path: str = ""
    """A .jsonl or .parquet file; empty means the reasoning-gym task below."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    eval_path: str = ""
    """Held-out problems; empty: one in `held_out_one_in` of the problems, chosen by a hash of the prompt."""
    held_out_one_in: int = 10
    task: str = "chain_sum"
    """A reasoning-gym task family."""
    task_args: dict[str, int | float | str | bool] = dataclasses.field(default_factory=dict)
    pattern: str = ""
    """A regular expression whose first group is the part of the question to show; empty shows it all."""
    verifier: Literal["reasoning_gym", "exact", "math"] = "exact"
    chat_template: Literal["auto", "on", "off"] = "auto"
    """auto: applied when the tokenizer has one."""
    system_prompt: str = ""
    add_bos: bool = False
    """Put the tokenizer's BOS token before a prompt that no chat template was applied to."""

    def __post_init__(self) -> None:
        """Checks this section."""
        if self.held_out_one_in < 2:
            raise ValueError(f"prompts.held_out_one_in must be >= 2, got {self.held_out_one_in}")
        if self.path and self.verifier == "reasoning_gym":
            raise ValueError(
                "prompts.verifier=reasoning_gym needs a reasoning-gym task; for prompts.path use exact or math"
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as e:
            raise ValueError(f"prompts.pattern is no regular expression: {e}") from e
        if self.pattern and groups < 1:
            raise ValueError(f"prompts.pattern needs a group in parentheses, got {self.pattern!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the actors sample."""

    max_response_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        """Checks this section."""
        positive("sampling", max_response_tokens=self.max_response_tokens, temperature=self.temperature)
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                "sampling.top_p and sampling.top_k must stay 1.0 and 0: importance ratios need the learner's "
                f"distribution truncated alike, got top_p={self.top_p} top_k={self.top_k}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, with global-norm clipping and linear warm-up."""

    name: Literal["adamw", "adafactor"] = "adamw"
    """adafactor keeps the second moment as rows and columns, and no first one (Shazeer and Stern, 2018)."""
    mu_dtype: Dtype = "float32"
    """What adamw keeps its first moment in."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up, over run.num_updates."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_skipped_in_a_row: int = 5
    """An update whose loss or gradient isn't finite changes nothing; after this many one after the other the run
    stops."""

    def __post_init__(self) -> None:
        """Checks this section."""
        positive(
            "optimizer",
            learning_rate=self.learning_rate,
            eps=self.eps,
            max_grad_norm=self.max_grad_norm,
            max_skipped_in_a_row=self.max_skipped_in_a_row,
        )
        not_negative("optimizer", warmup_steps=self.warmup_steps, weight_decay=self.weight_decay)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer betas must be in [0, 1), got {self.beta1} and {self.beta2}")
        if self.name == "adafactor":
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in ("beta1", "beta2", "eps", "mu_dtype") and value != field.default:
                    raise ValueError(
                        f"optimizer.{field.name}={value} has no effect with optimizer.name=adafactor; leave it out"
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """The one shape a training micro-batch has: rows of packed sequences."""

    rows: int = 4
    row_tokens: int = 256
    max_row_sequences: int = 128
    """Sequences in a row at most; cuDNN's attention keeps statistics for as many."""

    def __post_init__(self) -> None:
        """Checks this section."""
        positive("packing", rows=self.rows, row_tokens=self.row_tokens, max_row_sequences=self.max_row_sequences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The learner's device mesh; the product must be the number of devices."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of a learner that launch.local starts; empty leaves it as it is."""
    data: int = 1
    """Whole copies of the parameters."""
    fsdp: int = 1
    """Splits parameters, optimizer state and the rows of a batch."""
    expert: int = 1
    """The same, and the experts of a MoE model."""
    sequence: int = 1
    """Splits the tokens of a row (context parallelism)."""
    tensor: int = 1
    """Splits heads, MLP width and vocabulary."""

    def __post_init__(self) -> None:
        """Checks this section."""
        positive("mesh", **self.axes)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by the names of `learner.devices.mesh.AXES`."""
        names = ("data", "fsdp", "expert", "sequence", "tensor")
        return {name: getattr(self, name) for name in names}

    @property
    def batch_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.data * self.fsdp * self.expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the learner saves, and how many saves are kept."""

    every_n_steps: int = 50
    """With publish.when=round_end a save that falls due inside a round waits for the round's end."""
    keep: int = 2

    def __post_init__(self) -> None:
        """Checks this section."""
        positive("checkpoint", every_n_steps=self.every_n_steps)
        if self.keep < 2:
            raise ValueError(
                "checkpoint.keep must be >= 2 (while one is being written, the one before is all there is to fall "
                f"back on), got {self.keep}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation through the engine that serves the policy."""

    num_problems: int = 256
    """0: no evaluation at all; the publish section's probes, which take held-out problems, must be off too."""
    every_n_steps: int = 50
    """Also at the start and at the end; 0 only there."""
    temperature: float = 1.0
    """0 is greedy."""

    def __post_init__(self) -> None:
        """Checks this section."""
        not_negative(
            "evaluation",
            num_problems=self.num_problems,
            every_n_steps=self.every_n_steps,
            temperature=self.temperature,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The engine and the loop around it."""

    max_num_seqs: int = 64
    """Sequences the engine runs at once."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES of an actor that launch.local starts; empty leaves it as it is."""
    tensor_parallel_size: int = 1
    elastic: bool = False
    """Adapts how many sequences run at once, and restarts an engine whose preemptions ask for another tensor parallel
    size (RollPacker section 4.2); `actor/engine/elastic.py` says by which rules."""
    max_tensor_parallel_size: int = 0
    """With elastic: devices that one engine may take; 0 means tensor_parallel_size."""
    gpu_memory_utilization: float = 0.9
    """On a GPU."""
    kv_cache_gib: int = 1
    """On a CPU."""
    enforce_eager: bool = False
    prefix_caching: bool = False
    cpu_cores: str = ""
    """Cores the engine is pinned to on a CPU ("0" or "0-3"); empty leaves it to the engine."""
    lease_s: float = 30.0
    """A dead actor's tickets are offered again after this long."""
    verifier_timeout_s: float = 10.0
    verifier_retries: int = 2
    verifier_workers: int = 1
    """Processes that judge responses, off the event loop."""
    max_restarts: int = 5
    """How often the supervisor starts an actor again that died."""
    start_timeout_s: float = 600.0
    """An engine that is not up by then has hung; its actor ends."""
    max_attempts: int = 3
    """How often a prompt is tried whose responses can't be judged; then another takes its place."""

    def __post_init__(self) -> None:
        """Checks this section."""
        positive(
            "actor",
            max_num_seqs=self.max_num_seqs,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_gib=self.kv_cache_gib,
            lease_s=self.lease_s,
            verifier_timeout_s=self.verifier_timeout_s,
            verifier_workers=self.verifier_workers,
            start_timeout_s=self.start_timeout_s,
            max_attempts=self.max_attempts,
        )
        if 0 < self.max_tensor_parallel_size < self.tensor_parallel_size:
            raise ValueError(
                f"actor.max_tensor_parallel_size ({self.max_tensor_parallel_size}) is below "
                f"actor.tensor_parallel_size ({self.tensor_parallel_size})"
            )
        not_negative("actor", max_tensor_parallel_size=self.max_tensor_parallel_size)
        not_negative("actor", verifier_retries=self.verifier_retries, max_restarts=self.max_restarts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    preset: str
    """Name of the preset it came from; a label."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    rounds: RoundsConfig = RoundsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    publish: PublishConfig = PublishConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    packing: PackingConfig = PackingConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    actor: ActorConfig = ActorConfig()

    def __post_init__(self) -> None:
        """Checks what one section alone can't."""
        if self.model.max_tokens > self.packing.row_tokens:
            raise ValueError(
                f"packing.row_tokens ({self.packing.row_tokens}) must hold the longest sequence, "
                f"model.max_tokens ({self.model.max_tokens})"
            )
        if self.sampling.max_response_tokens >= self.model.max_tokens:
            raise ValueError(
                f"sampling.max_response_tokens ({self.sampling.max_response_tokens}) must leave room for a "
                f"prompt in model.max_tokens ({self.model.max_tokens})"
            )
        if (self.admission.policy == "window") != (self.publish.when == "every"):
            raise ValueError(
                "admission.policy=window and publish.when=every go together (a window has no round to end), "
                f"got {self.admission.policy} and {self.publish.when}"
            )
        if self.rounds.overprovision_prompts > 1 and self.publish.when == "every":
            raise ValueError(
                "rounds.overprovision_prompts needs publish.when=round_end: a window has no round whose first R groups "
                "could win"
            )
        if self.rounds.overprovision_prompts > 1 and self.admission.policy == "frontier":
            raise ValueError(
                "rounds.overprovision_prompts needs admission.policy=fifo: behind a frontier the last prompts issued "
                "would lose, not the long ones"
            )
        every = self.publish.every_n_steps
        if self.publish.when == "every" and self.rounds.max_lag_steps is not None:
            if self.rounds.max_lag_steps < every - 1:
                raise ValueError(
                    f"rounds.max_lag_steps ({self.rounds.max_lag_steps}) is below publish.every_n_steps - 1 = "
                    f"{every - 1}, the lag of the newest weights right before a publish; such a run would drop all "
                    "groups for ever"
                )
        if self.rounds.ess_floor > 0 and self.publish.when == "round_end":
            raise ValueError(
                "rounds.ess_floor needs publish.when=every: inside a round the engines have no newer weights to sample "
                "a fresh batch by"
            )
        if 0 < self.admission.queue_groups < self.rounds.groups_per_update:
            raise ValueError(
                f"admission.queue_groups ({self.admission.queue_groups}) must be at least rounds.groups_per_update "
                f"({self.rounds.groups_per_update}), or an update's groups drop each other"
            )
        if self.publish.when == "every" and self.rounds.train_start == "round_complete":
            raise ValueError("rounds.train_start=round_complete needs publish.when=round_end")
        if self.admission.policy == "window" and self.admission_width < self.rounds.groups_per_update:
            raise ValueError(
                f"admission.width ({self.admission.width}) must be at least rounds.groups_per_update "
                f"({self.rounds.groups_per_update}), or an update never fills"
            )
        steps_per_round = self.rounds.groups_per_round // self.rounds.groups_per_update
        if (
            self.publish.when == "round_end"
            and self.rounds.max_lag_steps is not None
            and self.rounds.max_lag_steps < steps_per_round - 1
        ):
            raise ValueError(
                f"rounds.max_lag_steps ({self.rounds.max_lag_steps}) is below R/U - 1 = {steps_per_round - 1}, "
                "the lag of a round's last update; such a run would drop groups for ever"
            )
        if self.publish.when == "round_end" and self.run.num_updates % steps_per_round:
            raise ValueError(
                f"run.num_updates ({self.run.num_updates}) must be a multiple of the round's "
                f"{steps_per_round} updates (R/U)"
            )
        if self.evaluation.num_problems == 0 and self.publish.probe_every_n_publishes > 0:
            raise ValueError(
                "evaluation.num_problems=0 leaves the probes no problems; set publish.probe_every_n_publishes=0 too"
            )
        if self.loss.proximal == "round" and self.publish.when == "every":
            raise ValueError(
                "loss.proximal=round needs publish.when=round_end: a window has no rounds whose start could be kept; "
                "take loss.proximal=update"
            )
        if self.loss.overlong_tokens >= self.sampling.max_response_tokens:
            raise ValueError(
                f"loss.overlong_buffer_tokens (here {self.loss.overlong_tokens}; dapo's default is 4096) must be below "
                f"sampling.max_response_tokens ({self.sampling.max_response_tokens}), or every response is punished"
            )
        if self.packing.rows % self.mesh.batch_shards:
            raise ValueError(
                f"packing.rows ({self.packing.rows}) must be a multiple of mesh.data * mesh.fsdp * mesh.expert "
                f"({self.mesh.batch_shards})"
            )
        if self.packing.row_tokens % self.mesh.sequence:
            raise ValueError(
                f"packing.row_tokens ({self.packing.row_tokens}) must be a multiple of mesh.sequence "
                f"({self.mesh.sequence})"
            )

    @property
    def admission_width(self) -> int:
        """Groups in service at most, with the default filled in; 0 means no bound (fifo)."""
        defaults = {
            "fifo": 0,
            "frontier": self.rounds.groups_per_update,
            "window": math.floor((1 + self.alpha) * self.rounds.groups_per_update),
        }
        return self.admission.width or defaults[self.admission.policy]

    @property
    def max_ready_groups(self) -> int | None:
        """Complete groups that may wait for the learner; None for no bound but the tickets."""
        if self.admission.when_full == "block":
            return None
        return self.admission.queue_groups or self.rounds.groups_per_update

    @property
    def alpha(self) -> float:
        """The async ratio; 3 where none is given, for a window of 4 U."""
        return 3.0 if self.admission.async_ratio is None else self.admission.async_ratio

    @property
    def run_dir(self) -> str:
        """The run's folder."""
        return self.run.dir or f"runs/{self.run.name}"

    @property
    def parity_bound(self) -> float:
        """Largest |dlogprob| a probe may show, with the default filled in."""
        return self.publish.parity_bound or (1e-4 if self.model.served_dtype == "float32" else 0.25)
