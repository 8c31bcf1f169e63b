"""Packing of complete groups into the micro-batches of an update."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from bridge.rollout_types import Group
from configs.schema import Config
from learner.metrics.sample_record import PickedGroup, SamplePick
from learner.metrics.step_metrics import RewardMetrics
from learner.model.routing_replay import RoutingShape
from learner.schedule.ticket_ledger import TicketLedger
from learner.update.auto_shape import AutoShape
from learner.update.packing import MicroBatch, pack_groups


def consume(
    config: Config,
    planner: TicketLedger,
    tally: RewardMetrics,
    shape: AutoShape,
    groups: Sequence[Group],
    pick: SamplePick,
    routing: RoutingShape | None = None,
) -> list[MicroBatch]:
    """Records groups of one update as trained, with their rewards and text samples, and packs them.

    All available groups of the update are packed together, into as many micro-batches as they fill. RolloutPipe's
    feasible batch selector instead takes whole groups that fit one micro-batch, which leaves more slots empty.
    """
    num_trained = config.rounds.groups_per_round - planner.num_left_in_round
    picked = {g.ticket_id: planner.ticket(g.ticket_id) for i, g in enumerate(groups) if pick.wants(num_trained + i)}
    sources = {ticket_id: planner.source(ticket_id) for ticket_id in picked}

    def keep(group: Group, advantages: list[Float32[np.ndarray, " T"]]) -> None:
        if ticket := picked.get(group.ticket_id):
            source = sources[group.ticket_id]
            is_known = not (config.loss.uses_critic or config.loss.teacher_number(ticket.task.teacher))
            known = advantages if is_known else None  # a critic or a teacher makes them on the devices
            pick.book(PickedGroup(group=group, task=ticket.task, source=source, advantages=known))

    for group in groups:
        tally.add(group, planner.ticket(group.ticket_id).task)
    teachers = [config.loss.teacher_number(planner.ticket(group.ticket_id).task.teacher) for group in groups]
    done = [planner.consume(group.ticket_id) for group in groups]
    return pack_groups(
        groups,
        packing=shape.choose(groups, ends_update=done[-1].ends_update),
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        masks_truncated=config.prompts.truncated_responses == "mask",
        routing=routing,
        ends_update=done[-1].ends_update,
        ends_round=done[-1].ends_round,
        teachers=teachers,
        on_group=keep,
    )
