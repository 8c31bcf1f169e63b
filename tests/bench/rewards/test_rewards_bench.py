"""The draws of the bench of rewards."""

import collections

import numpy as np

from tests.actor.sandbox.conftest import isolated as isolated
from tests.bench.rewards.workload import HANG_SHARE, SAMPLES, WHOLE, Workload

WORK = Workload(size=WHOLE)


def test_answers_hang_as_often_as_is_said_and_others_are_right_or_wrong():
    drawn = collections.Counter(WORK.kind(0, 0, prompt, sample) for prompt in range(5000) for sample in range(2))
    assert abs(drawn["hang"] / 10_000 - HANG_SHARE) < 0.01
    assert abs(drawn["right"] / 10_000 - 0.475) < 0.02


def test_lengths_are_the_papers():
    """Section 2.2's P75 of 755 to 1.1k tokens in short rounds, the longest 16k / 8.9; 8k at most in long ones."""
    for round_, kind in enumerate(WHOLE.period):
        lengths = [
            WORK.lengths(round_).tokens(np.array([0, round_, prompt], np.int32), sample)
            for prompt in range(500)
            for sample in range(SAMPLES)
        ]
        if kind == "short":
            assert 755 <= np.percentile(lengths, 75) <= 1100 and max(lengths) == 1841
        else:
            assert max(lengths) == 8192 and np.median(lengths) > 3000
