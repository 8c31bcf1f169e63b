"""Closed formulas of throughput at a bounded lag (PipelineRL) and of the time per update (ROLL Flash).

Lags are in optimizer steps. The formulas hold in any unit of time. PipelineRL counts in flashes, the least time that a
token can take (TMLR version, eq. 9); with seconds, the rates of a planner profile fit (`of_profile`).

    from launch.tools.plan import closed_formulas, profile
    system = closed_formulas.of_profile(profile.load("profile.json"), num_chips=64, batch_size=1024)
    closed_formulas.best_split(system, max_lag=8)
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

from launch.tools.plan.profile import Profile
from launch.tools.plan.workload import LengthProfile, Lengths

_NUM_PROBLEMS = 4096
"""Responses drawn for the lengths of a profile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """Accelerators and workload of PipelineRL's appendix A."""

    engine_rate: Float[np.ndarray, " H"]
    """Tokens per unit of time of one engine that runs h = 1 .. H sequences: U(h) in tokens per flash."""
    still_running: Float[np.ndarray, " L"]
    """Share of sequences with at least l tokens, l = 1 .. L: h(l) / h(1) of equation 11. L is the maximum length, and
    the sum is the mean length."""
    num_chips: int
    """Number of accelerators, N."""
    batch_size: int
    """Sequences per optimizer step, B."""
    train_time: float
    """Training time per response token on one accelerator, tau. With prompts, it includes the share of a token in the
    prompt."""
    chips_per_engine: int = 1

    def __post_init__(self) -> None:
        if min(self.engine_rate.shape) < 1 or not np.all(self.engine_rate > 0):
            raise ValueError(f"engine_rate must be positive rates of h = 1 .. H sequences, got {self.engine_rate}")
        shares = self.still_running
        if min(shares.shape) < 1 or shares[0] != 1 or np.any(np.diff(shares) > 0) or shares[-1] <= 0:
            raise ValueError("still_running must begin with 1, not rise, and end above 0")
        if self.num_chips <= self.chips_per_engine or self.batch_size < 1 or self.train_time <= 0:
            raise ValueError(
                f"expected more than {self.chips_per_engine} chips, a positive batch size and a positive training "
                f"time, got {self.num_chips}, {self.batch_size} and {self.train_time}"
            )

    @property
    def mean_length(self) -> float:
        """Mean tokens per sequence."""
        return float(np.sum(self.still_running))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """PipelineRL's configuration, with its throughput and largest lag."""

    num_running: int
    """Sequences per engine, H."""
    num_engines: int
    """Generating engines, I accelerators in the paper; the rest of the accelerators trains."""
    rate: float
    """Response tokens per unit of time."""
    max_lag: int


def uniform_lengths(max_tokens: int) -> Float[np.ndarray, " L"]:
    """Returns `still_running` of lengths that are uniform from 1 to `max_tokens` (appendix A.4)."""
    return 1 - np.arange(max_tokens) / max_tokens


def drawn_lengths(responses: LengthProfile, *, seed: int = 0) -> Float[np.ndarray, " L"]:
    """Returns `still_running` of 4,096 responses drawn from a profile, each of another problem."""
    lengths = Lengths(responses, responses, seed=seed)
    drawn = np.sort([lengths.responses(problem, 1)[0] for problem in range(_NUM_PROBLEMS)])
    return 1 - np.searchsorted(drawn, np.arange(1, drawn[-1] + 1)) / drawn.size


def of_profile(profile: Profile, *, num_chips: int, batch_size: int) -> System:
    """Returns the system of a planner profile, in seconds; its own split of chips does not matter."""
    running = drawn_lengths(profile.response_tokens)
    lengths = Lengths(profile.response_tokens, profile.prompt_tokens, seed=0)
    prompt = float(np.mean([lengths.prompt(problem) for problem in range(_NUM_PROBLEMS)]))
    return System(
        engine_rate=np.array([profile.engine.throughput(h) for h in range(1, profile.engine.max_num_seqs + 1)]),
        still_running=running,
        num_chips=num_chips,
        batch_size=batch_size,
        train_time=profile.learner.seconds_per_token * (1 + prompt / float(np.sum(running))),
        chips_per_engine=profile.chips_per_engine,
    )


