"""RolloutPipe's Sci-XW at K = 8, U = 2, R = 96: calibrated on serial numbers, asked for CGP and CGP+FGD.

Published of serial (Slime): trainer compute 191.8, 379.9, 572.2 s at R = 32, 64, 96 (Table 1); a waiting ratio of
47-52 % over twelve settings (section 5.3), none of them named; a first dispatch of 509-543 s at R = 96 over four
workloads (section 5.2). Serial trains after its rollout, so that takes compute x w / (1 - w), and the rollout is taken
to be affine in R: a latency once a round, and a time a group. From w at R = 32 and at R = 96 follow both.

Two kinds of things had to be chosen beyond that, and the prediction depends on them:

* The waiting ratios. The central choice is 52 % at R = 32 and 47 % at R = 96. If the paper's smallest reduction of
  the ratio, 37 %, belongs to its largest ratio under CGP+FGD, 33 % (at R = 32, as all else there), then that setting's
  serial ratio is 0.33 / (1 - 0.37) = 52 %; and 509-543 s of first dispatch at R = 96 beside Sci-XW's compute make
  47.1-48.7 %. `sweep` tries all pairs of 47, 49.5 and 52 %. Some no engine can have: with a higher ratio at R = 96
  than at R = 32 the latency would be negative.
* Two parameters of the engine's shape, which the serial column leaves open, because it only says how long R groups take
  together: the number of places (`max_num_seqs`) and from how many running sequences on the throughput is constant
  (`saturates_at`). They were chosen with CGP's and CGP+FGD's own numbers in sight, so their prediction is no blind
  one. 16 places: F_w K, since the paper sizes F_w by what the engine's memory holds; and because CGP's first dispatch
  at 46-90 s excludes that 768 requests share the engine (256 of them would complete the first groups after 200 s).
  Constant from 1 on: CGP+FGD runs at most 16 sequences and hardly waits after its first groups, so few sequences must
  be served about as fast as many.

`sweep` therefore predicts with every pair of ratios and every shape, and its range stands beside the central values.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from configs.presets import rolloutpipe
from configs.schema import Config
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile

COMPUTE_S = {32: 191.8, 64: 379.9, 96: 572.2}
SERIAL_RATIOS = (0.47, 0.495, 0.52)
"""The ends and the middle of serial's published waiting ratios."""
SERIAL_FIRST_DISPATCH_S = (509.0, 543.0)
"""At R = 96, over four workloads."""
PAPER_S = {"cgp": 659.0, "cgp_fgd": 642.0}
PAPER_FIRST_DISPATCH_S = {"cgp": (46.0, 90.0), "cgp_fgd": (52.0, 61.0)}
PAPER_WAITING_RATIO = {"cgp": None, "cgp_fgd": (0.138, 0.150)}
"""At R = 96 over four workloads; CGP's is not given. Sci-XW's own 642 s and 577.3 s of compute (Table 1) leave 10.1 %,
so the published ratio is not of the same span as the main time."""
MEAN_TOKENS = 3450.0
"""Responses are 3.3k to 3.6k tokens long (Figure 5); it cancels out of everything but the tokens/s."""
SIGMA = 0.5
"""Of the logarithm of the lengths; the paper doesn't say."""
NUM_ROUNDS = 4
_FITS, _NEARLY = 1e-3, 0.01
"""Relative: what a calibration is content with; and what it may be off where the latency can go no lower than 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the serial column leaves open of the engine."""

    max_num_seqs: int
    saturates_at: int
    """Running sequences from which the throughput is constant; below it is proportional to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratios:
    """Serial's waiting ratios, which the paper gives as a range only."""

    at_32: float
    at_96: float

    def rollout_s(self, R: int) -> float:
        """Serial's rollout of R groups (32 or 96): compute x w / (1 - w)."""
        w = {32: self.at_32, 96: self.at_96}[R]
        return COMPUTE_S[R] * w / (1 - w)

    def affine(self) -> tuple[float, float]:
        """(seconds before the first group, seconds a group) of serial's rollout."""
        slope = (self.rollout_s(96) - self.rollout_s(32)) / (96 - 32)
        return self.rollout_s(32) - 32 * slope, slope


CHOSEN, CHOSEN_RATIOS = Shape(max_num_seqs=16, saturates_at=1), Ratios(at_32=0.52, at_96=0.47)
SHAPES = [Shape(max_num_seqs=n, saturates_at=1) for n in (16, 32, 64, 256)] + [
    Shape(max_num_seqs=16, saturates_at=s) for s in (4, 8, 16)
]
RATIOS = [Ratios(at_32=a, at_96=b) for a, b in itertools.product(SERIAL_RATIOS, SERIAL_RATIOS)]


