"""`frontier.choose`, `spread` and `fair_share` in SQL: which tickets a claim gets is decided where the tickets are.

The rows of `offered`, by order, are what `choose` goes through: evaluations and probes pass, a training ticket if its
order is in service or among the first new ones that the frontier has room for, and the first `fair_share` of those.
What is over the actor's part of its order comes last.
"""

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