def conventional_generation_rate(system: System, num_steps: int) -> float:
    """Returns r_gen_conv: all engines generate B G sequences, and none replaces a finished one (eq. 11 and 14).

    K / sum_l (h(l) / N) / U(h(l) / N), where K is the number of tokens, and G is `num_steps` optimizer steps per round.
    Rates between whole numbers of sequences, and from 0 to 1, are interpolated; above H they are constant.
    """
    num_sequences = system.batch_size * num_steps
    per_engine = num_sequences * system.still_running / (system.num_chips // system.chips_per_engine)
    rate = np.interp(per_engine, np.arange(system.engine_rate.size + 1), [0.0, *system.engine_rate])
    return num_sequences * system.mean_length / float(np.sum(per_engine / rate))


def conventional_rate(system: System, num_steps: int) -> float:
    """Returns r_conv: all accelerators generate, then all train (eq. 13 and 15). The largest lag is G - 1 steps."""
    return 1 / (1 / conventional_generation_rate(system, num_steps) + system.train_time / system.num_chips)


def pipeline_split(system: System, num_running: int, num_engines: int) -> Split:
    """Returns r_pipeline = min(U(H) I, (N - I) / tau) and the largest lag, ceil(H I L / (mean L B)) (eq. 16 to 18)."""
    train_rate = (system.num_chips - num_engines * system.chips_per_engine) / system.train_time
    stretch = system.still_running.size / system.mean_length
    return Split(
        num_running=num_running,
        num_engines=num_engines,
        rate=min(float(system.engine_rate[num_running - 1]) * num_engines, train_rate),
        max_lag=math.ceil(num_running * num_engines * stretch / system.batch_size - 1e-9),
    )


def best_split(system: System, max_lag: int) -> Split | None:
    """Returns the fastest of all (H, I) within a lag (appendix A.3), the least lag among equals; None if none is."""
    most_engines = (system.num_chips - 1) // system.chips_per_engine
    # A lag bounds H I, so most pairs need no evaluation.
    most_sequences = max_lag * system.batch_size * system.mean_length / system.still_running.size + 1e-6
    found = [
        pipeline_split(system, num_running, num_engines)
        for num_engines in range(1, most_engines + 1)
        for num_running in range(1, min(system.engine_rate.size, int(most_sequences // num_engines)) + 1)
    ]
    return max(found, key=lambda s: (s.rate, -s.max_lag), default=None)


def speedup(system: System, max_lag: int) -> float:
    """Returns the best r_pipeline over r_conv at the same largest lag (figure 9): G = g_max + 1; 0 if none fits.

    The paper writes the lag of conventional RL as S - 1 with S = B G, which are sequences; in steps it is G - 1.
    """
    split = best_split(system, max_lag)
    return 0.0 if split is None else split.rate / conventional_rate(system, max_lag + 1)


def update_time_bound(
    *, batch_size: int, num_workers: int, generate_s: float, train_s: float, longest_s: float, async_ratio: float
) -> float:
    """Returns an upper bound of the mean seconds per update (ROLL Flash, proposition 2).

    N / K (mu_gen + E mu_train) + L_gen / (alpha + 1); alpha = 0 is the bound of synchronous training.

    It holds for queue scheduling: samples of an update start only after the update alpha + 1 before it, in order, and
    no worker idles while a sample may start. A worker generates one sample at constant speed. It also holds if chips
    of their own train a batch in N E mu_train / K seconds while the K workers generate.

    N is `batch_size`, K `num_workers`, mu_gen the mean `generate_s` of a sample, L_gen the `longest_s`, and alpha
    `async_ratio`. `train_s` is E mu_train: seconds that one of K workers trains per sample, over all E epochs.
    """
    if batch_size < 1 or num_workers < 1 or async_ratio < 0:
        raise ValueError(
            f"expected batch_size >= 1, num_workers >= 1 and async_ratio >= 0, got {batch_size}, {num_workers} and "
            f"{async_ratio}"
        )
    return batch_size / num_workers * (generate_s + train_s) + longest_s / (async_ratio + 1)