def config_of(name: str, R: int) -> Config:
    """A preset at R groups a round."""
    config = {"serial": rolloutpipe.serial, "cgp": rolloutpipe.cgp, "cgp_fgd": rolloutpipe.rolloutpipe}[name]("paper")
    rounds = dataclasses.replace(config.rounds, groups_per_round=R, groups_per_update=2, samples_per_group=8)
    return dataclasses.replace(config, rounds=rounds, run=dataclasses.replace(config.run, num_updates=R // 2))


def profile_of(shape: Shape, *, tokens_per_s: float, start_latency_s: float) -> Profile:
    """Hardware of that shape. The latency before the first group comes once a round, when its tickets are issued."""
    compute_s_per_group = (COMPUTE_S[96] / 96 + COMPUTE_S[64] / 64 + COMPUTE_S[32] / 32) / 3
    return Profile(
        engine=EngineProfile(
            running=(float(shape.saturates_at),), tokens_per_s=(tokens_per_s,), max_num_seqs=shape.max_num_seqs
        ),
        response_tokens=LengthProfile(kind="lognormal", median=MEAN_TOKENS / math.exp(SIGMA**2 / 2), sigma=SIGMA),
        prompt_tokens=LengthProfile(kind="samples", samples=(1,)),
        learner=LearnerProfile(seconds_per_token=compute_s_per_group / (8 * (MEAN_TOKENS + 1))),
        claim_s=start_latency_s,
    )


def run(name: str, R: int, profile: Profile) -> SimResult:
    """Four rounds, as in the paper."""
    return simulate(config_of(name, R), profile, num_updates=NUM_ROUNDS * R // 2)


def serial_rollout_s(R: int, profile: Profile) -> float:
    """Simulated."""
    return run("serial", R, profile).round_mean("first_dispatch_s")


def calibrate(shape: Shape, ratios: Ratios) -> Profile | None:
    """The profile under which serial's simulated rollouts at R = 32 and 96 take what the paper's did; None if none can.

    Two unknowns, throughput and latency, and two nearly linear equations: solved by repeated correction.
    """
    latency_s, per_group_s = ratios.affine()
    if latency_s < 0:
        return None
    wanted_32, wanted_96 = ratios.rollout_s(32), ratios.rollout_s(96)
    tokens_per_s, start_s = 8 * MEAN_TOKENS / per_group_s, latency_s
    profile, off = None, math.inf
    for _ in range(10):
        profile = profile_of(shape, tokens_per_s=tokens_per_s, start_latency_s=max(0.0, start_s))
        at_32, at_96 = serial_rollout_s(32, profile), serial_rollout_s(96, profile)
        off = max(abs(at_32 / wanted_32 - 1), abs(at_96 / wanted_96 - 1))
        if off < _FITS:
            return profile
        tokens_per_s *= (at_96 - at_32) / (wanted_96 - wanted_32)
        start_s += wanted_32 - at_32 - 32 * ((wanted_96 - wanted_32) - (at_96 - at_32)) / 64
    return profile if off < _NEARLY else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """R = 96 under an engine that was calibrated on serial."""

    shape: Shape
    ratios: Ratios
    tokens_per_s: float
    start_latency_s: float
    serial_rollout_s: dict[int, float]
    """Simulated, at R = 32, 64, 96; 32 and 96 are fitted."""
    total_s: dict[str, float]
    first_dispatch_s: dict[str, float]
    waiting_ratio: dict[str, float]

    @property
    def fits_first_dispatch(self) -> bool:
        """Serial's first dispatch at R = 96 is within the published range, to half a percent."""
        low, high = SERIAL_FIRST_DISPATCH_S
        return low * 0.995 <= self.serial_rollout_s[96] <= high * 1.005


def predict(shape: Shape = CHOSEN, ratios: Ratios = CHOSEN_RATIOS) -> Prediction | None:
    """Calibrates, then asks for CGP and CGP+FGD; None if no engine of that shape has those ratios."""
    profile = calibrate(shape, ratios)
    if profile is None:
        return None
    outcomes = {name: run(name, 96, profile) for name in PAPER_S}
    return Prediction(
        shape=shape,
        ratios=ratios,
        tokens_per_s=profile.engine.tokens_per_s[0],
        start_latency_s=profile.claim_s,
        serial_rollout_s={R: serial_rollout_s(R, profile) for R in (32, 64, 96)},
        total_s={n: o.round_mean("rollout_to_train_end_s") for n, o in outcomes.items()},
        first_dispatch_s={n: o.round_mean("first_dispatch_s") for n, o in outcomes.items()},
        waiting_ratio={n: o.round_mean("waiting_ratio") for n, o in outcomes.items()},
    )


def sweep(shapes: Sequence[Shape] = SHAPES, ratios: Sequence[Ratios] = RATIOS) -> list[Prediction]:
    """The prediction for every shape and pair of ratios that an engine can have."""
    found = [predict(shape, pair) for shape in shapes for pair in ratios]
    return [p for p in found if p is not None]


def spread(predictions: Iterable[Prediction], name: str) -> tuple[float, float]:
    """(lowest, highest) total of "cgp" or "cgp_fgd"; NaN without any."""
    totals = [p.total_s[name] for p in predictions]
    return min(totals, default=math.nan), max(totals, default=math.nan)
