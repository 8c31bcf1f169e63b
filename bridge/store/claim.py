"""Claim rule of frontier-group dispatch, in Python and as one SQL statement.

Lowest order first. In frontier dispatch (RolloutPipe eq. 5-6; docs/design/streaming.md), F is the `width` lowest
orders among the groups that are not serving-complete. A ticket is issued if and only if its group is in F. While fewer
than `width` groups are in service, the lowest order that is not in service is the next of F. All actors claim from one
shared F, so a free actor takes the next group in submission order.

If a group's samples are separate tickets of one order, an actor takes its part of each of several groups instead of
whole groups (`spread`). The long responses of a long prompt then run on as many engines as possible (prompt
replication, ROLL Flash).

The SQL rows of `offered`, by order, are the input of `choose`. Evaluations and probes always pass. A training ticket
passes if its order is in service or among the first new orders that fit the frontier. The first `fair_share` of the
tickets that pass are claimed. Tickets beyond the actor's part of their order come last. The run's width, if set
(`LearnerStore.set_frontier_width`), replaces that of the claim.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """Claimable ticket: open, or with an expired lease."""

    id: str
    order: int
    is_train: bool
    """True for training tickets; evaluations and probes are not limited by the frontier."""


def choose(
    offers: Iterable[Offer],
    *,
    limit: int,
    max_train: int | None = None,
    width: int | None = None,
    in_service: Collection[int] = (),
) -> list[str]:
    """Returns the ids to issue now, lowest order first.

    Args:
      max_train: most training tickets; None: only `limit` applies.
      width: groups of the frontier; None: no frontier.
      in_service: orders of groups with a claimed ticket whose requests are still running.
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
    """Returns the offers in claim order for an actor that takes a part of each group; tickets beyond the part go last.

    Args:
      part: training tickets of one order that the actor takes before any beyond the part.
      held: tickets that the actor has in service, by order.
      num_groups: number of orders of training tickets to consider; None: all. With the limit, an actor with one free
        slot takes the lowest order even beyond its part.
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
    """Returns the number of tickets that an actor may take in addition to those it has.

    Its part of `total` is proportional to its engine: ceil(total places / all_places) - mine. With equal parts, a small
    engine would serve its part in several turns while a large one idles.

    Args:
      total: tickets, claimed and open, that all actors serve together.
      mine: tickets of `total` that this actor has.
      places: sequences that this actor's engine runs concurrently.
      all_places: sum of `places` over all actors; None: all actors have equal `places`.
    """
    whole = max(1, among) * places if all_places is None else max(places, all_places)
    return max(0, -(-total * places // whole) - mine)


CLAIM = """
WITH
bound AS (
    SELECT coalesce(frontier_width, :width) AS width FROM runs WHERE run = :run
),
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
held AS MATERIALIZED (
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
    FROM placed WHERE is_train = 0 OR is_new = 0
        OR place <= (SELECT width FROM bound) - (SELECT count(*) FROM in_service)
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
        (SELECT DISTINCT "order" FROM unserved ORDER BY "order" LIMIT (SELECT width FROM bound)) AS frontier)
)
UPDATE tickets SET state = 'claimed', served = 0, actor = :actor, lease_expires_s = {now} + :lease_s, claim = :call
WHERE number IN (
        SELECT number FROM admitted
        WHERE is_train = 0 OR :among < 2 OR nth <= (SELECT num_tickets FROM share)
        ORDER BY is_beyond, "order", number LIMIT :limit)
    AND NOT EXISTS (SELECT 1 FROM tickets WHERE run = :run AND state = 'claimed' AND claim = :call)
"""
