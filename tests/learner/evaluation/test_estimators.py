"""Estimators against counting out all that could have been drawn."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.evaluation import estimators

BITS = st.lists(st.booleans(), min_size=1, max_size=7)


def rows(k):
    return st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=1, max_size=5)


@given(BITS, st.data())
def test_pass_at_is_the_part_of_all_subsets_in_which_one_passes(passed, data):
    j = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, j))
    wanted = Fraction(sum(map(any, subsets)), len(subsets))
    assert estimators.pass_at(len(passed), sum(passed), j) == pytest.approx(float(wanted), abs=1e-12)


def test_pass_at_of_many_samples_is_the_binomial_quotient():
    wanted = 1 - Fraction(math.comb(9990, 100), math.comb(10_000, 100))
    assert estimators.pass_at(10_000, 10, 100) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "j"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_more_than_there_are_refused(n, c, j):
    with pytest.raises(ValueError, match="expected 1 <= j <= n"):
        estimators.pass_at(n, c, j)


@given(st.integers(1, 4).flatmap(rows))
def test_pass_at_1_is_the_mean_and_pass_at_k_whether_any_does(passed):
    table = np.array(passed, bool)
    assert estimators.pass_at_j(table, 1).value == pytest.approx(table.mean())
    assert estimators.pass_at_j(table, table.shape[1]).value == pytest.approx(table.any(axis=1).mean())


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_standard_error_is_the_problems_spread_over_the_root_of_their_number(values):
    got = estimators.over_problems(np.array(values, np.float64))
    assert got.value == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert got.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9)


def test_standard_error_is_clustered_by_problem():
    """Samples of a problem that are all alike say no more than one of them does."""
    rewards = np.array([[0.0], [1.0], [1.0], [0.0]])
    one, eight = estimators.avg_at_k(rewards), estimators.avg_at_k(np.repeat(rewards, 8, axis=1))
    assert eight == one and one.stderr == pytest.approx(math.sqrt(1 / 3) / 2)


@pytest.mark.heavy
def test_standard_error_over_many_draws_is_the_spread_of_the_estimate():
    """A simulation: problems of any difficulty, four samples each; the spread of 4,000 evaluations is the oracle."""
    random = np.random.default_rng(0)
    passed = random.random((4_000, 50, 4)) < random.beta(0.5, 0.5, (4_000, 50, 1))
    for j in (1, 2, 4):
        found = [estimators.pass_at_j(one, j) for one in passed]
        spread = statistics.stdev(e.value for e in found)
        assert statistics.fmean(e.stderr for e in found) == pytest.approx(spread, rel=0.05)


def test_standard_error_of_one_problem_is_not_known():
    assert math.isnan(estimators.over_problems(np.array([0.5])).stderr)
    with pytest.raises(ValueError, match="at least one problem"):
        estimators.over_problems(np.zeros(0))


@given(st.lists(st.tuples(st.sampled_from(["", "3", "4", "5"]), st.booleans()), min_size=1, max_size=6))
def test_majority_is_the_chance_that_a_sample_drawn_from_the_most_frequent_answers_passes(votes):
    """Counted out: every way to break a tie, every sample of the winner."""
    answers, passed = [a for a, _ in votes], [p for _, p in votes]
    stated = [(a, p) for a, p in votes if a]
    best = max((sum(b == a for b, _ in stated) for a, _ in stated), default=0)
    drawn = [p for a, p in stated if sum(b == a for b, _ in stated) == best]
    wanted = Fraction(sum(drawn), len(drawn)) if drawn else Fraction(0)
    assert estimators.majority(answers, passed) == pytest.approx(float(wanted))


def test_majority_of_answers_without_a_verdict_is_refused():
    with pytest.raises(ValueError):
        estimators.majority(["7"], [True, False])


def test_maj_at_k_is_the_mean_over_problems():
    got = estimators.maj_at_k([["7", "7"], ["1", "2"]], np.array([[True, True], [True, False]]))
    assert got == estimators.over_problems(np.array([1.0, 0.5]))


def test_sizes_of_pass_are_powers_of_two_and_k():
    assert [estimators.sizes_of_pass(k) for k in (1, 2, 3, 8, 10)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]
