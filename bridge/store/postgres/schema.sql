-- The store of any number of runs. sqlite_schema.py has the same columns, so that both take the same statements.
CREATE SCHEMA sluice;

CREATE TABLE sluice.format (number integer NOT NULL);

-- What leases and heartbeats are counted by: this server's clock, in Unix seconds; one moment a statement.
CREATE FUNCTION sluice.now_s() RETURNS float8 LANGUAGE sql STABLE
    RETURN extract(epoch FROM statement_timestamp())::float8;

CREATE TABLE sluice.runs (
    run text PRIMARY KEY,
    name text NOT NULL,
    owner name NOT NULL DEFAULT current_user,       -- whose learner may lead it
    actor_role name NOT NULL,                       -- whose members may serve it
    created_s float8 NOT NULL DEFAULT sluice.now_s(),
    last_seq bigint NOT NULL DEFAULT 0,             -- the last group's number
    reissued bigint NOT NULL DEFAULT 0,
    incarnation bigint NOT NULL DEFAULT -1,         -- of the learner that leads, or led last
    holder text,                                    -- where it lives
    lead_expires_s float8,
    lead_by text,
    finished_step bigint,                           -- of the last weights, once all steps are done
    finished_s float8
) WITH (fillfactor = 50);                           -- room for its own next version: it changes with every group
CREATE TABLE sluice.restores (
    run text NOT NULL, incarnation bigint NOT NULL, step bigint NOT NULL, PRIMARY KEY (run, incarnation)
);
-- offered_by, claim, given_up_by, done_by: the call that did it last, so that it may be made again.
CREATE TABLE sluice.tickets (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    run text NOT NULL, id text NOT NULL, "order" bigint NOT NULL, kind text NOT NULL,
    payload bytea NOT NULL, fit text NOT NULL, only_for text,
    state text NOT NULL CHECK (state IN ('open', 'claimed', 'done', 'acknowledged', 'failed')),
    actor text, lease_expires_s float8, served smallint NOT NULL DEFAULT 0,
    attempts bigint NOT NULL DEFAULT 0, failure text,
    offered_by text, claim text, given_up_by text, done_by text,
    UNIQUE (run, id),
    -- Of what an actor may write: nobody who reads it gets more than it has room for, whatever was written.
    CHECK (octet_length(actor) <= 1024 AND octet_length(failure) <= 4096 AND octet_length(claim) <= 64
        AND octet_length(given_up_by) <= 64 AND octet_length(done_by) <= 64)
);
-- Only a table's first index begins with the run. To the planner all that begin with it look alike in a table that is
-- still empty, and the plan that it makes then is kept until somebody analyses the table: each ticket would be looked
-- for among all of the run's. Of equals it takes the newest.
CREATE INDEX tickets_by_order ON sluice.tickets (state, run, "order", number);
CREATE INDEX tickets_by_claim ON sluice.tickets (claim, run) WHERE state = 'claimed';
CREATE TABLE sluice.groups (
    run text NOT NULL, seq bigint NOT NULL, ticket_id text NOT NULL, kind text NOT NULL, actor text NOT NULL,
    max_step bigint NOT NULL, call text NOT NULL,
    PRIMARY KEY (run, seq), UNIQUE (ticket_id, run), UNIQUE (call, run),
    CHECK (octet_length(actor) <= 1024)
);
CREATE INDEX groups_by_kind ON sluice.groups (kind, run, seq);
-- Sent before the run's lock is taken, so that a large one on a slow way holds up nobody.
CREATE TABLE sluice.payloads (
    run text NOT NULL, call text NOT NULL, payload bytea NOT NULL, PRIMARY KEY (run, call),
    object text,                                    -- where the payload is, if it isn't here
    CHECK (octet_length(call) <= 64 AND octet_length(payload) <= 67108864 AND octet_length(object) <= 128)
);
ALTER TABLE sluice.payloads ALTER COLUMN payload SET STORAGE EXTERNAL;  -- numbers that don't compress
CREATE TABLE sluice.heartbeats (
    run text NOT NULL, process text NOT NULL, payload bytea NOT NULL, time_s float8 NOT NULL, PRIMARY KEY (run, process),
    holder text NOT NULL DEFAULT '',                -- the place whose actor has this name; empty: anybody may take it
    places bigint CHECK (places >= 0),              -- sequences that an actor's engine runs at once; NULL: it serves none
    CHECK (octet_length(process) <= 1024 AND octet_length(payload) <= 16384 AND octet_length(holder) <= 4096)
) WITH (fillfactor = 50);
-- How many engines serve, by their places ('64:3,256:1'): a row for a run, counted anew whenever somebody says that it
-- is old, so that an actor need not read the heartbeats of all.
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

-- The longest correct runs of a task's test cases, in milliseconds by case ('120,3400'). An actor may write any that
-- these bounds allow; a trigger sees to it that it makes none smaller (grants.sql).
CREATE TABLE sluice.anchors (
    run text NOT NULL, key text COLLATE "C" NOT NULL, ms text NOT NULL, PRIMARY KEY (run, key),
    CHECK (octet_length(key) BETWEEN 1 AND 64),
    CHECK (octet_length(ms) <= 36864 AND ms ~ '^(0|[1-9][0-9]{0,7})(,(0|[1-9][0-9]{0,7}))*$'
        AND array_length(string_to_array(ms, ','), 1) <= 4096)
);
-- The maximum of two rows, case by case; of the longer one the last cases stay as they are.
CREATE FUNCTION sluice.higher(mine text, theirs text) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN (SELECT string_agg(greatest(a, b)::text, ',' ORDER BY i)
        FROM unnest(string_to_array(mine, ',')::int[], string_to_array(theirs, ',')::int[])
            WITH ORDINALITY AS pairs (a, b, i));

-- Objects of groups that are gone, to be deleted from the bucket.
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

-- The writers of a run take turns from here to the end of their transactions. Whoever holds the lock has sent all that
-- it wants already; should the rest be lost on its way, the server ends the transaction (PostgreSQL 17 and later; those
-- before rely on the keepalives of the session).
CREATE FUNCTION sluice.lock_run(this_run text, mine bigint, at_most text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    leader bigint;
BEGIN
    SELECT incarnation INTO leader FROM sluice.runs WHERE run = this_run FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no run % here, or it is not for role %', this_run, current_user USING ERRCODE = 'SL002';
    END IF;
    IF leader <> mine THEN
        RAISE EXCEPTION '%', leader USING ERRCODE = 'SL001';
    END IF;
    IF current_setting('server_version_num')::int >= 170000 THEN
        PERFORM set_config('transaction_timeout', at_most, true);
    END IF;
END $$;
