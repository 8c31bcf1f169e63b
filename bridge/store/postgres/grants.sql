-- What each role may do. A learner: everything, in the runs it owns. An actor: read a run's tickets, take and give back
-- leases, hand groups in, say that it lives, raise anchors; in the runs it may serve. Statements that break a rule fail
-- as a whole.
GRANT USAGE ON SCHEMA sluice TO sluice_learner, sluice_actor;
GRANT SELECT ON sluice.format TO sluice_learner, sluice_actor;
GRANT SELECT, INSERT, UPDATE, DELETE ON sluice.runs, sluice.restores, sluice.tickets, sluice.groups, sluice.payloads,
    sluice.heartbeats, sluice.serving, sluice.fences, sluice.announcements, sluice.cards, sluice.blobs,
    sluice.anchors, sluice.dropped_objects TO sluice_learner;

GRANT SELECT (run, name, owner, actor_role, created_s, last_seq, reissued, incarnation, finished_step, finished_s),
    UPDATE (last_seq, reissued) ON sluice.runs TO sluice_actor;
GRANT SELECT, UPDATE (state, actor, lease_expires_s, served, attempts, failure, claim, given_up_by, done_by)
    ON sluice.tickets TO sluice_actor;
GRANT SELECT, INSERT ON sluice.groups TO sluice_actor;
GRANT SELECT (run, call), INSERT, DELETE ON sluice.payloads TO sluice_actor;
GRANT SELECT, INSERT, UPDATE ON sluice.heartbeats TO sluice_actor;
GRANT SELECT, UPDATE (counted_s) ON sluice.serving TO sluice_actor;
GRANT SELECT, INSERT, UPDATE (ms) ON sluice.anchors TO sluice_actor;
GRANT SELECT ON sluice.fences, sluice.announcements, sluice.cards, sluice.blobs TO sluice_actor;

-- FORCE: whoever made the tables is held to the rules too; only superusers are not.
CREATE FUNCTION sluice.has_role(role_name name) RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(pg_has_role(current_user, to_regrole(quote_ident(role_name)), 'MEMBER'), false);
ALTER TABLE sluice.runs ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY learner ON sluice.runs TO sluice_learner USING (sluice.has_role(owner)) WITH CHECK (sluice.has_role(owner));
CREATE POLICY actor_reads ON sluice.runs FOR SELECT TO sluice_actor USING (sluice.has_role(actor_role));
CREATE POLICY actor_counts ON sluice.runs FOR UPDATE TO sluice_actor USING (sluice.has_role(actor_role));

DO $$
DECLARE
    name text;
    owned constant text := 'run IN (SELECT run FROM sluice.runs WHERE sluice.has_role(owner))';
    served constant text := 'run IN (SELECT run FROM sluice.runs WHERE sluice.has_role(actor_role))';
