"""What is run: the fleet's engines, the lengths, and each schedule's configuration.

All were chosen before anything was run, except `REDUNDANT_PROMPTS`, which was chosen by what the oracle made of it.

The fleet is RollPacker's middle setting (section 6): 16 engines of Qwen2.5-14B over two H800 each, whose step is the
roofline of `tests.bench.papers.inputs`, at a context of half of the longest response: what is decoded longest is. It
is scaled down so that a round takes seconds: a token stands for `TOKENS` of them, and time runs `SPEED` times as fast.
Not faster: all actors share one core, and what hundreds of samples a round cost there must be little beside a round.
"""

import dataclasses
from collections.abc import Mapping

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from launch.tools.plan.profile import EngineProfile
from tests.bench.papers.inputs import CALIBRATED, SETTINGS
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config

PAPER = next(s for s in SETTINGS if s.name == CALIBRATED)
NUM_ENGINES = PAPER.num_engines
PLACES = 32
"""Of an engine: for a round's requests to run at once, as the papers' do."""
TOKENS, SPEED = 64, 8.0
MAX_RESPONSE = PAPER.max_tokens // TOKENS
R, K, MANY = 32, 8, 16
"""Groups a round, samples a group: two groups an engine. MANY samples where they are what is asked about (ROLL Flash's
own number, `roll_flash`)."""
ETA = 1.25
"""Of the presets that have any."""
FLAT_SHARE = 0.5
"""Of the prompts, whose groups are filtered out. The text that we have doesn't say; with half of them a round samples
each of its groups twice on average."""

TAIL = Lengths(
    kind="tail", max_tokens=MAX_RESPONSE, max_over_p75=16, long_prompts=0.1, stray_samples=0.03, sample_sigma=0.3
)
"""RollPacker's shape (section 2.2), as in `tests.bench.tail`: it is mostly the prompt that makes a response long."""
STRAGGLERS = Lengths(kind="lognormal", max_tokens=MAX_RESPONSE, median=24, prompt_sigma=0.3, sample_sigma=0.8)
"""For redundant samples: what makes a response long is mostly its own luck, as where an environment is slow."""


def engine_profile(places: int = PLACES) -> EngineProfile:
    """The scaled engine."""
    running = [h for h in (1, 2, 4, 8, 16, 32, 64) if h <= places]
    context = PAPER.max_tokens / 2
    return EngineProfile(
        running=tuple(map(float, running)),
        tokens_per_s=tuple(h / PAPER.step_s(h, context) / TOKENS * SPEED for h in running),
        max_num_seqs=places,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A schedule over the fleet."""

    name: str
    samples: int = K
    rounds: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Fields of `RoundsConfig` beside the sizes."""
    unit: str = "group"
    lengths: Lengths = TAIL
    flat_share: float = 0.0
    is_batch_rollout: bool = False
    """What queue scheduling replaces, which is no mode of ours."""
    by_window: bool = False
    """As `roll_flash` has it: alpha = 2, a publish after every update."""
    groups_per_update: int = R
    policy: str = "fifo"
    seed: int = 0
    """Of the prompts, and so of the lengths."""

    def config(self, num_rounds: int, *, num_engines: int = NUM_ENGINES) -> Config:
        """A run of so many rounds."""
        config = make_config(
            self.name,
            num_updates=num_rounds * R // self.groups_per_update,
            rounds=RoundsConfig(
                groups_per_round=R,
                samples_per_group=self.samples,
                groups_per_update=self.groups_per_update,
                **self.rounds,  # pyright: ignore[reportArgumentType]
            ),
            admission=AdmissionConfig(
                policy="window" if self.by_window else self.policy,  # pyright: ignore[reportArgumentType]
                async_ratio=2.0 if self.by_window else None,
                unit=self.unit,  # pyright: ignore[reportArgumentType]
            ),
            publish=PublishConfig(when="every" if self.by_window else "round_end"),
            max_response_tokens=MAX_RESPONSE,
            max_num_seqs=PLACES,
            packing=PackingConfig(rows=2, row_tokens=512),
            seed=self.seed,
        )
        return dataclasses.replace(
            config, actor=dataclasses.replace(config.actor, num_engines=num_engines, cpu_cores="")
        )

    def session(self, num_rounds: int, *, num_engines: int = NUM_ENGINES, passes_per_token: float = 0.0) -> Session:
        """The same, at a training cost."""
        return Session(
            config=self.config(num_rounds, num_engines=num_engines),
            lengths=self.lengths,
            flat_share=self.flat_share,
            passes_per_token=passes_per_token,
            engine=engine_profile(),
        )


FILTERED = {"filter_zero_variance": True}
BATCH = Setup(name="batch rollout", rounds=FILTERED, flat_share=FLAT_SHARE, is_batch_rollout=True)
QUEUE = Setup(name="queue scheduling alone", rounds=FILTERED, flat_share=FLAT_SHARE)
REDUNDANT_PROMPTS = 16
"""Prompts that run beside those of a round (`max_additional_running_prompts` of ROLL's public examples). The text that
we have gives neither this number nor batch sizes; without such prompts even ideal dispatch stays below its 2.4."""
QUEUE_REDUNDANT = Setup(
    name="queue scheduling",
    rounds={**FILTERED, "overprovision_prompts": 1 + REDUNDANT_PROMPTS / R},
    flat_share=FLAT_SHARE,
)
WHOLE = Setup(name="whole groups", samples=MANY)
REPLICATED = Setup(name="single samples", samples=MANY, unit="sample")
ALL_COUNT = Setup(name="K requests", lengths=STRAGGLERS, unit="sample")
REDUNDANT = Setup(name="1.25 K requests", lengths=STRAGGLERS, unit="sample", rounds={"overprovision_samples": ETA})
SERIAL = Setup(name="serial", rounds={"train_start": "round_complete"})
RACES = {"overprovision_prompts": ETA, "overprovision_samples": ETA}
TAIL_BATCHING = Setup(name="tail batching", rounds={**RACES, "train_start": "round_complete"})
ROLLPACKER = Setup(name="tail batching, streamed", rounds=RACES)
PAIRS = {
    "queue_without_redundant_prompts_speedup": (BATCH, QUEUE),
    "queue_scheduling_speedup": (BATCH, QUEUE_REDUNDANT),
    "replication_speedup": (WHOLE, REPLICATED),
    "redundant_speedup": (ALL_COUNT, REDUNDANT),
    "rollpacker_speedup": (SERIAL, TAIL_BATCHING),
    "rollpacker_and_streaming_speedup": (SERIAL, ROLLPACKER),
}
"""Result's key -> what is compared with what. Tail batching alone differs from `serial` in nothing else; the last pair
differs in two mechanisms, as training that hides behind the rollout gains without any tail batching."""
TRAINED = (SERIAL, TAIL_BATCHING, ROLLPACKER)
"""Those compared with their training; the others by their rollouts."""
ROLLOUTPIPE = Setup(name="rolloutpipe", policy="frontier", groups_per_update=8)
ROLL_FLASH = Setup(
    name="roll_flash", by_window=True, unit="sample", rounds={"overprovision_samples": ETA}, groups_per_update=8
)
"""Run to see that they work on a fleet; nothing is compared."""
