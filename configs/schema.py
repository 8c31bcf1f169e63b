"""Config of a run: all sections and the checks across them.

Every field can be overridden on the command line as `--config.section.field=value` (`configs/overrides.py`). Checks of
one section are in its `__post_init__`.
"""

import dataclasses
import math
from typing import Literal

from configs import custom_functions
from configs.sections import (
    ActorConfig,
    AdmissionConfig,
    CheckpointConfig,
    CriticConfig,
    EnvironmentsConfig,
    EvaluationConfig,
    HelpersConfig,
    JudgeConfig,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PromptsConfig,
    PublishConfig,
    RewardsConfig,
    RoundsConfig,
    RunConfig,
    SamplesConfig,
    SamplingConfig,
    SftConfig,
    StoreConfig,
    SupervisionConfig,
)
from configs.sections.evaluation import EvaluationSet
from configs.sections.prompts import PromptSource
from configs.sections.teacher_rows import check_teachers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Config of a whole run."""

    preset: str
    """Name of the preset that the config came from. It is a label without effect."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: RewardsConfig = RewardsConfig()
    judge: JudgeConfig = JudgeConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    sampling: SamplingConfig = SamplingConfig()
    rounds: RoundsConfig = RoundsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    publish: PublishConfig = PublishConfig()
    loss: LossConfig = LossConfig()
    sft: SftConfig = SftConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    packing: PackingConfig = PackingConfig()
    mesh: MeshConfig = MeshConfig()
    learner: LearnerConfig = LearnerConfig()
    helpers: HelpersConfig = HelpersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    samples: SamplesConfig = SamplesConfig()
    actor: ActorConfig = ActorConfig()
    store: StoreConfig = StoreConfig()
    supervision: SupervisionConfig = SupervisionConfig()

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid combination of sections."""
        if (self.admission.policy == "window") != (self.publish.when == "every"):
            raise ValueError(
                "admission.policy=window and publish.when=every require each other (a window has no round to end), "
                f"got {self.admission.policy} and {self.publish.when}"
            )
        self._check_lengths()
        self._check_warm_up()
        if self.publish.when == "every":
            self._check_window()
        else:
            self._check_rounds()
        self.loss.check_proximal(publish_when=self.publish.when, steps_per_proximal=self.steps_per_proximal)
        self.packing.check_whole_groups(
            veto=self.loss.correction.veto, group_size=self.rounds.samples_per_group, max_tokens=self.model.max_tokens
        )
        self.critic.check_beside(self.loss, self.rounds, self.helpers)
        if self.evaluation.num_problems == 0 and self.publish.probe_every_n_publishes > 0:
            raise ValueError(
                "evaluation.num_problems=0 leaves no problems for probes. Set publish.probe_every_n_publishes=0"
            )
        if self.loss.name == "dapo" and not self.rounds.filter_zero_variance:
            raise ValueError(
                "loss.name=dapo requires rounds.filter_zero_variance=True (dynamic sampling), got False. Set it, or "
                "loss.name=grpo_clip and loss.clip_high=0.28"
            )
        self.judge.check_beside(self.actor.gpu_memory_utilization)
        self._check_evaluation()
        if "judge" in self.parts and not self.judge.is_on:
            raise ValueError("verifier=judge requires judge.url with judge.model, or judge.colocate")
        self._check_devices()
        if self.model.routing_replay and not self.actor.prefix_caching:
            raise ValueError("model.routing_replay requires actor.prefix_caching=True, got False")
        self._check_lora()
        self._check_helpers()
        check_teachers(
            self.loss,
            self.prompts,
            num_helpers=self.helpers.num_engines,
            temperature=self.sampling.temperature,
        )
        self.sft.check_beside(
            model=self.model,
            loss=self.loss,
            prompts=self.prompts,
            sampling=self.sampling,
            rounds=self.rounds,
            actor=self.actor,
            helpers=self.helpers,
            sources=self.asked_sources,
        )

    @property
    def shares_devices(self) -> bool:
        """True if engines give their devices up while others train."""
        return self.actor.colocated or self.helpers.num_engines > 0

    def _check_warm_up(self) -> None:
        num_steps = self.run.num_updates * self.rounds.epochs
        if self.optimizer.warmup_steps > num_steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) must be at most the run's {num_steps} "
                "optimizer steps (run.num_updates x rounds.epochs), or optimizer.learning_rate is never reached. "
                "Lower it, or raise run.num_updates"
            )

    def _check_lengths(self) -> None:
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
        if self.loss.overlong_tokens >= self.sampling.max_response_tokens:
            raise ValueError(
                f"loss.overlong_buffer_tokens (here {self.loss.overlong_tokens}; dapo's default is 4096) must be below "
                f"sampling.max_response_tokens ({self.sampling.max_response_tokens}), or every response is penalized"
            )

    def _check_window(self) -> None:
        rounds, every = self.rounds, self.publish.every_n_steps
        if rounds.overprovision_prompts > 1 and self.sequences < rounds.groups_per_race * rounds.requests_per_group:
            raise ValueError(
                f"rounds.overprovision_prompts: expected admission.sequences >= {rounds.groups_per_race} groups of "
                f"{rounds.requests_per_group} sequences (eta_P U, eta_R K), sampled concurrently, got "
                f"{self.sequences}. Raise admission.sequences or admission.width"
            )
        if rounds.train_start == "round_complete":
            raise ValueError("rounds.train_start=round_complete requires publish.when=round_end")
        if self.max_lag_steps is not None and self.max_lag_steps < every - 1:
            field = "rounds.max_lag_steps" if self.max_lag_steps == rounds.max_lag_steps else "admission.async_ratio"
            raise ValueError(
                f"{field} ({self.max_lag_steps}) is below publish.every_n_steps - 1 = {every - 1}, the lag of the "
                "newest weights right before a publish; every group would exceed the lag bound and be dropped"
            )

    def _check_rounds(self) -> None:
        rounds, steps_per_round = self.rounds, self.rounds.groups_per_round // self.rounds.groups_per_update
        if rounds.overprovision_prompts > 1 and self.admission.policy == "frontier":
            raise ValueError(
                "rounds.overprovision_prompts requires admission.policy=fifo: with a frontier, the last prompts issued "
                "lose instead of the long ones"
            )
        if rounds.ess_floor > 0:
            raise ValueError(
                "rounds.ess_floor requires publish.when=every: within a round the engines have no newer weights to "
                "sample a new batch with"
            )
        if rounds.max_lag_steps is not None and rounds.max_lag_steps < steps_per_round - 1:
            raise ValueError(
                f"rounds.max_lag_steps ({rounds.max_lag_steps}) is below R/U - 1 = {steps_per_round - 1}, "
                "the lag of a round's last update; every group would exceed the lag bound and be dropped"
            )
        if self.run.num_updates % steps_per_round:
            raise ValueError(
                f"run.num_updates ({self.run.num_updates}) must be a multiple of the round's "
                f"{steps_per_round} updates (R/U)"
            )

    def _check_evaluation(self) -> None:
        for name, one in self.evaluation_sets.items():
            if one.has_source:
                one.check(f"evaluation.sets.{name}")
            if one.max_tokens >= self.model.max_tokens:
                raise ValueError(
                    f"evaluation.sets.{name}.max_tokens ({one.max_tokens}) must leave room for a prompt in "
                    f"model.max_tokens ({self.model.max_tokens})"
                )

    def _check_devices(self) -> None:
        if self.packing.rows % self.mesh.batch_shards:
            raise ValueError(
                f"packing.rows ({self.packing.rows}) must be a multiple of mesh.data * mesh.fsdp * mesh.expert "
                f"({self.mesh.batch_shards})"
            )
        if self.mesh.num_devices % self.learner.num_processes:
            raise ValueError(
                f"learner.num_processes ({self.learner.num_processes}) must divide the {self.mesh.num_devices} "
                "devices of the mesh evenly"
            )
        waits = self.rounds.train_start == "round_complete" or self.helpers.num_engines > 0
        if self.actor.colocated and (not waits or self.learner.num_processes > 1):
            raise ValueError(
                "actor.colocated requires rounds.train_start=round_complete (or helpers.num_engines) and "
                f"learner.num_processes=1, got {self.rounds.train_start} and {self.learner.num_processes}; engines "
                "sleep while the learner trains"
            )
        if self.shares_devices and (self.publishes_adapters or self.judge.colocate):
            sharing = "actor.colocated" if self.actor.colocated else "helpers.num_engines"
            field = "publish.lora=adapter" if self.publishes_adapters else "judge.colocate"
            raise ValueError(
                f"{sharing} requires other settings than {field}: a sleeping engine frees all memory of its "
                "devices, and takes only published weights when it wakes"
            )
        if self.packing.row_tokens % self.mesh.sequence:
            raise ValueError(
                f"packing.row_tokens ({self.packing.row_tokens}) must be a multiple of mesh.sequence "
                f"({self.mesh.sequence})"
            )

    def _check_helpers(self) -> None:
        helpers, rounds = self.helpers, self.rounds
        if not helpers.num_engines:
            return
        if (
            self.publish.when != "round_end"
            or rounds.train_start != "group_ready"
            or rounds.groups_per_update != rounds.groups_per_round
            or rounds.epochs > 1
        ):
            raise ValueError(
                "helpers.num_engines requires one update per round, trained as groups arrive: publish.when=round_end, "
                "rounds.train_start=group_ready, rounds.groups_per_update=rounds.groups_per_round and rounds.epochs=1. "
                "A helper has only the parameters of the round's start"
            )
        if self.environments_played:
            raise ValueError("helpers.num_engines requires problems without environments: episodes are not handed over")
        if self.packing.auto:
            raise ValueError("helpers.num_engines requires packing.auto=False: a helper compiles one shape ahead")
        if not self.lora.is_on and self.model.served_dtype != self.model.compute_dtype:
            raise ValueError(
                f"helpers.num_engines requires model.served_dtype=model.compute_dtype, got {self.model.served_dtype} "
                f"and {self.model.compute_dtype}: a helper computes with the published weights"
            )

    def _check_lora(self) -> None:
        if self.publish.lora != "adapter":
            return
        if not self.lora.is_on:
            raise ValueError("publish.lora=adapter requires lora.rank > 0. Set it, or publish.lora=merged")
        if self.publish.kv_cache == "recompute":
            raise ValueError(
                "publish.kv_cache=recompute has no effect with publish.lora=adapter, where running requests finish "
                "under the adapter they started with; leave it out"
            )

    @property
    def admission_width(self) -> int:
        """Largest number of groups in service, with the default filled in. 0: unlimited, or chosen during the run."""
        if self.admission.width != "auto":
            return self.admission.width
        if self.admission.policy != "window":
            return 0
        return math.floor((1 + self.alpha) * self.rounds.groups_per_race)

    @property
    def chooses_width(self) -> bool:
        """True if the frontier's width is chosen from the speed of the engines."""
        return self.admission.policy == "frontier" and self.admission.width == "auto"

    @property
    def sequences(self) -> int:
        """Sequences H in service in a window, summed over all actors, with the default filled in."""
        return self.admission.sequences or self.admission_width * self.rounds.requests_per_group

    @property
    def queue_groups(self) -> int:
        """Complete groups of a window that can wait for the learner, with the default filled in.

        Default: U groups, or (1 + alpha) U with an async ratio.
        """
        num_updates = 1.0 if self.admission.async_ratio is None else 1 + self.alpha
        default = math.floor(num_updates * self.rounds.groups_per_update)
        if self.admission.async_ratio is not None:
            default = default if self.admission.width == "auto" else self.admission.width
        return self.admission.queue_groups or default

    @property
    def steps_per_proximal(self) -> int:
        """Optimizer steps per proximal policy: rounds.epochs times the updates (1, R/U, or those of a publish).

        1: pi_prox is the policy at every gradient. `rounds.epochs`: no copy of pi_prox is needed.
        """
        updates = {
            "batch": 1,
            "round": self.rounds.groups_per_round // self.rounds.groups_per_update,
            "published": self.publish.every_n_steps,
        }
        return updates[self.loss.proximal] * self.rounds.epochs

    @property
    def max_ready_groups(self) -> int | None:
        """Complete groups that can wait before the oldest is discarded. None: never discarded."""
        return None if self.admission.when_full == "block" else self.queue_groups

    @property
    def max_lag_steps(self) -> int | None:
        """Largest lag of the start of a trained sample, in updates: alpha rounded up, or the hard bound."""
        alpha = self.admission.async_ratio
        bounds = [None if alpha is None else math.ceil(alpha), self.rounds.max_lag_steps]
        return min((b for b in bounds if b is not None), default=None)

    @property
    def alpha(self) -> float:
        """Async ratio; 3 if unset, for a window of 4 U."""
        return 3.0 if self.admission.async_ratio is None else self.admission.async_ratio

    @property
    def publishes_adapters(self) -> bool:
        """True if only adapters are published; the engines hold the base weights."""
        return self.publish.lora == "adapter"

    @property
    def base_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype of the base weights under adapters: the wider of compute_dtype and served_dtype."""
        return "float32" if "float32" in (self.model.compute_dtype, self.model.served_dtype) else "bfloat16"

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """All evaluation sets by name, in evaluation order, with defaults filled in."""
        sets = self.evaluation.resolved
        return {
            name: dataclasses.replace(
                self.prompts.filled_in(one) if one.has_source else one,
                max_tokens=one.max_tokens or self.sampling.max_response_tokens,
            )
            for name, one in sets.items()
        }

    @property
    def groups_per_update(self) -> int:
        """Groups, or rows of a supervised run, that an update trains."""
        return self.sft.rows_per_update if self.loss.is_supervised else self.rounds.groups_per_update

    @property
    def asked_sources(self) -> dict[str, PromptSource]:
        """All problem sources for training and evaluation, by config path."""
        train = {f"prompts.mixture.{name}" if name else "prompts": s for name, s in self.prompts.sources.items()}
        sets = {f"evaluation.sets.{name}": s for name, s in self.evaluation_sets.items() if s.has_source}
        return {**train, **sets}

    @property
    def parts(self) -> dict[str, float]:
        """Verifier weights of rows without their own rewards, by verifier. The last source wins for equal names."""
        return {name: weight for source in self.asked_sources.values() for name, weight in source.parts.items()}

    @property
    def environments_played(self) -> tuple[str, ...]:
        """Environments of all problem sources."""
        return tuple(dict.fromkeys(s.environment for s in self.asked_sources.values() if s.environment))

    @property
    def custom_environments(self) -> tuple[str, ...]:
        """Custom environments of all problem sources."""
        return tuple(filter(custom_functions.is_custom, self.environments_played))

    @property
    def custom_verifiers(self) -> tuple[str, ...]:
        """Custom verifiers. Rows cannot name any others."""
        return tuple(name for name in self.parts if custom_functions.is_custom(name))

    @property
    def run_dir(self) -> str:
        """Folder of the run."""
        return self.run.dir or f"runs/{self.run.name}"

    @property
    def parity_bound(self) -> float:
        """Tolerance of a parity probe, with the default filled in."""
        return self.publish.parity_bound or (1e-4 if self.model.served_dtype == "float32" else 0.25)
