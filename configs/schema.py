"""The configuration: frozen, validated dataclasses, one section a part of the system.

A preset (`configs/<name>.py`) is a function `get_config()` that returns a `Config`. Every field can
be overridden on the command line as `--config.section.field=value` (`configs/overrides.py`).
Checks of one section live in its `__post_init__`; checks across sections in `Config`'s.
"""

import dataclasses
import math

from configs.sections import (
    ActorConfig,
    AdmissionConfig,
    CheckpointConfig,
    EvaluationConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PromptsConfig,
    PublishConfig,
    RoundsConfig,
    RunConfig,
    SamplingConfig,
)


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
        """Refuses what one section alone can't see."""
        if (self.admission.policy == "window") != (self.publish.when == "every"):
            raise ValueError(
                "admission.policy=window and publish.when=every go together (a window has no round to end), "
                f"got {self.admission.policy} and {self.publish.when}"
            )
        self._check_lengths()
        if self.publish.when == "every":
            self._check_window()
        else:
            self._check_rounds()
        if self.evaluation.num_problems == 0 and self.publish.probe_every_n_publishes > 0:
            raise ValueError(
                "evaluation.num_problems=0 leaves the probes no problems; set publish.probe_every_n_publishes=0 too"
            )
        self._check_devices()

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
                f"sampling.max_response_tokens ({self.sampling.max_response_tokens}), or every response is punished"
            )

    def _check_window(self) -> None:
        rounds, width, every = self.rounds, self.admission_width, self.publish.every_n_steps
        if rounds.overprovision_prompts > 1:
            raise ValueError(
                "rounds.overprovision_prompts needs publish.when=round_end: a window has no round whose first R groups "
                "could win"
            )
        if rounds.train_start == "round_complete":
            raise ValueError("rounds.train_start=round_complete needs publish.when=round_end")
        if rounds.max_lag_steps is not None and rounds.max_lag_steps < every - 1:
            raise ValueError(
                f"rounds.max_lag_steps ({rounds.max_lag_steps}) is below publish.every_n_steps - 1 = "
                f"{every - 1}, the lag of the newest weights right before a publish; such a run would drop all "
                "groups for ever"
            )
        if 0 < self.admission.queue_groups < rounds.groups_per_update:
            raise ValueError(
                f"admission.queue_groups ({self.admission.queue_groups}) must be at least rounds.groups_per_update "
                f"({rounds.groups_per_update}), or an update's groups drop each other"
            )
        if width < rounds.groups_per_update:
            raise ValueError(
                f"admission.width ({self.admission.width}) must be at least rounds.groups_per_update "
                f"({rounds.groups_per_update}), or an update never fills"
            )
        if self.loss.proximal == "round":
            raise ValueError(
                "loss.proximal=round needs publish.when=round_end: a window has no rounds whose start could be kept; "
                "take loss.proximal=update"
            )

    def _check_rounds(self) -> None:
        rounds, steps_per_round = self.rounds, self.rounds.groups_per_round // self.rounds.groups_per_update
        if rounds.overprovision_prompts > 1 and self.admission.policy == "frontier":
            raise ValueError(
                "rounds.overprovision_prompts needs admission.policy=fifo: behind a frontier the last prompts issued "
                "would lose, not the long ones"
            )
        if rounds.ess_floor > 0:
            raise ValueError(
                "rounds.ess_floor needs publish.when=every: inside a round the engines have no newer weights to sample "
                "a fresh batch by"
            )
        if rounds.max_lag_steps is not None and rounds.max_lag_steps < steps_per_round - 1:
            raise ValueError(
                f"rounds.max_lag_steps ({rounds.max_lag_steps}) is below R/U - 1 = {steps_per_round - 1}, "
                "the lag of a round's last update; such a run would drop groups for ever"
            )
        if self.run.num_updates % steps_per_round:
            raise ValueError(
                f"run.num_updates ({self.run.num_updates}) must be a multiple of the round's "
                f"{steps_per_round} updates (R/U)"
            )

    def _check_devices(self) -> None:
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
