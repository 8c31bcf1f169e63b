import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.rollout_types import Task
from configs import schema, sections
from configs.sections.teacher import Teacher
from learner.metrics.sample_record import SamplePick
from learner.metrics.step_metrics import RewardMetrics
from learner.schedule.consume_groups import consume
from learner.schedule.ticket_ledger import Consumed
from learner.update.auto_shape import AutoShape
from tests.bridge.factories import make_group, make_rollout, make_ticket


def planner_of(*, num_left_in_round: int) -> Any:
    return SimpleNamespace(
        consume=lambda id_: Consumed(ends_update=True, ends_round=False),
        ticket=lambda id_: make_ticket(id_),
        source=lambda id_: f"source of {id_}",
        num_left_in_round=num_left_in_round,
    )


def pick_of(config: schema.Config, kept: int) -> SamplePick:
    return SamplePick(groups_per_round=config.rounds.groups_per_round, kept_per_round=kept)


@pytest.mark.parametrize(("truncated", "num_trained"), [("zero", 7), ("keep", 7), ("mask", 3)])
def test_consume_trains_truncated_responses_unless_they_are_masked(truncated, num_trained):
    config = schema.Config(preset="test", prompts=sections.PromptsConfig(truncated_responses=truncated))
    planner: Any = planner_of(num_left_in_round=config.rounds.groups_per_round)
    tally = RewardMetrics(config.loss, max_response_tokens=config.sampling.max_response_tokens)
    rollouts = (make_rollout(3), make_rollout(4, reward=0.0, finish="length"))
    groups = [make_group(make_ticket(), rollouts=rollouts)]
    (micro,) = consume(config, planner, tally, AutoShape(config), groups, pick_of(config, 0))
    assert int(micro.batch.loss_mask.sum()) == float(micro.batch.denominator) == num_trained
    assert int(micro.batch.num_truncated) == 1 and micro.ends_update
    assert tally.take()["verdicts/unscored"] == 2  # booked, and of verdicts there are none


def test_consume_keeps_groups_evenly_over_the_round_with_the_advantages_they_train_with():
    config = schema.Config(
        preset="test",
        rounds=sections.RoundsConfig(groups_per_round=6, groups_per_update=3),
        loss=sections.LossConfig(advantage="mean_baseline"),
    )
    tally = RewardMetrics(config.loss, max_response_tokens=config.sampling.max_response_tokens)
    pick = pick_of(config, 3)
    rollouts = (make_rollout(3, reward=1.0), make_rollout(2, reward=0.0))
    groups = [make_group(make_ticket(f"t{i}"), rollouts=rollouts) for i in range(3, 6)]
    consume(
        config, planner_of(num_left_in_round=3), tally, AutoShape(config), groups, pick
    )  # the round's second half: 3, 4 and 5
    kept = pick.take()
    assert [(p.group.ticket_id, p.source) for p in kept] == [("t3", "source of t3"), ("t5", "source of t5")]
    assert [a.tolist() for a in kept[0].advantages or ()] == [[0.5, 0.5, 0.5], [-0.5, -0.5]]


def test_group_with_a_teacher_has_no_known_advantages():
    loss = sections.LossConfig(advantage="none", teacher_coef=1.0, teachers={"a": Teacher(path="m")})
    prompts = sections.PromptsConfig(teacher_field="t")
    config = schema.Config(preset="test", loss=loss, prompts=prompts)
    planner: Any = planner_of(num_left_in_round=config.rounds.groups_per_round)
    planner.ticket = lambda id_: make_ticket(
        id_, task=dataclasses.replace(Task.judged_by("exact", answer="42"), teacher="a")
    )
    tally, pick = RewardMetrics(loss, max_response_tokens=16), pick_of(config, config.rounds.groups_per_round)
    groups = [make_group(make_ticket(), rollouts=(make_rollout(3), make_rollout(2)))]
    consume(config, planner, tally, AutoShape(config), groups, pick)
    assert [p.advantages for p in pick.take()] == [None]