BEGIN
    FOREACH name IN ARRAY ARRAY['restores', 'tickets', 'groups', 'payloads', 'heartbeats', 'serving', 'fences',
            'announcements', 'cards', 'blobs', 'anchors', 'dropped_objects'] LOOP
        EXECUTE format('ALTER TABLE sluice.%I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY learner ON sluice.%I TO sluice_learner USING (%s) WITH CHECK (%s)', name, owned, owned);
        IF name NOT IN ('restores', 'dropped_objects') THEN
            EXECUTE format('CREATE POLICY actor_reads ON sluice.%I FOR SELECT TO sluice_actor USING (%s)', name, served);
        END IF;
    END LOOP;
    EXECUTE format('CREATE POLICY actor_serves ON sluice.tickets FOR UPDATE TO sluice_actor USING (%s)', served);
    EXECUTE format('CREATE POLICY actor_hands_in ON sluice.groups FOR INSERT TO sluice_actor WITH CHECK (%s)', served);
    EXECUTE format('CREATE POLICY actor_hands_in ON sluice.payloads FOR INSERT TO sluice_actor WITH CHECK (%s)', served);
    -- Only what no group has: what was refused goes in the transaction that brought it.
    EXECUTE format('CREATE POLICY actor_takes_back ON sluice.payloads FOR DELETE TO sluice_actor USING (%s AND NOT EXISTS
        (SELECT 1 FROM sluice.groups g WHERE g.run = payloads.run AND g.call = payloads.call))', served);
    EXECUTE format('CREATE POLICY actor_beats ON sluice.heartbeats FOR INSERT TO sluice_actor
        WITH CHECK (%s AND process <> ''learner'')', served);
    EXECUTE format('CREATE POLICY actor_beats_on ON sluice.heartbeats FOR UPDATE TO sluice_actor
        USING (%s AND process <> ''learner'')', served);
    EXECUTE format('CREATE POLICY actor_raises ON sluice.anchors FOR INSERT TO sluice_actor WITH CHECK (%s)', served);
    EXECUTE format('CREATE POLICY actor_raises_on ON sluice.anchors FOR UPDATE TO sluice_actor USING (%s)', served);
    EXECUTE format('CREATE POLICY actor_has_counted ON sluice.serving FOR UPDATE TO sluice_actor USING (%s)', served);
END $$;

-- Rules that are not of one row and one column, for all but the run's learner.
CREATE FUNCTION sluice.owns(this_run text) RETURNS boolean LANGUAGE sql STABLE
    RETURN EXISTS (SELECT 1 FROM sluice.runs WHERE run = this_run AND sluice.has_role(owner));
CREATE FUNCTION sluice.refuse(what text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'role % may not %: that is for the run''s learner', current_user, what
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION sluice.check_run() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.last_seq NOT IN (OLD.last_seq, OLD.last_seq + 1)
            OR NEW.reissued NOT IN (OLD.reissued, OLD.reissued + 1) THEN
        PERFORM sluice.refuse('set a run''s counters');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_run BEFORE UPDATE ON sluice.runs
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_run();

CREATE FUNCTION sluice.check_ticket() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (OLD.state || ' ' || NEW.state) NOT IN ('open claimed', 'claimed claimed', 'claimed open', 'claimed failed',
            'open done', 'claimed done', 'failed done') THEN
        PERFORM sluice.refuse(format('make a ticket %s that is %s', NEW.state, OLD.state));
    END IF;
    IF NEW.attempts NOT IN (OLD.attempts, OLD.attempts + 1) THEN
        PERFORM sluice.refuse('set a ticket''s attempts');
    END IF;
    IF NEW.state = 'claimed' AND OLD.state = 'claimed' AND NEW.actor <> OLD.actor
            AND OLD.lease_expires_s > sluice.now_s() THEN
        PERFORM sluice.refuse('take a ticket whose lease has not ended');
    END IF;
    -- PostgreSQL's NaN is above every number.
    IF NEW.state = 'claimed' AND (NEW.actor IS NULL OR NEW.lease_expires_s IS NULL
            OR NEW.lease_expires_s > sluice.now_s() + 86400) THEN
        PERFORM sluice.refuse('claim a ticket for nobody, or for more than a day');
    END IF;
    IF NEW.state IN ('claimed', 'done') AND NEW.only_for IS DISTINCT FROM NEW.actor THEN
        IF NEW.only_for IS NOT NULL THEN
            PERFORM sluice.refuse('serve a ticket that is another actor''s alone');
        END IF;
        IF EXISTS (SELECT 1 FROM sluice.fences f WHERE f.run = NEW.run AND f.actor = NEW.actor) THEN
            PERFORM sluice.refuse('serve as an actor that is fenced');
        END IF;
    END IF;
    IF NEW.state = 'done' AND NOT EXISTS (SELECT 1 FROM sluice.groups g
            WHERE g.run = NEW.run AND g.ticket_id = NEW.id AND g.call = NEW.done_by) THEN
        PERFORM sluice.refuse('call a ticket done without its group');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_ticket BEFORE UPDATE ON sluice.tickets
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_ticket();

CREATE FUNCTION sluice.check_group() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.seq IS DISTINCT FROM (SELECT last_seq FROM sluice.runs WHERE run = NEW.run) THEN
        PERFORM sluice.refuse('number groups otherwise than one after another');
    END IF;
    IF NOT EXISTS (SELECT 1 FROM sluice.payloads p WHERE p.run = NEW.run AND p.call = NEW.call) THEN
        PERFORM sluice.refuse('hand in a group of nothing');
    END IF;
    -- The state is looked at apart here and below: the ticket is to be found by its id, not among all of a state.
    IF coalesce((SELECT t.state FROM sluice.tickets t WHERE t.run = NEW.run AND t.id = NEW.ticket_id
            AND t.kind = NEW.kind), '') NOT IN ('open', 'claimed', 'failed') THEN
        PERFORM sluice.refuse('hand in a group that nobody waits for');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_group BEFORE INSERT ON sluice.groups
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_group();

-- At the end of the transaction: one that brings a group and leaves its ticket open would keep all others' out.
CREATE FUNCTION sluice.check_answered() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT coalesce((SELECT t.state = 'done' AND t.done_by = NEW.call AND t.actor = NEW.actor
            FROM sluice.tickets t WHERE t.run = NEW.run AND t.id = NEW.ticket_id), false) THEN
        PERFORM sluice.refuse('hand in a group without closing its ticket');
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER check_answered AFTER INSERT ON sluice.groups DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_answered();

-- The learner reads all that say they live.
CREATE FUNCTION sluice.check_heartbeat() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF abs(NEW.time_s - sluice.now_s()) > 1 THEN
        PERFORM sluice.refuse('say when it was alive: the server''s clock does');
    END IF;
    -- Counted where one comes or comes back alone: not with each heartbeat of each.
    IF NOT EXISTS (SELECT 1 FROM sluice.heartbeats h WHERE h.run = NEW.run AND h.process = NEW.process
            AND h.time_s > sluice.now_s() - 3600) THEN
        IF (SELECT count(*) FROM sluice.heartbeats h WHERE h.run = NEW.run AND h.process <> NEW.process
                AND h.time_s > sluice.now_s() - 3600) >= 4096 THEN
            PERFORM sluice.refuse('be one more than 4096 processes of an hour');
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_heartbeat BEFORE INSERT OR UPDATE ON sluice.heartbeats
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_heartbeat();

-- A smaller one would have correct answers of others end as too slow.
CREATE FUNCTION sluice.check_anchor() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.ms <> sluice.higher(OLD.ms, NEW.ms) THEN
        PERFORM sluice.refuse('make an anchor smaller');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_anchor BEFORE UPDATE ON sluice.anchors
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_anchor();
