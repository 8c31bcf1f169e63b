-- Store of any number of runs. sqlite_schema.py has the same columns, so that both engines accept the same statements.
CREATE SCHEMA sluice;

CREATE TABLE sluice.format (number integer NOT NULL);

-- Clock of leases and heartbeats: this server's time in Unix seconds, constant within a statement.
CREATE FUNCTION sluice.now_s() RETURNS float8 LANGUAGE sql STABLE
    RETURN extract(epoch FROM statement_timestamp())::float8;

CREATE TABLE sluice.runs (
    run text PRIMARY KEY,
    name text NOT NULL,
    owner name NOT NULL DEFAULT current_user,       -- role of the learner that may lead the run
    actor_role name NOT NULL,                       -- group role of the actors that may serve the run
    created_s float8 NOT NULL DEFAULT sluice.now_s(),
    last_seq bigint NOT NULL DEFAULT 0,             -- number of the last group
    reissued bigint NOT NULL DEFAULT 0,
    incarnation bigint NOT NULL DEFAULT -1,         -- of the current or last leader
    holder text,                                    -- location of the leader
    lead_expires_s float8,
    lead_by text,
    finished_step bigint,                           -- step of the last weights; NULL while the run is in progress
    finished_s float8,
    frontier_width bigint                           -- groups of the frontier; NULL: each claim's own width
) WITH (fillfactor = 50);                           -- free space for row versions, because every group changes the row
CREATE TABLE sluice.restores (
    run text NOT NULL, incarnation bigint NOT NULL, step bigint NOT NULL, PRIMARY KEY (run, incarnation)
);
-- offered_by, claim, given_up_by, done_by: id of the last call that changed the state, so that retries are idempotent.
CREATE TABLE sluice.tickets (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    run text NOT NULL, id text NOT NULL, "order" bigint NOT NULL, kind text NOT NULL,
    payload bytea NOT NULL, fit text NOT NULL, only_for text,
    state text NOT NULL CHECK (state IN ('open', 'claimed', 'done', 'acknowledged', 'failed')),
    actor text, lease_expires_s float8, served smallint NOT NULL DEFAULT 0,
    attempts bigint NOT NULL DEFAULT 0, failure text,
    offered_by text, claim text, given_up_by text, done_by text,
    UNIQUE (run, id),
    -- Limits on columns that an actor may write, so that readers never receive unbounded values.
    CHECK (octet_length(actor) <= 4096 AND octet_length(failure) <= 4096 AND octet_length(claim) <= 64
        AND octet_length(given_up_by) <= 64 AND octet_length(done_by) <= 64)
);
-- Only a table's first index begins with the run. In an empty table, all indexes that begin with the run look equal to
-- the planner, it takes the newest of them, and that plan is kept until ANALYZE: each lookup of a ticket would scan all
-- tickets of the run.
CREATE INDEX tickets_by_order ON sluice.tickets (state, run, "order", number);
CREATE INDEX tickets_by_claim ON sluice.tickets (claim, run) WHERE state = 'claimed';
-- What was sampled of tickets that were handed over, while they are open or claimed.
CREATE TABLE sluice.progress (
    run text NOT NULL, ticket_id text NOT NULL, actors text NOT NULL, payload bytea NOT NULL, call text NOT NULL,
    PRIMARY KEY (run, ticket_id),
    CHECK (octet_length(actors) <= 4096 AND octet_length(payload) <= 67108864 AND octet_length(call) <= 64)
);
ALTER TABLE sluice.progress ALTER COLUMN payload SET STORAGE EXTERNAL;  -- numbers do not compress
CREATE FUNCTION sluice.drop_progress() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM sluice.progress WHERE run = OLD.run AND ticket_id = OLD.id;
    RETURN NULL;
END $$;
CREATE TRIGGER progress_ends AFTER UPDATE OF state, offered_by, given_up_by ON sluice.tickets
    FOR EACH ROW WHEN (NEW.state NOT IN ('open', 'claimed') OR NEW.offered_by IS DISTINCT FROM OLD.offered_by
        OR NEW.given_up_by IS DISTINCT FROM OLD.given_up_by) EXECUTE FUNCTION sluice.drop_progress();
CREATE TRIGGER progress_goes_with_its_ticket AFTER DELETE ON sluice.tickets
    FOR EACH ROW EXECUTE FUNCTION sluice.drop_progress();
