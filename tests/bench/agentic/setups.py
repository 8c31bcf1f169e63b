"""What is run: episodes, engine, and each schedule's configuration. All chosen before anything was run.

Latencies are the issue's and the paper's kind (ROLL Flash, section 5.2): normal with mean 10 s and a deviation of 1 to
10, what is below 0 left out, at each step of an environment; time runs `SPEED` times as fast. Sizes of the agentic runs
are not in the text of it that we have. They are from the published system's examples of asynchronous agentic training:
groups of 8 (its example of environment groups) and batches of 64 trajectories (its web shop). Turns are 10, ours. An
action is 32 tokens at 32 tokens a second, ours: what the environments take is ten times as long, as where their latency
is what is asked about. A token here stands for `TOKENS` of those.

All schedules have as many environments as a batch has episodes, but for the redundant ones, which have what eta asks
for. A window that had alpha + 1 batches of them in progress would look faster by having more environments, not by how
it schedules them.
"""

import dataclasses
from collections.abc import Mapping

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from launch.tools.plan.profile import EngineProfile
from tests.bench.agentic.sleeping import NAME
from tests.bench.rig.lengths import Work
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config

SPEED, TOKENS = 100.0, 8
MEAN_S = 10.0 / SPEED
DEVIATIONS_S = (1.0 / SPEED, 2.5 / SPEED, 5.0 / SPEED, 10.0 / SPEED)
NUM_TURNS = 10
TURN_TOKENS = 32 // TOKENS
TOKENS_PER_S = 32.0 / TOKENS * SPEED
"""Of one sequence, however many run: a step that is bound by memory."""
U, K = 8, 8
ALPHA = 2.0
"""ROLL Flash's recommendation, and `roll_flash`'s."""
ETA = 1.25
"""RollPacker's, for prompts and for samples; the text of ROLL Flash that we have gives none."""
PLACES = 256
"""Sequences that the engine may run at once: more than there are environments."""
MAX_RESPONSE = 96


def engine_profile() -> EngineProfile:
    """The engine."""
    return EngineProfile(
        running=(1.0, float(PLACES)), tokens_per_s=(TOKENS_PER_S, PLACES * TOKENS_PER_S), max_num_seqs=PLACES
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A schedule."""

    name: str
    in_lock_step: bool = False
    by_window: bool = False
    eta: float = 1.0
    """Of prompts and samples."""
    samples: int = K
    groups: int = U
    seed: int = 0
    """Of the prompts, and so of the latencies."""

    @property
    def rounds(self) -> RoundsConfig:
        return RoundsConfig(
            groups_per_round=self.groups,
            groups_per_update=self.groups,
            samples_per_group=self.samples,
            overprovision_prompts=self.eta,
            overprovision_samples=self.eta,
            train_start="group_ready" if self.by_window else "round_complete",
        )

    @property
    def num_environments(self) -> int:
        """At once."""
        return self.rounds.groups_per_race * self.rounds.requests_per_group

    def config(self, num_updates: int) -> Config:
        """A run of so many updates."""
        window: Mapping[str, object] = dict(
            policy="window", async_ratio=ALPHA, sequences=self.num_environments, unit="sample"
        )
        config = make_config(
            self.name,
            num_updates=num_updates,
            rounds=self.rounds,
            admission=AdmissionConfig(**(window if self.by_window else {"unit": "sample"})),  # pyright: ignore[reportArgumentType]
            publish=PublishConfig(when="every" if self.by_window else "round_end"),
            max_response_tokens=MAX_RESPONSE,
            max_num_seqs=PLACES,
            packing=PackingConfig(rows=2, row_tokens=512),
            seed=self.seed,
        )
        return dataclasses.replace(config, actor=dataclasses.replace(config.actor, cpu_cores=""))

    def session(
        self, num_updates: int, deviation_s: float, *, num_turns: int = NUM_TURNS, mean_s: float = MEAN_S
    ) -> Session:
        """The same with environments of a deviation."""
        work = Work(
            environment=NAME,
            num_turns=num_turns,
            turn_tokens=TURN_TOKENS,
            mean_s=mean_s,
            deviation_s=deviation_s,
            lock_step=self.groups * self.samples if self.in_lock_step else 0,
        )
        return Session(config=self.config(num_updates), engine=engine_profile(), episodes=work)


BATCH = Setup(name="batch rollout", in_lock_step=True)
ALONE = Setup(name="each for itself, by rounds")
WINDOW = Setup(name="each for itself, in a window", by_window=True)
REDUNDANT = Setup(name="the same, and 1.25 x 1.25 as many", by_window=True, eta=ETA)
SETUPS = (BATCH, ALONE, WINDOW, REDUNDANT)
