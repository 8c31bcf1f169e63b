import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import Task
from learner.metrics.sample_record import PickedGroup, SamplePick
from tests.bridge.factories import make_group, make_ticket


def picked(number=0):
    group = make_group(make_ticket(f"t{number}"))
    return PickedGroup(
        group=group, task=Task.judged_by("exact", answer="1"), source="", advantages=[np.zeros(3, np.float32)] * 2
    )


@given(st.integers(1, 300), st.integers(0, 40))
def test_pick_keeps_so_many_groups_of_each_round_and_spreads_them(per_round, kept):
    pick = SamplePick(groups_per_round=per_round, kept_per_round=kept)
    wanted = [i for i in range(per_round) if pick.wants(i)]
    assert len(wanted) == min(kept, per_round)
    if wanted:
        gaps = np.diff([-1, *wanted])
        assert gaps.max() - gaps.min() <= 1 and wanted[-1] == per_round - 1


def test_pick_taken_or_dropped_is_gone():
    pick = SamplePick(groups_per_round=4, kept_per_round=2)
    pick.book(picked(0))
    assert [p.group.ticket_id for p in pick.take()] == ["t0"]
    pick.book(picked(1))
    pick.clear()
    assert pick.take() == []


@pytest.mark.parametrize("per_round", [1, 8])
def test_pick_of_nothing_wants_nothing(per_round):
    pick = SamplePick(groups_per_round=per_round, kept_per_round=0)
    assert not any(pick.wants(i) for i in range(per_round))
