-- Privileges per role. Learner: everything in its own runs. Actor, in the runs that it may serve: read tickets, claim
-- and release leases, submit groups, send heartbeats and raise timeout anchors. A statement that violates a rule fails
-- completely.
GRANT USAGE ON SCHEMA sluice TO sluice_learner, sluice_actor;
GRANT SELECT ON sluice.format TO sluice_learner, sluice_actor;
GRANT SELECT, INSERT, UPDATE, DELETE ON sluice.runs, sluice.restores, sluice.tickets, sluice.groups, sluice.payloads,
    sluice.progress, sluice.heartbeats, sluice.serving, sluice.fences, sluice.announcements, sluice.cards, sluice.blobs,
    sluice.anchors, sluice.dropped_objects TO sluice_learner;

GRANT SELECT (run, name, owner, actor_role, created_s, last_seq, reissued, incarnation, finished_step, finished_s,
    frontier_width), UPDATE (last_seq, reissued) ON sluice.runs TO sluice_actor;
GRANT SELECT, UPDATE (state, actor, lease_expires_s, served, attempts, failure, claim, given_up_by, done_by)
    ON sluice.tickets TO sluice_actor;
GRANT SELECT, INSERT, UPDATE (actors, payload, call), DELETE ON sluice.progress TO sluice_actor;
GRANT SELECT, INSERT ON sluice.groups TO sluice_actor;
GRANT SELECT (run, call), INSERT, DELETE ON sluice.payloads TO sluice_actor;
GRANT SELECT, INSERT, UPDATE ON sluice.heartbeats TO sluice_actor;
GRANT SELECT, UPDATE (counted_s) ON sluice.serving TO sluice_actor;
GRANT SELECT, INSERT, UPDATE (ms) ON sluice.anchors TO sluice_actor;
GRANT SELECT ON sluice.fences, sluice.announcements, sluice.cards, sluice.blobs TO sluice_actor;

-- FORCE applies the rules to the owner of the tables as well; only superusers bypass them.
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
    FOREACH name IN ARRAY ARRAY['restores', 'tickets', 'progress', 'groups', 'payloads', 'heartbeats', 'serving', 'fences',
            'announcements', 'cards', 'blobs', 'anchors', 'dropped_objects'] LOOP
        EXECUTE format('ALTER TABLE sluice.%I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY learner ON sluice.%I TO sluice_learner USING (%s) WITH CHECK (%s)', name, owned, owned);
        IF name NOT IN ('restores', 'dropped_objects') THEN
            EXECUTE format('CREATE POLICY actor_reads ON sluice.%I FOR SELECT TO sluice_actor USING (%s)', name, served);
        END IF;
    END LOOP;
    EXECUTE format('CREATE POLICY actor_serves ON sluice.tickets FOR UPDATE TO sluice_actor USING (%s)', served);
    EXECUTE format('CREATE POLICY actor_hands_over ON sluice.progress FOR INSERT TO sluice_actor WITH CHECK (%s)', served);
    EXECUTE format('CREATE POLICY actor_hands_on ON sluice.progress FOR UPDATE TO sluice_actor USING (%s)', served);
    EXECUTE format('CREATE POLICY actor_ends ON sluice.progress FOR DELETE TO sluice_actor USING (%s)', served);
    EXECUTE format('CREATE POLICY actor_hands_in ON sluice.groups FOR INSERT TO sluice_actor WITH CHECK (%s)', served);
    EXECUTE format('CREATE POLICY actor_hands_in ON sluice.payloads FOR INSERT TO sluice_actor WITH CHECK (%s)', served);
    -- Only payloads without a group: a rejected payload is deleted in the transaction that inserted it.
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

-- Rules that privileges on rows and columns cannot express; the run's learner is exempt.
CREATE FUNCTION sluice.owns(this_run text) RETURNS boolean LANGUAGE sql STABLE
    RETURN EXISTS (SELECT 1 FROM sluice.runs WHERE run = this_run AND sluice.has_role(owner));
