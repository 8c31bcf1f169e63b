"""A small part of the fuzz, the same each time; and that its world sees what must not be."""

from typing import Any

import pytest

from bridge.rollout_types import Group
from learner.schedule.group_filter import GroupFilter
from learner.schedule.ticket_ledger import TicketLedger
from tests.bench.schedules.fuzz import fuzz


def test_schedules_with_crashes_train_each_group_once_and_restart_nothing_in_vain():
    found, problems = fuzz(range(20))
    assert problems == []
    assert found.learner_crashes > 8 and found.actor_crashes > 20 and found.trained > 300


def test_world_sees_groups_of_abandoned_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Group, "is_abandoned", lambda self, base_steps: False)
    found, _ = fuzz(range(24))
    assert found.abandoned_groups > 0


def test_world_sees_groups_that_go_stale_where_they_are_trained_as_they_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        TicketLedger, "num_sequences", lambda self, min_step, *, step, max_lag_steps: self.num_left_in_update
    )
    found, _ = fuzz(range(24))
    assert found.stale_groups > 0


def _unwanted(group_filter: Any, group: Group) -> str | None:
    """All that an arrival policy without a lag bound has against a group."""
    return None if group_filter._planner.is_open(group.ticket_id) else "unwanted"


def test_world_sees_groups_over_the_lag_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        TicketLedger, "num_sequences", lambda self, min_step, *, step, max_lag_steps: self.num_left_in_update
    )
    monkeypatch.setattr(
        GroupFilter,
        "_reason_to_drop",
        lambda self, group: None if self._planner.is_open(group.ticket_id) else "unwanted",
    )
    found, _ = fuzz(range(24))
    assert found.over_lag_bound > 0
