"""PipelineRL's appendix A against token-by-token counting and the paper's text; ROLL Flash's proposition 2 against
schedules of random lengths."""

import dataclasses
import heapq
import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.tools.plan import closed_formulas as formulas
from launch.tools.plan.profile import LearnerProfile
from launch.tools.plan.workload import LengthProfile
from tests.launch.tools.plan.setup import profile_of

pytestmark = pytest.mark.unit

PAPER = formulas.System(
    engine_rate=np.minimum(np.arange(1, 513), 192) / 192 * 0.384,
    still_running=formulas.uniform_lengths(1024),
    num_chips=128,
    batch_size=128,
    train_time=84 / 17.08,
)
"""A.4; U(h) is linear up to about 200, and 0.384 at 192 follows from U(192) 44 = 16.9; tau from (128 - 44) / tau."""
SMALL = formulas.System(
    engine_rate=np.array([1.0, 1.5, 1.75]),
    still_running=np.array([1.0, 1.0, 0.5, 0.25]),
    num_chips=4,
    batch_size=4,
    train_time=0.5,
)
"""Of four sequences, two have 2 tokens, one 3 and one 4."""
LENGTHS = (2, 2, 3, 4)


def rate_of(system: formulas.System, num_running: Fraction) -> Fraction:
    """Linear between whole numbers, from 0 at 0."""
    rates = [Fraction(0), *map(Fraction, system.engine_rate.tolist())]
    low = min(int(num_running), len(rates) - 1)
    high = min(low + 1, len(rates) - 1)
    return rates[low] + (num_running - low) * (rates[high] - rates[low])


