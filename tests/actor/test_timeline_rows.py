"""Rows of the event log: as many as are asked for, the lowest first."""

from hypothesis import given
from hypothesis import strategies as st

from actor.serving import TimelineRows


def test_lanes_do_not_run_out():
    lanes = TimelineRows()
    assert [lanes.take() for _ in range(10_000)] == list(range(1, 10_001))


@given(st.lists(st.integers(0, 9)))
def test_a_lane_is_the_lowest_that_is_free(choices):
    """0 to 4 take one, what is above gives one of those taken back; the oracle searches from 1."""
    lanes, taken = TimelineRows(), []
    for choice in choices:
        if choice < 5 or not taken:
            taken.append(lanes.take())
            others = set(taken[:-1])
            assert taken[-1] == next(n for n in range(1, len(choices) + 2) if n not in others)
        else:
            lanes.give_back(taken.pop(choice % len(taken)))