CREATE FUNCTION sluice.refuse(what text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'role % may not %; only the run''s learner may', current_user, what
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
        PERFORM sluice.refuse(format('change a ticket from %s to %s', OLD.state, NEW.state));
    END IF;
    IF NEW.attempts NOT IN (OLD.attempts, OLD.attempts + 1) THEN
        PERFORM sluice.refuse('set a ticket''s attempts');
    END IF;
    IF NEW.state = 'claimed' AND OLD.state = 'claimed' AND NEW.actor <> OLD.actor
            AND OLD.lease_expires_s > sluice.now_s() THEN
        PERFORM sluice.refuse('claim a ticket with an unexpired lease');
    END IF;
    -- In PostgreSQL, NaN is greater than every number.
    IF NEW.state = 'claimed' AND (NEW.actor IS NULL OR NEW.lease_expires_s IS NULL
            OR NEW.lease_expires_s > sluice.now_s() + 86400) THEN
        PERFORM sluice.refuse('claim a ticket without an actor, or for more than a day');
    END IF;
    IF NEW.state IN ('claimed', 'done') AND NEW.only_for IS DISTINCT FROM NEW.actor THEN
        IF NEW.only_for IS NOT NULL THEN
            PERFORM sluice.refuse('serve a ticket of another actor');
        END IF;
        IF EXISTS (SELECT 1 FROM sluice.fences f
                WHERE f.run = NEW.run AND f.actor = ANY (string_to_array(NEW.actor, '&'))) THEN
            PERFORM sluice.refuse('serve as a fenced actor');
        END IF;
    END IF;
    IF NEW.state = 'done' AND NOT EXISTS (SELECT 1 FROM sluice.groups g
            WHERE g.run = NEW.run AND g.ticket_id = NEW.id AND g.call = NEW.done_by) THEN
        PERFORM sluice.refuse('mark a ticket as done without its group');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_ticket BEFORE UPDATE ON sluice.tickets
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_ticket();

-- Bounds the number of rows by that of claimed tickets. The ticket is looked up as in check_group.
CREATE FUNCTION sluice.check_progress() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- A repeated call waits here for its first transaction, whose connection was lost, and then changes nothing.
    IF EXISTS (SELECT 1 FROM sluice.tickets t WHERE t.run = NEW.run AND t.id = NEW.ticket_id
            AND t.state = 'open' AND t.claim = NEW.call) THEN
        RETURN NULL;
    END IF;
    IF coalesce((SELECT t.state FROM sluice.tickets t WHERE t.run = NEW.run AND t.id = NEW.ticket_id
            AND t.kind = 'train'), '') <> 'claimed' THEN
        PERFORM sluice.refuse('hand over a ticket that is not claimed');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_progress BEFORE INSERT OR UPDATE ON sluice.progress
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_progress();

CREATE FUNCTION sluice.check_group() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.seq IS DISTINCT FROM (SELECT last_seq FROM sluice.runs WHERE run = NEW.run) THEN
        PERFORM sluice.refuse('use a group number other than the next one');
    END IF;
    IF NOT EXISTS (SELECT 1 FROM sluice.payloads p WHERE p.run = NEW.run AND p.call = NEW.call) THEN
        PERFORM sluice.refuse('submit a group without a payload');
    END IF;
    -- The state is compared outside the WHERE clause here and below, so that the planner finds the ticket by its id and
    -- does not scan all tickets of a state.
    IF coalesce((SELECT t.state FROM sluice.tickets t WHERE t.run = NEW.run AND t.id = NEW.ticket_id
            AND t.kind = NEW.kind), '') NOT IN ('open', 'claimed', 'failed') THEN
        PERFORM sluice.refuse('submit a group for a ticket that is not open');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_group BEFORE INSERT ON sluice.groups
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_group();

-- Deferred to the end of the transaction: a group whose ticket stays open would block all other groups of the ticket.
CREATE FUNCTION sluice.check_answered() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT coalesce((SELECT t.state = 'done' AND t.done_by = NEW.call AND t.actor = NEW.actor
            FROM sluice.tickets t WHERE t.run = NEW.run AND t.id = NEW.ticket_id), false) THEN
        PERFORM sluice.refuse('submit a group without closing its ticket');
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER check_answered AFTER INSERT ON sluice.groups DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_answered();

-- The learner reads all heartbeats, so their number is limited.
CREATE FUNCTION sluice.check_heartbeat() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF abs(NEW.time_s - sluice.now_s()) > 1 THEN
        PERFORM sluice.refuse('set a heartbeat time other than the server''s');
    END IF;
    -- Counts only for a new or returning process, not for every heartbeat.
    IF NOT EXISTS (SELECT 1 FROM sluice.heartbeats h WHERE h.run = NEW.run AND h.process = NEW.process
            AND h.time_s > sluice.now_s() - 3600) THEN
        IF (SELECT count(*) FROM sluice.heartbeats h WHERE h.run = NEW.run AND h.process <> NEW.process
                AND h.time_s > sluice.now_s() - 3600) >= 4096 THEN
            PERFORM sluice.refuse('register more than 4096 processes per hour');
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_heartbeat BEFORE INSERT OR UPDATE ON sluice.heartbeats
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_heartbeat();

-- A smaller anchor would time out correct answers of others.
CREATE FUNCTION sluice.check_anchor() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.ms <> sluice.higher(OLD.ms, NEW.ms) THEN
        PERFORM sluice.refuse('lower an anchor');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_anchor BEFORE UPDATE ON sluice.anchors
    FOR EACH ROW WHEN (NOT sluice.owns(NEW.run)) EXECUTE FUNCTION sluice.check_anchor();
