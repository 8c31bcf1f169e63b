"""The tables of a SQLite store.

They have PostgreSQL's columns (`postgres/schema.sql`), the run's name among them, so that both engines take the same
statements; a file holds one run, `RUN`.
"""

from bridge import codec
from bridge.store.protocol import LIVE_S

APPLICATION_ID = 0x534C5543  # "SLUC", in the file's header
RUN = "local"
MAX_SIZES = 256
"""Sizes of engines that are told apart; also in `postgres/schema.sql`, as `LIVE_S` is."""

CREATE = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE runs (
        run TEXT PRIMARY KEY, last_seq INTEGER NOT NULL DEFAULT 0, reissued INTEGER NOT NULL DEFAULT 0,
        incarnation INTEGER NOT NULL DEFAULT -1, holder TEXT, lead_expires_s REAL, lead_by TEXT,
        finished_step INTEGER, finished_s REAL) WITHOUT ROWID""",
    """CREATE TABLE restores (
        run TEXT NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL,
        PRIMARY KEY (run, incarnation)) WITHOUT ROWID""",
    """CREATE TABLE tickets (
        number INTEGER PRIMARY KEY, run TEXT NOT NULL, id TEXT NOT NULL, "order" INTEGER NOT NULL, kind TEXT NOT NULL,
        payload BLOB NOT NULL, fit TEXT NOT NULL, only_for TEXT, state TEXT NOT NULL, actor TEXT, lease_expires_s REAL,
        served INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, failure TEXT,
        offered_by TEXT, claim TEXT, given_up_by TEXT, done_by TEXT, UNIQUE (run, id))""",
    """CREATE INDEX tickets_by_order ON tickets (run, state, "order", number)""",
    "CREATE INDEX tickets_by_claim ON tickets (run, claim) WHERE state = 'claimed'",
    """CREATE TABLE groups (
        run TEXT NOT NULL, seq INTEGER NOT NULL, ticket_id TEXT NOT NULL, kind TEXT NOT NULL, actor TEXT NOT NULL,
        max_step INTEGER NOT NULL, call TEXT NOT NULL,
        PRIMARY KEY (run, seq), UNIQUE (run, ticket_id), UNIQUE (run, call)) WITHOUT ROWID""",
    "CREATE INDEX groups_by_kind ON groups (run, kind, seq)",
    # Apart from what is looked through and changed, so that neither moves the large bytes.
    """CREATE TABLE payloads (
        run TEXT NOT NULL, call TEXT NOT NULL, payload BLOB NOT NULL, object TEXT, PRIMARY KEY (run, call))""",
    """CREATE TABLE dropped_objects (
        run TEXT NOT NULL, ticket_id TEXT NOT NULL, object TEXT NOT NULL, PRIMARY KEY (run, object, ticket_id))""",
    """CREATE TRIGGER payload_goes_with_its_group AFTER DELETE ON groups BEGIN
        INSERT OR IGNORE INTO dropped_objects SELECT run, OLD.ticket_id, object FROM payloads
            WHERE run = OLD.run AND call = OLD.call AND object IS NOT NULL;
        DELETE FROM payloads WHERE run = OLD.run AND call = OLD.call; END""",
    """CREATE TABLE heartbeats (
        run TEXT NOT NULL, process TEXT NOT NULL, payload BLOB NOT NULL, time_s REAL NOT NULL,
        holder TEXT NOT NULL DEFAULT '', places INTEGER, PRIMARY KEY (run, process))""",
    """CREATE TABLE fences (run TEXT NOT NULL, actor TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (run, actor))""",
    """CREATE TABLE announcements (
        run TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, call TEXT NOT NULL,
        payload BLOB NOT NULL)""",
    "CREATE TABLE cards (run TEXT PRIMARY KEY, payload BLOB NOT NULL)",
    "CREATE TABLE blobs (run TEXT NOT NULL, blake3 TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (run, blake3))",
    # Engines that serve, counted (`ActorStore.engines`): a heartbeat's places are those of an actor that does.
    """CREATE TABLE serving (
        run TEXT PRIMARY KEY, counted_s REAL NOT NULL DEFAULT 0, sizes TEXT NOT NULL DEFAULT '')""",
    f"INSERT INTO serving (run) VALUES ('{RUN}')",
    f"""CREATE TRIGGER count_engines AFTER UPDATE OF counted_s ON serving BEGIN
        UPDATE serving SET sizes = (SELECT coalesce(group_concat(places || ':' || num), '')
            FROM (SELECT places, count(*) AS num FROM heartbeats
                WHERE run = NEW.run AND places IS NOT NULL AND time_s > NEW.counted_s - {LIVE_S}
                GROUP BY places ORDER BY places LIMIT {MAX_SIZES}))
        WHERE run = NEW.run; END""",
    # How often each topic was told of (`protocol.Topic`): who waits for one is not woken for the others.
    """CREATE TABLE changes (
        run TEXT NOT NULL, topic TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (run, topic)) WITHOUT ROWID""",
    # The longest correct runs of tasks' test cases (`ActorStore.anchors`).
    """CREATE TABLE anchors (
        run TEXT NOT NULL, key TEXT NOT NULL, ms TEXT NOT NULL, PRIMARY KEY (run, key)) WITHOUT ROWID""",
    f"INSERT INTO runs (run) VALUES ('{RUN}')",
    f"INSERT INTO meta VALUES ('format', {codec.FORMAT})",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
