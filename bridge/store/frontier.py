"""Which tickets a claim gets. Pure, and the same for every store and for the simulator.

The lowest order goes first. In frontier-group dispatch (RolloutPipe eq. 5-6; docs/frontier.md) F is the `width` lowest
orders among the groups that are not serving-complete, and a ticket is handed out if and only if its group is in F: as
long as fewer than `width` groups are in service, the lowest order that is not is the next of F. All actors claim from
the one F, so whoever is free takes the next group in submission order, and none keeps a part of the frontier to itself.
"""

import dataclasses
from collections.abc import Collection, Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A ticket that may be claimed: one that is open, or whose lease ran out."""

    id: str
    order: int
    is_train: bool
    """Evaluations and probes are handed out whatever the frontier says."""


def choose(
    offers: Iterable[Offer],
    *,
    limit: int,
    max_train: int | None = None,
    width: int | None = None,
    in_service: Collection[int] = (),
) -> list[str]:
    """Ids to hand out now, lowest order first.

    Args:
      offers: what may be claimed, by order.
      limit: how many at most.
      max_train: how many training tickets at most; None for no bound but `limit`.
      width: groups of the frontier; None for none.
      in_service: orders of the groups of which a claimed ticket's requests are still running.
    """
    serving, num_train = set(in_service), 0
    chosen: list[str] = []
    for offer in offers:
        if len(chosen) == limit:
            break
        if offer.is_train:
            is_full = width is not None and len(serving) >= width and offer.order not in serving
            if is_full or num_train == max_train:
                continue
            serving.add(offer.order)
            num_train += 1
        chosen.append(offer.id)
    return chosen


def fair_share(total: int, *, mine: int, among: int) -> int:
    """How many more tickets one of several actors may take; each gets its part of `total`, claimed and open."""
    return max(0, -(-total // max(1, among)) - mine)
