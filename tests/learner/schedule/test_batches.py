from types import SimpleNamespace
from typing import Any

import pytest

from configs import schema, sections
from learner.schedule.batches import consume
from learner.schedule.reward_tally import RewardTally
from learner.schedule.ticket_books import Consumed
from learner.update.row_shape import RowShape
from tests.bridge.factories import make_group, make_rollout, make_ticket


@pytest.mark.parametrize(("truncated", "num_trained"), [("zero", 7), ("keep", 7), ("mask", 3)])
def test_consume_trains_truncated_responses_unless_they_are_masked(truncated, num_trained):
    config = schema.Config(preset="test", prompts=sections.PromptsConfig(truncated=truncated))
    planner: Any = SimpleNamespace(
        consume=lambda id_: Consumed(ends_update=True, ends_round=False), ticket=lambda id_: make_ticket(id_)
    )
    tally = RewardTally(config.loss, max_response_tokens=config.sampling.max_response_tokens)
    rollouts = (make_rollout(3), make_rollout(4, reward=0.0, finish="length"))
    (micro,) = consume(config, planner, tally, RowShape(config), [make_group(make_ticket(), rollouts=rollouts)])
    assert int(micro.batch.loss_mask.sum()) == float(micro.batch.denominator) == num_trained
    assert int(micro.batch.num_truncated) == 1 and micro.ends_update
    assert tally.take()["verdicts/unjudged"] == 2  # booked, and of verdicts there are none
