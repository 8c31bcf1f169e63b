"""The claim rule (frontier-group dispatch): in Python, and as one SQL statement.

The lowest order goes first. In frontier-group dispatch (RolloutPipe eq. 5-6; docs/frontier.md) F is the `width` lowest
orders among the groups that are not serving-complete, and a ticket is handed out if and only if its group is in F: as
long as fewer than `width` groups are in service, the lowest order that is not is the next of F. All actors claim from
the one F, so whoever is free takes the next group in submission order, and none keeps a part of the frontier to itself.

Where a group's samples are tickets of their own, all of its order, an actor takes its part of each of several groups
rather than several groups whole (`spread`): a long prompt's long responses then run on as many engines as there are
(prompt replication, ROLL Flash).

The rows of `offered`, by order, are what `choose` goes through: evaluations and probes pass, a training ticket if its
order is in service or among the first new ones that the frontier has room for, and the first `fair_share` of those.
What is over the actor's part of its order comes last.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping


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


def spread(offers: Iterable[Offer], *, part: int, held: Mapping[int, int], num_groups: int | None) -> list[Offer]:
    """The offers as an actor wants them that has a part of each group: what is over the part goes last.

    Args:
      offers: by order.
      part: training tickets of one order that it takes before any more of that order.
      held: how many it has in service, by order.
      num_groups: how many orders of training tickets are looked through; None for all. Who has one place free takes of
        the lowest order, whatever it holds of that: it passes over a group for no other that it has no room for.
    """
    counts: dict[int, int] = {}
    within: list[Offer] = []
    beyond: list[Offer] = []
    for offer in offers:
        if offer.is_train:
            if offer.order not in counts and len(counts) == num_groups:
                continue
            counts[offer.order] = counts.get(offer.order, held.get(offer.order, 0)) + 1
        (beyond if offer.is_train and counts[offer.order] > part else within).append(offer)
    return within + beyond


def fair_share(total: int, *, mine: int, among: int, places: int = 1, all_places: int | None = None) -> int:
    """Returns the number of tickets that one of several actors may take beyond those it has.

    Its part of `total`, claimed and open, is in proportion to its engine: ceil(total places / all_places) - mine. In
    equal parts a small engine would serve its part in several turns while a large one idles.

    Args:
      total: tickets that all actors serve together.
      mine: those of them that this actor has.
      among: the actors.
      places: sequences that this actor's engine runs at once.
      all_places: the sum of all actors' places; None where they have as many each.
    """
    whole = max(1, among) * places if all_places is None else max(places, all_places)
    return max(0, -(-total * places // whole) - mine)


CLAIM = """
WITH
mine AS (
    -- Whoever is fenced may take what was put for it alone.
    SELECT number, "order", kind, state, lease_expires_s FROM tickets
    WHERE run = :run AND state IN ('open', 'claimed') AND (
        only_for = :actor OR (only_for IS NULL
            AND NOT EXISTS (SELECT 1 FROM fences WHERE run = :run AND actor = :actor)))
),
offered AS (
    SELECT * FROM (
        SELECT number, "order", 1 AS is_train FROM mine
        WHERE kind = 'train' AND (state = 'open' OR lease_expires_s <= {now})
            AND (:num_groups >= :no_limit OR "order" <= (SELECT max("order") FROM (
                SELECT DISTINCT "order" FROM mine
                WHERE kind = 'train' AND (state = 'open' OR lease_expires_s <= {now})
                ORDER BY "order" LIMIT :num_groups) AS groups_looked_through))
        ORDER BY "order", number LIMIT :num_train_offers) AS train
    UNION ALL
    SELECT * FROM (
        SELECT number, "order", 0 AS is_train FROM mine
        WHERE kind <> 'train' AND (state = 'open' OR lease_expires_s <= {now})
        ORDER BY "order", number LIMIT :limit) AS pinned
),
in_service AS (
    SELECT DISTINCT "order" FROM tickets
    WHERE run = :run AND state = 'claimed' AND lease_expires_s > {now} AND served = 0 AND kind = 'train'
),
placed AS (
    SELECT number, "order", is_train, is_new,
        dense_rank() OVER (PARTITION BY is_train, is_new ORDER BY "order") AS place
    FROM (SELECT number, "order", is_train,
        CASE WHEN "order" IN (SELECT "order" FROM in_service) THEN 0 ELSE 1 END AS is_new FROM offered) AS offers
),
held AS (
    SELECT "order", count(*) AS num_tickets FROM tickets
    WHERE run = :run AND state = 'claimed' AND lease_expires_s > {now} AND served = 0 AND kind = 'train'
        AND actor = :actor AND :part < :no_limit
    GROUP BY "order"
),
parted AS (
    SELECT number, "order", is_train,
        CASE WHEN is_train = 1 AND row_number() OVER (PARTITION BY is_train, "order" ORDER BY number) > :part
            - coalesce((SELECT num_tickets FROM held WHERE held."order" = placed."order"), 0)
        THEN 1 ELSE 0 END AS is_beyond
    FROM placed WHERE is_train = 0 OR is_new = 0 OR place <= :width - (SELECT count(*) FROM in_service)
),
admitted AS (
    SELECT number, "order", is_train, is_beyond,
        row_number() OVER (PARTITION BY is_train ORDER BY is_beyond, "order", number) AS nth
    FROM parted
),
unserved AS (
    -- Whose lease ran out, served or not, is to be served again, and nobody's.
    SELECT "order", CASE WHEN state = 'claimed' AND lease_expires_s > {now} AND actor = :actor
        THEN 1 ELSE 0 END AS is_held
    FROM tickets
    WHERE run = :run AND state IN ('open', 'claimed') AND kind = 'train' AND only_for IS NULL
        AND (state = 'open' OR served = 0 OR lease_expires_s <= {now}) AND :among > 1
),
share AS (
    SELECT (count(*) * :places + :all_places - 1) / :all_places - coalesce(sum(is_held), 0) AS num_tickets
    FROM unserved WHERE "order" <= (SELECT max("order") FROM
        (SELECT DISTINCT "order" FROM unserved ORDER BY "order" LIMIT :width) AS frontier)
)
UPDATE tickets SET state = 'claimed', served = 0, actor = :actor, lease_expires_s = {now} + :lease_s, claim = :call
WHERE number IN (
        SELECT number FROM admitted
        WHERE is_train = 0 OR :among < 2 OR nth <= (SELECT num_tickets FROM share)
        ORDER BY is_beyond, "order", number LIMIT :limit)
    AND NOT EXISTS (SELECT 1 FROM tickets WHERE run = :run AND state = 'claimed' AND claim = :call)
"""
