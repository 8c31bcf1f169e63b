"""How many groups are trained together, and which micro-batches they make."""

from collections.abc import Iterable, Sequence

from bridge.types import Group
from configs.schema import Config
from learner.schedule.intake import G
from learner.schedule.ticket_books import TicketBooks
from learner.update.packing import MicroBatch, pack_groups


def num_wanted(config: Config, planner: TicketBooks) -> tuple[int, int]:
    """How many groups must be there before any is trained, and how many are taken then at most.

    One is enough where each complete group trains as it arrives (CGP, RolloutPipe section 3.2); the papers' serial
    baseline waits for the whole round.
    """
    if config.rounds.train_start == "round_complete":
        return planner.num_left_in_round, planner.num_left_in_round
    return 1, planner.num_left_in_update


def in_training_order(config: Config, groups: Iterable[G]) -> list[G]:
    """A whole round is trained in submission order, anything else as it arrived."""
    return sorted(groups, key=lambda g: g.order) if config.rounds.train_start == "round_complete" else list(groups)


def consume(config: Config, planner: TicketBooks, groups: Sequence[Group]) -> list[MicroBatch]:
    """Books groups of one update as trained, and packs them.

    All groups of the update that are there are packed together, into as many micro-batches as they fill. RolloutPipe's
    feasible batch selector takes the whole groups that fit one micro-batch instead, which leaves up to a group's worth
    of it empty: 1.18 computed tokens a real one in tests/bench/learner/shapes.py, against 1.02.
    """
    done = [planner.consume(group.ticket_id) for group in groups]
    return pack_groups(
        groups,
        packing=config.packing,
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        ends_update=done[-1].ends_update,
        ends_round=done[-1].ends_round,
    )
