"""From groups that are trained together to micro-batches."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from bridge.types import Group
from configs.schema import Config
from learner.samples.pick import Picked, SamplePick
from learner.schedule.reward_tally import RewardTally
from learner.schedule.ticket_books import TicketBooks
from learner.update.packing import MicroBatch, pack_groups
from learner.update.row_shape import RowShape


def consume(
    config: Config,
    planner: TicketBooks,
    tally: RewardTally,
    shape: RowShape,
    groups: Sequence[Group],
    pick: SamplePick,
) -> list[MicroBatch]:
    """Books groups of one update as trained, what they earned, and which are kept as text; packs them.

    All groups of the update that are there are packed together, into as many micro-batches as they fill. RolloutPipe's
    feasible batch selector takes the whole groups that fit one micro-batch instead, which leaves up to a group's worth
    of it empty: 1.18 computed tokens a real one in tests/bench/learner/shapes.py, against 1.02.
    """
    num_trained = config.rounds.groups_per_round - planner.num_left_in_round
    picked = {g.ticket_id: planner.ticket(g.ticket_id) for i, g in enumerate(groups) if pick.wants(num_trained + i)}
    sources = {ticket_id: planner.source(ticket_id) for ticket_id in picked}

    def keep(group: Group, advantages: list[Float32[np.ndarray, " T"]]) -> None:
        if ticket := picked.get(group.ticket_id):
            source = sources[group.ticket_id]
            pick.book(Picked(group=group, task=ticket.task, source=source, advantages=advantages))

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
        told=keep,
    )