CREATE TABLE sluice.groups (
    run text NOT NULL, seq bigint NOT NULL, ticket_id text NOT NULL, kind text NOT NULL, actor text NOT NULL,
    max_step bigint NOT NULL, call text NOT NULL,
    PRIMARY KEY (run, seq), UNIQUE (ticket_id, run), UNIQUE (call, run),
    CHECK (octet_length(actor) <= 4096)
);
CREATE INDEX groups_by_kind ON sluice.groups (kind, run, seq);
-- Inserted before the run is locked, so that a large payload on a slow connection blocks no other writer.
CREATE TABLE sluice.payloads (
    run text NOT NULL, call text NOT NULL, payload bytea NOT NULL, PRIMARY KEY (run, call),
    object text,                                    -- object in the bucket that contains the payload; NULL if stored here
    CHECK (octet_length(call) <= 64 AND octet_length(payload) <= 67108864 AND octet_length(object) <= 128)
);
ALTER TABLE sluice.payloads ALTER COLUMN payload SET STORAGE EXTERNAL;  -- numbers do not compress
CREATE TABLE sluice.heartbeats (
    run text NOT NULL, process text NOT NULL, payload bytea NOT NULL, time_s float8 NOT NULL, PRIMARY KEY (run, process),
    holder text NOT NULL DEFAULT '',                -- location of the actor with this name; empty: the name is free
    places bigint CHECK (places >= 0),              -- concurrent sequences of an actor's engine; NULL: it does not serve
    CHECK (octet_length(process) <= 1024 AND octet_length(payload) <= 16384 AND octet_length(holder) <= 4096)
) WITH (fillfactor = 50);
-- Number of serving engines by their concurrent sequences ('64:3,256:1'), one row per run. A process that finds the row
-- outdated triggers a recount, so that actors need not read all heartbeats.
CREATE TABLE sluice.serving (
    run text PRIMARY KEY, counted_s float8 NOT NULL DEFAULT 0, sizes text NOT NULL DEFAULT ''
) WITH (fillfactor = 50);
CREATE FUNCTION sluice.count_engines() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.counted_s := sluice.now_s();
    NEW.sizes := (SELECT coalesce(string_agg(places || ':' || num, ','), '')
        FROM (SELECT places, count(*) AS num FROM sluice.heartbeats
            WHERE run = NEW.run AND places IS NOT NULL AND time_s > NEW.counted_s - 10
            GROUP BY places ORDER BY places LIMIT 256) AS counted);
    RETURN NEW;
END $$;
CREATE TRIGGER count_engines BEFORE UPDATE ON sluice.serving FOR EACH ROW EXECUTE FUNCTION sluice.count_engines();
CREATE TABLE sluice.fences (run text NOT NULL, actor text NOT NULL, reason text NOT NULL, PRIMARY KEY (run, actor));
CREATE TABLE sluice.announcements (
    run text PRIMARY KEY, incarnation bigint NOT NULL, step bigint NOT NULL, call text NOT NULL, payload bytea NOT NULL
);
CREATE TABLE sluice.cards (run text PRIMARY KEY, payload bytea NOT NULL);
CREATE TABLE sluice.blobs (run text NOT NULL, blake3 text NOT NULL, content bytea NOT NULL, PRIMARY KEY (run, blake3));

-- Longest correct runs of a task's test cases, in milliseconds per case ('120,3400'). An actor may write any values
-- within these limits, and a trigger rejects lower ones (grants.sql).
CREATE TABLE sluice.anchors (
    run text NOT NULL, key text COLLATE "C" NOT NULL, ms text NOT NULL, PRIMARY KEY (run, key),
    CHECK (octet_length(key) BETWEEN 1 AND 64),
    CHECK (octet_length(ms) <= 36864 AND ms ~ '^(0|[1-9][0-9]{0,7})(,(0|[1-9][0-9]{0,7}))*$'
        AND array_length(string_to_array(ms, ','), 1) <= 4096)
);
-- Maximum of two rows per case; extra cases of the longer row are kept.
CREATE FUNCTION sluice.higher(mine text, theirs text) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN (SELECT string_agg(greatest(a, b)::text, ',' ORDER BY i)
        FROM unnest(string_to_array(mine, ',')::int[], string_to_array(theirs, ',')::int[])
            WITH ORDINALITY AS pairs (a, b, i));

-- Objects of deleted groups, to be deleted from the bucket.
CREATE TABLE sluice.dropped_objects (
    run text NOT NULL, ticket_id text NOT NULL, object text NOT NULL, PRIMARY KEY (run, object, ticket_id)
);

CREATE FUNCTION sluice.drop_payload() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO sluice.dropped_objects (run, ticket_id, object)
        SELECT OLD.run, OLD.ticket_id, object FROM sluice.payloads
        WHERE run = OLD.run AND call = OLD.call AND object IS NOT NULL ON CONFLICT DO NOTHING;
    DELETE FROM sluice.payloads WHERE run = OLD.run AND call = OLD.call;
    RETURN NULL;
END $$;
CREATE TRIGGER payload_goes_with_its_group AFTER DELETE ON sluice.groups
    FOR EACH ROW EXECUTE FUNCTION sluice.drop_payload();

-- Serializes the writers of a run until the end of their transactions. A writer sends its data before it takes the lock.
-- If its connection is lost afterwards, the server ends the transaction (PostgreSQL 17 and later; earlier versions rely
-- on the keepalives of the session).
CREATE FUNCTION sluice.lock_run(this_run text, mine bigint, at_most text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    leader bigint;
BEGIN
    SELECT incarnation INTO leader FROM sluice.runs WHERE run = this_run FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no run %, or role % may not serve it', this_run, current_user USING ERRCODE = 'SL002';
    END IF;
    IF leader <> mine THEN
        RAISE EXCEPTION '%', leader USING ERRCODE = 'SL001';
    END IF;
    IF current_setting('server_version_num')::int >= 170000 THEN
        PERFORM set_config('transaction_timeout', at_most, true);
    END IF;
END $$;