def count_conventional_s(system: formulas.System, num_steps: int) -> Fraction:
    """Decodes one token of every unfinished sequence at a time, over all chips."""
    unfinished = [n for n in LENGTHS for _ in range(system.batch_size * num_steps // len(LENGTHS))]
    generation_s, num_tokens = Fraction(0), sum(unfinished)
    while unfinished:
        per_chip = Fraction(len(unfinished), system.num_chips)
        generation_s += per_chip / rate_of(system, per_chip)
        unfinished = [n - 1 for n in unfinished if n > 1]
    return generation_s + num_tokens * Fraction(system.train_time) / system.num_chips


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_conventional_rate_is_tokens_over_counted_time(num_steps):
    tokens = sum(LENGTHS) * num_steps
    assert formulas.conventional_rate(SMALL, num_steps) == pytest.approx(
        float(tokens / count_conventional_s(SMALL, num_steps))
    )


@pytest.mark.parametrize("max_lag", range(0, 9))
def test_best_split_is_the_best_of_all_splits_by_exact_counting(max_lag):
    best = Fraction(0)
    for H, I in itertools.product(range(1, 4), range(1, 4)):  # noqa: E741 - the paper's names
        made = Fraction(H * I * max(LENGTHS))  # tokens while the longest sequence is generated
        lag = -(-made * len(LENGTHS) // (sum(LENGTHS) * SMALL.batch_size))
        if lag <= max_lag:
            best = max(best, min(rate_of(SMALL, Fraction(H)) * I, Fraction(SMALL.num_chips - I, 1) * 2))
    found = formulas.best_split(SMALL, max_lag)
    assert (0 if found is None else found.rate) == float(best)
    assert found is None or found.max_lag <= max_lag
    # G steps train the last batch G - 1 steps after the weights that generated it.
    conventional = sum(LENGTHS) * (max_lag + 1) / count_conventional_s(SMALL, max_lag + 1)
    assert formulas.speedup(SMALL, max_lag) == pytest.approx(float(best / conventional))


def test_paper_case_study_gives_the_split_and_throughputs_of_the_text():
    found = formulas.best_split(PAPER, 133)
    assert found is not None
    assert (found.num_running, found.num_engines, found.max_lag) == (192, 44, 132)
    assert found.rate == pytest.approx(16.9, rel=0.001)
    # The paper's measured U(h) gives 18.3 for conventional generation, 10.7 with training, and 1.57.
    assert formulas.conventional_generation_rate(PAPER, 134) == pytest.approx(18.3, rel=0.08)
    assert formulas.conventional_rate(PAPER, 134) == pytest.approx(10.7, rel=0.05)
    assert formulas.speedup(PAPER, 133) == pytest.approx(1.57, rel=0.05)


def test_figure_9_speedup_is_largest_near_the_lag_of_the_text():
    """Lag at most 133 in the text; at B = 2048 the same sequences have a sixteenth of the lag."""
    by_lag = {lag: formulas.speedup(PAPER, lag) for lag in (8, 32, 64, 100, 120, 133, 160, 256)}
    assert max(by_lag, key=lambda lag: by_lag[lag]) == 133
    large = dataclasses.replace(PAPER, batch_size=2048)
    assert formulas.pipeline_split(large, 192, 44).max_lag == pytest.approx(8, abs=1)


def test_profile_in_seconds_gives_the_same_formulas():
    profile = profile_of(
        response_tokens=LengthProfile(kind="uniform", max_tokens=200),
        learner=LearnerProfile(seconds_per_token=0.01),
    )
    system = formulas.of_profile(profile, num_chips=8, batch_size=64)
    assert system.still_running.size == 200
    assert system.mean_length == pytest.approx(100.5, rel=0.02)
    # 10 tokens/s per sequence, up to 64; a prompt has 1 token.
    assert formulas.pipeline_split(system, 64, 1).rate == pytest.approx(640.0)
    assert formulas.pipeline_split(system, 64, 2).rate == pytest.approx(600 / (1 + 1 / system.mean_length))
    assert formulas.best_split(system, 0) is None and formulas.speedup(system, 0) == 0.0


@pytest.mark.parametrize("shares", [[], [0.5], [1.0, 0.5, 0.75], [1.0, 0.0]])
def test_lengths_that_do_not_fall_from_one_are_rejected(shares):
    with pytest.raises(ValueError, match="still_running"):
        dataclasses.replace(PAPER, still_running=np.array(shares))


class Pool:
    """K workers that generate and, while they have nothing to generate, train; time in small steps.

    An update's samples may start once the update alpha + 1 before it is trained; updates train in order, each when its
    own and all earlier samples are complete, on all workers that do not generate.
    """

    def __init__(self, lengths: list[float], *, N: int, K: int, train: float, alpha: int) -> None:
        self.lengths, self.N, self.K, self.train, self.alpha = lengths, N, K, train, alpha

    def seconds(self) -> list[float]:
        """When each update is trained."""
        N, now, started, trained, done = self.N, 0.0, 0, 0, []
        running: list[tuple[float, int]] = []  # (end, update)
        unfinished = [N] * (len(self.lengths) // N)
        work = N * self.train
        while trained < len(unfinished):
            while started < len(self.lengths) and len(running) < self.K and started // N <= trained + self.alpha:
                heapq.heappush(running, (now + self.lengths[started], started // N))
                started += 1
            idle = self.K - len(running)
            ready = unfinished[trained] == 0
            trained_at = now + work / idle if ready and idle else float("inf")
            if ready and not work:
                trained_at = now
            end = running[0][0] if running else float("inf")
            assert min(end, trained_at) < float("inf")
            if trained_at <= end:
                now, work, trained = trained_at, N * self.train, trained + 1
                done.append(now)
                continue
            work -= (end - now) * idle if ready else 0.0
            now = end
            unfinished[heapq.heappop(running)[1]] -= 1
        return done


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    N=st.integers(1, 12),
    K=st.integers(1, 16),
    alpha=st.integers(0, 5),
    train=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    heavy=st.booleans(),
)
def test_no_schedule_of_a_shared_pool_exceeds_proposition_2(seed, N, K, alpha, train, heavy):
    rng = random.Random(seed)
    num_updates = 6 * (alpha + 1)
    lengths = [rng.lognormvariate(0, 1.5) if heavy else rng.uniform(0.1, 2) for _ in range(N * num_updates)]
    done = Pool(lengths, N=N, K=K, train=train, alpha=alpha).seconds()
    assert done[-1] / num_updates <= bound_of(lengths, N=N, K=K, train=train, alpha=alpha) * (1 + 1e-9)


def bound_of(lengths: list[float], *, N: int, K: int, train: float, alpha: int) -> float:
    """The bound of these responses."""
    return formulas.update_time_bound(
        batch_size=N,
        num_workers=K,
        generate_s=sum(lengths) / len(lengths),
        train_s=train,
        longest_s=max(lengths),
        async_ratio=alpha,
    )


def separate_seconds(lengths: list[float], *, N: int, K: int, batch_train_s: float, alpha: int) -> list[float]:
    """When each update is trained if K workers only generate and other chips train, one update after the other."""
    free, done = [0.0] * K, []
    for update in range(len(lengths) // N):
        may_start = done[update - alpha - 1] if update > alpha else 0.0
        ends = [0.0]
        for length in lengths[update * N : (update + 1) * N]:
            start = max(heapq.heappop(free), may_start)
            heapq.heappush(free, start + length)
            ends.append(start + length)
        done.append(max(*ends, done[-1] if done else 0.0) + batch_train_s)
    return done


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), N=st.integers(1, 12), K=st.integers(1, 16), alpha=st.integers(0, 5))
def test_no_schedule_with_separate_training_chips_exceeds_proposition_2(seed, N, K, alpha):
    rng = random.Random(seed)
    num_updates, train = 6 * (alpha + 1), rng.choice([0.0, 0.5, 2.0])
    lengths = [rng.lognormvariate(0, 1.5) for _ in range(N * num_updates)]
    done = separate_seconds(lengths, N=N, K=K, batch_train_s=N * train / K, alpha=alpha)
    assert done[-1] / num_updates <= bound_of(lengths, N=N, K=K, train=train, alpha=alpha) * (1 + 1e-9)


@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_proposition_2_is_nearly_reached_where_all_workers_wait_for_one_long_sample(alpha):
    """One update of alpha + 1 has a long sample, and there are workers for all others meanwhile."""
    N, K, num_periods = 8, 64, 10
    period = [1.0] * (N * (alpha + 1) - 1) + [500.0]
    done = Pool(period * num_periods, N=N, K=K, train=0.1, alpha=alpha).seconds()
    bound = formulas.update_time_bound(
        batch_size=N,
        num_workers=K,
        generate_s=sum(period) / len(period),
        train_s=0.1,
        longest_s=500,
        async_ratio=alpha,
    )
    assert 0.9 < done[-1] / (num_periods * (alpha + 1)) / bound <= 1


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"num_workers": 0}, {"async_ratio": -1}])
def test_bound_of_no_schedule_is_rejected(wrong):
    given = {"batch_size": 4, "num_workers": 2, "async_ratio": 1} | wrong
    with pytest.raises(ValueError, match="batch_size"):
        formulas.update_time_bound(generate_s=1, train_s=1, longest_s=2, **given)
