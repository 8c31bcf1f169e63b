"""RolloutPipe at R = 32, 64 and 96 in virtual time, from `tests/bench/papers/inputs.py` and nothing else.

An engine's step takes a + b h seconds; both follow from serial's rollouts at R = 32 and 96. Nothing of CGP or FGD is
fitted.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from configs.presets import rolloutpipe
from configs.schema import Config
from configs.sections import AdmissionConfig
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from tests.bench.papers import inputs
from tests.bench.papers.experiment import Experiment

NAMES = ("serial", "cgp", "cgp_fgd")
_RUNNING = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32, 64, 128, inputs.PLACES)
_FITS = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """An engine's step: `base_s` and `sequence_s` for each that runs."""

    base_s: float
    sequence_s: float
    is_longer: bool = False
    """True if a step takes the longer of both instead of their sum."""

    def seconds(self, running: float) -> float:
        parts = self.base_s, self.sequence_s * running
        return max(parts) if self.is_longer else sum(parts)


def config_of(name: str, R: int) -> Config:
    """A preset at R groups a round."""
    config = {"serial": rolloutpipe.serial, "cgp": rolloutpipe.cgp, "cgp_fgd": rolloutpipe.rolloutpipe}[name]("paper")
    rounds = dataclasses.replace(config.rounds, groups_per_round=R, groups_per_update=2, samples_per_group=8)
    if name == "cgp_fgd":
        config = dataclasses.replace(config, admission=AdmissionConfig(policy="frontier", width=inputs.U))
    return dataclasses.replace(config, rounds=rounds, run=dataclasses.replace(config.run, num_updates=R // 2))


def profile_of(workload: str, R: int, step: Step, sigma: float) -> Profile:
    """Two rollout GPUs that are one engine, and a learner that takes what Table 1 says at R."""
    lengths = LengthProfile(kind="lognormal", median=inputs.MEAN_TOKENS / math.exp(sigma**2 / 2), sigma=sigma)
    compute_s_per_sample = inputs.COMPUTE_S[workload][R] / (R * inputs.K)
    return Profile(
        engine=EngineProfile(
            running=tuple(float(h) for h in _RUNNING),
            tokens_per_s=tuple(h / step.seconds(h) for h in _RUNNING),
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


def calibrate_longer(workload: str, sigma: float) -> Step:
    """The second engine, chosen in sight: a step takes the longer of reading the weights, at the memory's bandwidth,
    and of the work of its sequences, whose one number is fitted to serial's rollouts at R = 96."""
    low, high = 1e-5, 1e-3
    base_s = 2 * inputs.ROLLOUT_PARAMS / inputs.ROLLOUT_BYTES_PER_S
    while high / low > 1 + _FITS:
        step = Step(base_s=base_s, sequence_s=math.sqrt(low * high), is_longer=True)
        if rollout_s(workload, 96, step, sigma) < inputs.SERIAL_ROLLOUT_96_S:
            low = step.sequence_s
        else:
            high = step.sequence_s
    return Step(base_s=base_s, sequence_s=low, is_longer=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """One workload at one R."""

    workload: str
    R: int
    sigma: float
    step: Step
    total_s: dict[str, float]
    """Rollout to train end by name."""
    compute_s: dict[str, float]
    """Trainer compute by name."""
    waiting_ratio: dict[str, float]
    first_dispatch_s: dict[str, float]


def predict(workload: str, sigma: float, calibrated: Callable[[str, float], Step] = calibrate) -> list[Rounds]:
    """R = 32, 64 and 96."""
    step = calibrated(workload, sigma)
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
                compute_s={
                    n: o.round_mean("rollout_to_train_end_s") - o.round_mean("wait_s") for n, o in outcomes.items()
                },
                waiting_ratio=means("waiting_ratio"),
                first_dispatch_s=means("first_dispatch_s"),
            )
        )
    return found


@functools.cache
def rounds(calibrated: Callable[[str, float], Step] = calibrate) -> tuple[Rounds, ...]:
    """All workloads and R, at the central spread of lengths."""
    return tuple(r for workload in inputs.COMPUTE_S for r in predict(workload, inputs.SIGMAS[0], calibrated))


def figure_4(calibrated: Callable[[str, float], Step] = calibrate) -> Mapping[str, float]:
    """Times over Slime's and CGP's, by workload and R."""
    found = {}
    for r in rounds(calibrated):
        at, total_s = f"{r.workload}, R = {r.R}", r.total_s
        found |= {
            f"{at}, time over Slime's": total_s["cgp_fgd"] / total_s["serial"],
            f"{at}, CGP's time over Slime's": total_s["cgp"] / total_s["serial"],
            f"{at}, time over CGP's": total_s["cgp_fgd"] / total_s["cgp"],
        }
    return found


def dispatch(calibrated: Callable[[str, float], Step] = calibrate) -> Mapping[str, float]:
    """First dispatch and main time at R = 96, in seconds."""
    found = {}
    for r in (r for r in rounds(calibrated) if r.R == 96):
        found |= {f"{r.workload}, first dispatch, {name}": r.first_dispatch_s[name] for name in ("cgp", "cgp_fgd")}
        if r.workload == "Sci-XW":
            found |= {f"Sci-XW, main time, {name}": r.total_s[name] for name in ("cgp", "cgp_fgd")}
    return found


def figure_5(calibrated: Callable[[str, float], Step] = calibrate) -> Mapping[str, float]:
    """Waiting ratio of CGP+FGD."""
    return {f"{r.workload}, R = {r.R}, waiting ratio": r.waiting_ratio["cgp_fgd"] for r in rounds(calibrated)}


def table_1() -> Mapping[str, float]:
    """Trainer compute over Slime's, the mean of all workloads and R."""
    return {
        f"compute of {name} over Slime's": float(np.mean([r.compute_s[name] / r.compute_s["serial"] for r in rounds()]))
        for name in ("cgp", "cgp_fgd")
    }


_OPEN = "an engine's places (all of its memory), its step (fitted to Slime's rollouts), spread of lengths (sigma 0.5)"
_SECOND = "an engine's step: the longer of reading the weights and of its sequences' work, instead of their sum"
EXPERIMENTS = (
    Experiment(paper="RolloutPipe", where="Figure 4", predict=figure_4, blind=False, left_open=_OPEN),
    Experiment(paper="RolloutPipe", where="Section 5.2", predict=dispatch, blind=False, left_open=_OPEN),
    Experiment(paper="RolloutPipe", where="Figure 5", predict=figure_5, blind=True, left_open=_OPEN),
    Experiment(paper="RolloutPipe", where="Table 1", predict=table_1, blind=True, left_open=_OPEN),
    *(
        Experiment(
            paper="RolloutPipe",
            where=f"{where}, second engine",
            predict=functools.partial(predicted, calibrate_longer),
            blind=False,
            in_sight=True,
            left_open=_SECOND,
        )
        for where, predicted in (("Figure 4", figure_4), ("Section 5.2", dispatch), ("Figure 5", figure_5))
    ),
)
