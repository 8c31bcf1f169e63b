"""Tables of the SQLite store; their columns are PostgreSQL's (`postgres/schema.sql`)."""

from bridge import codec
from bridge.store.store_types import LIVE_S

APPLICATION_ID = 0x534C5543  # "SLUC", in the file's header
RUN = "local"
"""Id of the only run in a file."""
MAX_SIZES = 256
"""Most distinct engine sizes that are counted. This limit and `LIVE_S` are also in `postgres/schema.sql`."""
CREATE = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE runs (
        run TEXT PRIMARY KEY, last_seq INTEGER NOT NULL DEFAULT 0, reissued INTEGER NOT NULL DEFAULT 0,
        incarnation INTEGER NOT NULL DEFAULT -1, holder TEXT, lead_expires_s REAL, lead_by TEXT,
        finished_step INTEGER, finished_s REAL, frontier_width INTEGER) WITHOUT ROWID""",
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
    # What was sampled of tickets that were handed over, while they are open or claimed.
    """CREATE TABLE progress (
        run TEXT NOT NULL, ticket_id TEXT NOT NULL, actors TEXT NOT NULL, payload BLOB NOT NULL, call TEXT NOT NULL,
        PRIMARY KEY (run, ticket_id))""",
    """CREATE TRIGGER progress_ends AFTER UPDATE OF state, offered_by, given_up_by ON tickets
        WHEN NEW.state NOT IN ('open', 'claimed') OR NEW.offered_by IS NOT OLD.offered_by
            OR NEW.given_up_by IS NOT OLD.given_up_by
        BEGIN DELETE FROM progress WHERE run = OLD.run AND ticket_id = OLD.id; END""",
    """CREATE TRIGGER progress_goes_with_its_ticket AFTER DELETE ON tickets
        BEGIN DELETE FROM progress WHERE run = OLD.run AND ticket_id = OLD.id; END""",
    """CREATE TABLE groups (
        run TEXT NOT NULL, seq INTEGER NOT NULL, ticket_id TEXT NOT NULL, kind TEXT NOT NULL, actor TEXT NOT NULL,
        max_step INTEGER NOT NULL, call TEXT NOT NULL,
        PRIMARY KEY (run, seq), UNIQUE (run, ticket_id), UNIQUE (run, call)) WITHOUT ROWID""",
    "CREATE INDEX groups_by_kind ON groups (run, kind, seq)",
    # Separate from the rows that are scanned and updated, so that neither moves the large bytes.
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
    # Number of serving engines by capacity (`ActorStore.engine_capacity`); `places` is set for actors that serve.
    """CREATE TABLE serving (
        run TEXT PRIMARY KEY, counted_s REAL NOT NULL DEFAULT 0, sizes TEXT NOT NULL DEFAULT '')""",
    f"INSERT INTO serving (run) VALUES ('{RUN}')",
    f"""CREATE TRIGGER count_engines AFTER UPDATE OF counted_s ON serving BEGIN
        UPDATE serving SET sizes = (SELECT coalesce(group_concat(places || ':' || num), '')
            FROM (SELECT places, count(*) AS num FROM heartbeats
                WHERE run = NEW.run AND places IS NOT NULL AND time_s > NEW.counted_s - {LIVE_S}
                GROUP BY places ORDER BY places LIMIT {MAX_SIZES}))
        WHERE run = NEW.run; END""",
    # Notifications per topic (`store_types.Topic`), so that a process wakes only for its topics.
    """CREATE TABLE changes (
        run TEXT NOT NULL, topic TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (run, topic)) WITHOUT ROWID""",
    # Longest correct runs per test case of each task (`ActorStore.anchors`).
    """CREATE TABLE anchors (
        run TEXT NOT NULL, key TEXT NOT NULL, ms TEXT NOT NULL, PRIMARY KEY (run, key)) WITHOUT ROWID""",
    f"INSERT INTO runs (run) VALUES ('{RUN}')",
    f"INSERT INTO meta VALUES ('format', {codec.FORMAT})",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
