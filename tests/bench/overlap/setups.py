"""What is run: engines, modes, and the configuration of each."""

import dataclasses

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, RoundsConfig
from launch.tools.plan.profile import EngineProfile
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config

SCHEDULES = {
    "serial": ("round_complete", "fifo"),
    "cgp": ("group_ready", "fifo"),
    "rolloutpipe": ("group_ready", "frontier"),
}
"""By mode: when training starts, and who is admitted."""
SIZES = (32, 64, 96)
K, U = 8, 2
MAX_RESPONSE = 192
LENGTHS = Lengths(kind="lognormal", max_tokens=MAX_RESPONSE, median=15, prompt_sigma=0.7, sample_sigma=0.25)
ROUNDS = 2
"""Of each mode at each size and engine, in one session."""
MANY = 32
"""Places of an engine that holds more than the frontier's F_w K = 16 requests: twice as many."""
PACED_TOKENS_PER_S = 4000.0
"""So that a round of 96 groups takes seconds; what it takes to train is set by it, so it cancels out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine, and the modes that are measured on it."""

    name: str
    key: str
    """After `fgd_over_cgp_pct`, in the result's keys."""
    max_num_seqs: int
    engine: EngineProfile | None = None
    """A paced engine; None for the real one."""
    modes: tuple[str, ...] = ("cgp", "rolloutpipe")

    def config(self, mode: str, groups: int, num_rounds: int = ROUNDS) -> Config:
        """A run of `num_rounds` rounds of a mode."""
        train_start, policy = SCHEDULES[mode]
        return make_config(
            mode,
            num_updates=num_rounds * groups // U,
            rounds=RoundsConfig(
                groups_per_round=groups,
                samples_per_group=K,
                groups_per_update=U,
                train_start=train_start,  # pyright: ignore[reportArgumentType]
            ),
            admission=AdmissionConfig(policy=policy),  # pyright: ignore[reportArgumentType]
            max_response_tokens=MAX_RESPONSE,
            max_num_seqs=self.max_num_seqs,
            packing=PackingConfig(rows=1, row_tokens=320),
        )

    def session(self, mode: str, groups: int, num_rounds: int = ROUNDS, *, passes_per_token: float = 0.0) -> Session:
        """The same, at a training cost."""
        return Session(
            config=self.config(mode, groups, num_rounds),
            lengths=LENGTHS,
            passes_per_token=passes_per_token,
            engine=self.engine,
        )


FEW_PLACES = Setup(name="8 places", key="_few", max_num_seqs=8, modes=("serial", "cgp", "rolloutpipe"))
"""Fewer than F_w K = 16: the frontier's second group fills what the first one's short responses leave."""
MANY_PLACES = Setup(name="32 places", key="", max_num_seqs=MANY)
"""The real engine with more than F_w K: what the frontier gains on it is what the paper's gains are held against."""
FLAT = Setup(
    name="32 places, paced, flat from 8 on",
    key="_paced",
    max_num_seqs=MANY,
    engine=EngineProfile(running=(8.0,), tokens_per_s=(PACED_TOKENS_PER_S,), max_num_seqs=MANY),
)
"""An engine on which the paper's result is possible, made from the paper's own numbers (`tests.bench.overlap`); so what
it gains is scored against none of them."""
