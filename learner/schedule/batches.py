"""The stream of micro-batches: groups in order of arrival, U to an update, R to a round."""

from collections.abc import Callable, Iterator

from bridge.store.protocol import LearnerStore
from bridge.types import Group
from configs.schema import Config
from learner.schedule.group_queue import GroupQueueIterator
from learner.schedule.planner import RoundPlanner
from learner.update.packing import MicroBatch, pack_groups


def micro_batches(
    config: Config,
    *,
    store: LearnerStore,
    queue: GroupQueueIterator,
    planner: RoundPlanner,
    step: Callable[[], int],
    on_issue: Callable[[int], None] = lambda num_tickets: None,
) -> Iterator[MicroBatch]:
    """Issues tickets, waits for groups and packs them; endless.

    All groups of the update that are there are packed together, into as many micro-batches as they fill. RolloutPipe's
    feasible batch selector takes the whole groups that fit one micro-batch instead, which leaves up to a group's worth
    of it empty: 1.18 computed tokens a real one in tests/bench/learner/shapes.py, against 1.02.

    Tickets are issued before every wait, so by rounds the next round starts only once the caller comes
    back from the last update's publish, and then under the step it published.

    Args:
      config: U, R, K, the shape of a micro-batch and the normalisation.
      store: where tickets go.
      queue: where groups come from.
      planner: the books.
      step: reads the learner's step.
      on_issue: told how many tickets were issued, when any were.
    """

    def issue() -> None:
        tickets = planner.issue(step=step())
        if tickets:
            store.put_tickets(tickets)
            on_issue(len(tickets))

    while True:
        issue()
        if config.rounds.train_start == "round_complete":
            yield from _whole_round(config, queue, planner)
            continue
        groups = [next(queue)]
        groups += queue.take_ready(planner.num_left_in_update - 1)
        yield from _consume(config, planner, groups)


def _whole_round(config: Config, queue: GroupQueueIterator, planner: RoundPlanner) -> Iterator[MicroBatch]:
    """The papers' serial baseline: nothing is trained before all R groups are there; submission order."""
    groups = sorted((next(queue) for _ in range(planner.num_left_in_round)), key=lambda g: g.order)
    while groups:
        chosen = planner.num_left_in_update
        yield from _consume(config, planner, groups[:chosen])
        groups = groups[chosen:]


def _consume(config: Config, planner: RoundPlanner, groups: list[Group]) -> list[MicroBatch]:
    done = [planner.consume(group.ticket_id) for group in groups]
    return pack_groups(
        groups,
        packing=config.packing,
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        ends_update=done[-1].ends_update,
        ends_round=done[-1].ends_round,
    )
