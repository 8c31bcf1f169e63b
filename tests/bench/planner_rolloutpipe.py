"""RolloutPipe's Sci-XW at K = 8, U = 2: calibrated on the serial column, asked for the other two.

Known of serial (Slime): trainer compute 191.8, 379.9, 572.2 s at R = 32, 64, 96 (Table 1), and a waiting ratio of
47-52 % (section 5.3), highest at the smallest R. Its wait is compute x w / (1 - w), since it trains after the
rollout: 207.8 s at R = 32 with 52 %, 507.4 s at R = 96 with 47 %; first dispatch at R = 96 is given as 509-543 s.
Affine in R: a latency before the first group, and a time a group. Nothing of CGP or CGP+FGD goes in.

What engine is consistent with all columns? Serial fixes only how long R groups take together. With frontier width 2
at most 16 sequences run, and the paper's trainer (5.96 s a group) then waits 65 s of 642 s in all, so 16 sequences
and fewer (a group's slot is kept until its longest response ends) are served at a group in less than 6 s, against 4.7
s for the whole round at once: the engine's throughput hardly depends on how many run. And CGP's first dispatch at
46-90 s says that the default admission doesn't spread it over all 768 requests: shared by 256, 5.9k tokens/s complete
the first two groups only after 200 s. The calibrated engine therefore has one throughput whatever runs, a latency
once a round, and F_w K = 16 places, since the paper sizes F_w by what the engine's memory holds. The serial column
does not determine the number of places: `scan` shows what other engines with the same serial column would give. That
choice is the one assumption that the prediction for CGP rests on; CGP+FGD does not depend on it.
"""

import dataclasses
import math
from collections.abc import Sequence

from actor.engine_profile import EngineProfile
from configs import cgp, rolloutpipe, serial
from configs.schema import Config
from launch.plan_outcome import Outcome
from launch.plan_profile import LearnerProfile, LengthProfile, Profile
from launch.plan_simulate import simulate

COMPUTE_S = {32: 191.8, 64: 379.9, 96: 572.2}
WAITING_RATIO = {32: 0.52, 96: 0.47}
PAPER_S = {"cgp": 659.0, "cgp_fgd": 642.0}
PAPER_FIRST_DISPATCH_S = {"cgp": (46.0, 90.0), "cgp_fgd": (52.0, 61.0)}
MEAN_TOKENS = 3450.0
"""Responses are 3.3k to 3.6k tokens long (Figure 5); it cancels out of everything but the tokens/s."""
SIGMA = 0.5
"""Of the logarithm of the lengths; the paper doesn't say."""
NUM_ROUNDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the serial column leaves open."""

    max_num_seqs: int
    saturates_at: int
    """Running sequences from which the throughput is constant; below it is proportional to them."""


CHOSEN = Shape(max_num_seqs=16, saturates_at=1)
SCANNED = [Shape(max_num_seqs=n, saturates_at=1) for n in (32, 64, 256)] + [
    Shape(max_num_seqs=16, saturates_at=s) for s in (4, 8, 16)
]


def rollout_s(R: int) -> float:
    """Serial's rollout, from its compute and waiting ratio: compute x w / (1 - w)."""
    return COMPUTE_S[R] * WAITING_RATIO[R] / (1 - WAITING_RATIO[R])


def affine() -> tuple[float, float]:
    """(seconds before the first group, seconds a group) of serial's rollout."""
    slope = (rollout_s(96) - rollout_s(32)) / (96 - 32)
    return rollout_s(32) - 32 * slope, slope


def config_of(name: str, R: int) -> Config:
    """A preset at R groups a round."""
    config = {"serial": serial, "cgp": cgp, "cgp_fgd": rolloutpipe}[name].get_config("paper")
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


def run(name: str, R: int, profile: Profile) -> Outcome:
    """Four rounds, as in the paper."""
    return simulate(config_of(name, R), profile, num_updates=NUM_ROUNDS * R // 2)


def calibrate(shape: Shape) -> Profile:
    """The profile under which serial's simulated rollouts at R = 32 and 96 take what the paper's did.

    Two unknowns, throughput and latency, and two nearly linear equations: solved by repeated correction.
    """
    latency_s, per_group_s = affine()
    tokens_per_s, start_s = 8 * MEAN_TOKENS / per_group_s, latency_s
    for _ in range(8):
        profile = profile_of(shape, tokens_per_s=tokens_per_s, start_latency_s=max(0.0, start_s))
        at_32, at_96 = (run("serial", R, profile).round_mean("first_dispatch_s") for R in (32, 96))
        tokens_per_s *= (at_96 - at_32) / (rollout_s(96) - rollout_s(32))
        start_s += rollout_s(32) - at_32 - 32 * ((rollout_s(96) - rollout_s(32)) - (at_96 - at_32)) / 64
    return profile_of(shape, tokens_per_s=tokens_per_s, start_latency_s=max(0.0, start_s))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """R = 96 under an engine that was calibrated on serial."""

    shape: Shape
    tokens_per_s: float
    start_latency_s: float
    serial_rollout_s: dict[int, float]
    """Simulated, at R = 32, 64, 96; 32 and 96 are fitted."""
    total_s: dict[str, float]
    first_dispatch_s: dict[str, float]
    waiting_ratio: dict[str, float]


def predict(shape: Shape) -> Prediction:
    """Calibrates, then asks for CGP and CGP+FGD."""
    profile = calibrate(shape)
    outcomes = {name: run(name, 96, profile) for name in PAPER_S}
    return Prediction(
        shape=shape,
        tokens_per_s=profile.engine.tokens_per_s[0],
        start_latency_s=profile.claim_s,
        serial_rollout_s={R: run("serial", R, profile).round_mean("first_dispatch_s") for R in (32, 64, 96)},
        total_s={n: o.round_mean("rollout_to_train_end_s") for n, o in outcomes.items()},
        first_dispatch_s={n: o.round_mean("first_dispatch_s") for n, o in outcomes.items()},
        waiting_ratio={n: o.round_mean("waiting_ratio") for n, o in outcomes.items()},
    )


def scan(shapes: Sequence[Shape] = SCANNED) -> list[Prediction]:
    """The same for other engines with the same serial column."""
    return [predict(shape) for shape in shapes]
