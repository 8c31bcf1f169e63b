-- What a database itself writes down of a store's life, whoever asks it for what: read by the auditor alone.
CREATE SCHEMA recorder;
CREATE TABLE recorder.groups (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, time_s float8 NOT NULL DEFAULT sluice.now_s(),
    op text NOT NULL, seq bigint NOT NULL, ticket_id text NOT NULL, kind text NOT NULL, actor text NOT NULL, payload bytea
);
CREATE TABLE recorder.tickets (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, time_s float8 NOT NULL DEFAULT sluice.now_s(),
    op text NOT NULL, id text NOT NULL, kind text NOT NULL, state text NOT NULL
);
CREATE TABLE recorder.announcements (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, time_s float8 NOT NULL DEFAULT sluice.now_s(),
    incarnation bigint NOT NULL, step bigint NOT NULL
);

CREATE FUNCTION recorder.note_group() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO recorder.groups (op, seq, ticket_id, kind, actor)
            VALUES ('DELETE', OLD.seq, OLD.ticket_id, OLD.kind, OLD.actor);
    ELSE
        INSERT INTO recorder.groups (op, seq, ticket_id, kind, actor, payload)
            VALUES (TG_OP, NEW.seq, NEW.ticket_id, NEW.kind, NEW.actor,
                    (SELECT payload FROM sluice.payloads WHERE run = NEW.run AND call = NEW.call));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER a_recorder AFTER INSERT OR UPDATE OR DELETE ON sluice.groups
    FOR EACH ROW EXECUTE FUNCTION recorder.note_group();

CREATE FUNCTION recorder.note_ticket() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO recorder.tickets (op, id, kind, state) VALUES ('DELETE', OLD.id, OLD.kind, OLD.state);
    ELSIF TG_OP = 'INSERT' OR OLD.state <> NEW.state THEN
        INSERT INTO recorder.tickets (op, id, kind, state) VALUES (TG_OP, NEW.id, NEW.kind, NEW.state);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER a_recorder AFTER INSERT OR UPDATE OR DELETE ON sluice.tickets
    FOR EACH ROW EXECUTE FUNCTION recorder.note_ticket();

CREATE FUNCTION recorder.note_announcement() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO recorder.announcements (incarnation, step) VALUES (NEW.incarnation, NEW.step);
    RETURN NULL;
END $$;
CREATE TRIGGER a_recorder AFTER INSERT OR UPDATE ON sluice.announcements
    FOR EACH ROW EXECUTE FUNCTION recorder.note_announcement();
