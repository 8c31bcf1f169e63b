"""From groups that are trained together to micro-batches."""

from collections.abc import Sequence

from bridge.types import Group
from configs.schema import Config
from learner.schedule.reward_tally import RewardTally
from learner.schedule.ticket_books import TicketBooks
from learner.update.packing import MicroBatch, pack_groups
from learner.update.row_shape import RowShape


def consume(
    config: Config, planner: TicketBooks, tally: RewardTally, shape: RowShape, groups: Sequence[Group]
) -> list[MicroBatch]:
    """Books groups of one update as trained, and what they earned, and packs them.

    All groups of the update that are there are packed together, into as many micro-batches as they fill. RolloutPipe's
    feasible batch selector takes the whole groups that fit one micro-batch instead, which leaves up to a group's worth
    of it empty: 1.18 computed tokens a real one in tests/bench/learner/shapes.py, against 1.02.
    """
    for group in groups:
        tally.book(group, planner.ticket(group.ticket_id).task)
    done = [planner.consume(group.ticket_id) for group in groups]
    return pack_groups(
        groups,
        packing=shape.take(groups, ends_update=done[-1].ends_update),
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        masks_truncated=config.prompts.truncated == "mask",
        ends_update=done[-1].ends_update,
        ends_round=done[-1].ends_round,
    )
