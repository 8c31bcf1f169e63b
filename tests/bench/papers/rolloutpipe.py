"""RolloutPipe at R = 32, 64 and 96 in virtual time, from `tests/bench/papers/inputs.py` and nothing else.

An engine's step takes a + b h seconds; both follow from serial's rollouts at R = 32 and 96. Nothing of CGP or FGD is
fitted.
"""

import dataclasses
import math

import numpy as np

from configs.presets import rolloutpipe
from configs.schema import Config
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from tests.bench.papers import inputs

NAMES = ("serial", "cgp", "cgp_fgd")
_RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, inputs.PLACES)
_FITS = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """An engine's step: `base_s` and `sequence_s` for each that runs."""

    base_s: float
    sequence_s: float


def config_of(name: str, R: int) -> Config:
    """A preset at R groups a round."""
    config = {"serial": rolloutpipe.serial, "cgp": rolloutpipe.cgp, "cgp_fgd": rolloutpipe.rolloutpipe}[name]("paper")
    rounds = dataclasses.replace(config.rounds, groups_per_round=R, groups_per_update=2, samples_per_group=8)
    return dataclasses.replace(config, rounds=rounds, run=dataclasses.replace(config.run, num_updates=R // 2))


def profile_of(workload: str, R: int, step: Step, sigma: float) -> Profile:
    """Two rollout GPUs that are one engine, and a learner that takes what Table 1 says at R."""
    lengths = LengthProfile(kind="lognormal", median=inputs.MEAN_TOKENS / math.exp(sigma**2 / 2), sigma=sigma)
    compute_s_per_sample = inputs.COMPUTE_S[workload][R] / (R * inputs.K)
    return Profile(
        engine=EngineProfile(
            running=tuple(float(h) for h in _RUNNING),
            tokens_per_s=tuple(h / (step.base_s + step.sequence_s * h) for h in _RUNNING),
            max_num_seqs=inputs.PLACES,
        ),
        response_tokens=lengths,
        prompt_tokens=LengthProfile(kind="samples", samples=(1,)),
        learner=LearnerProfile(seconds_per_token=compute_s_per_sample / (inputs.MEAN_TOKENS + 1)),
    )


def run(name: str, workload: str, R: int, step: Step, sigma: float) -> SimResult:
    """Four rounds, as in the paper."""
    profile = profile_of(workload, R, step, sigma)
    return simulate(config_of(name, R), profile, num_updates=inputs.ROUNDS * R // inputs.U)


def rollout_s(workload: str, R: int, step: Step, sigma: float) -> float:
    """Serial's, simulated."""
    outcome = run("serial", workload, R, step, sigma)
    return float(np.mean([r["round/wait_s"] for r in outcome.rounds]))


def calibrate(workload: str, sigma: float) -> Step:
    """The step under which serial's simulated rollouts at R = 32 and 96 take what the paper's did.

    Rollouts are linear in both of its numbers, but for which responses happen to share the engine: Newton's method with
    differences, or the best with a number of 0 where a negative one would be needed.
    """
    w = inputs.SERIAL_WAITING_RATIO_32
    wanted = np.array([inputs.COMPUTE_S[workload][32] * w / (1 - w), inputs.SERIAL_ROLLOUT_96_S])

    def rollouts(at: np.ndarray) -> np.ndarray:
        return np.array([rollout_s(workload, R, Step(base_s=at[0], sequence_s=at[1]), sigma) for R in (32, 96)])

    at = np.array([2e-3, 1.5e-4])
    for _ in range(8):
        off = rollouts(at) - wanted
        if np.abs(off / wanted).max() < _FITS:
            break
        columns = [(rollouts(at + d) - off - wanted) / d.sum() for d in np.diag(at * 0.05)]
        at = np.maximum(at - np.linalg.solve(np.array(columns).T, off), 1e-6)
    return Step(base_s=float(at[0]), sequence_s=float(at[1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """One workload at one R."""

    workload: str
    R: int
    sigma: float
    step: Step
    total_s: dict[str, float]
    """Rollout to train end by name."""
    waiting_ratio: dict[str, float]
    first_dispatch_s: dict[str, float]

    def reduction(self, name: str) -> float:
        """Share of serial's time that is saved."""
        return 1 - self.total_s[name] / self.total_s["serial"]


def predict(workload: str, sigma: float) -> list[Rounds]:
    """R = 32, 64 and 96."""
    step = calibrate(workload, sigma)
    found = []
    for R in (32, 64, 96):
        outcomes = {name: run(name, workload, R, step, sigma) for name in NAMES}

        def means(metric: str, of: dict[str, SimResult] = outcomes) -> dict[str, float]:
            return {name: outcome.round_mean(metric) for name, outcome in of.items()}

        found.append(
            Rounds(
                workload=workload,
                R=R,
                sigma=sigma,
                step=step,
                total_s=means("rollout_to_train_end_s"),
                waiting_ratio=means("waiting_ratio"),
                first_dispatch_s=means("first_dispatch_s"),
            )
        )
    return found
