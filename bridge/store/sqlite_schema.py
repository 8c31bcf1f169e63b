"""The tables of a SQLite store, and how a file of an older build gets them.

They have PostgreSQL's columns (`postgres/schema.sql`), the run's name among them, so that both engines take the same
statements; a file holds one run, `RUN`.
"""

import sqlite3
from collections.abc import Callable

from bridge import codec
from bridge.store.protocol import LIVE_S
from bridge.store.sql.fit import fit_of
from bridge.types import Group, Ticket

APPLICATION_ID = 0x534C5543  # "SLUC", in the file's header
SCHEMA_VERSION = 9
RUN = "local"
MAX_SIZES = 256
"""Sizes of engines that are told apart; also in `postgres/schema.sql`, as `LIVE_S` is."""

_TABLES = (
    """CREATE TABLE runs (
        run TEXT PRIMARY KEY, last_seq INTEGER NOT NULL DEFAULT 0, reissued INTEGER NOT NULL DEFAULT 0,
        incarnation INTEGER NOT NULL DEFAULT -1, holder TEXT, lead_expires_s REAL, lead_by TEXT) WITHOUT ROWID""",
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
        PRIMARY KEY (run, process))""",
    """CREATE TABLE fences (run TEXT NOT NULL, actor TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (run, actor))""",
    """CREATE TABLE announcements (
        run TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, call TEXT NOT NULL,
        payload BLOB NOT NULL)""",
    "CREATE TABLE cards (run TEXT PRIMARY KEY, payload BLOB NOT NULL)",
    "CREATE TABLE blobs (run TEXT NOT NULL, blake3 TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (run, blake3))",
)
# Of the last weights of a run that is finished; of the place whose actor has a name.
_SINCE_4 = (
    "ALTER TABLE runs ADD COLUMN finished_step INTEGER",
    "ALTER TABLE runs ADD COLUMN finished_s REAL",
    "ALTER TABLE heartbeats ADD COLUMN holder TEXT NOT NULL DEFAULT ''",
)
# Engines that serve, counted (`ActorStore.engines`): a heartbeat's places are those of an actor that does.
_SINCE_6 = (
    "ALTER TABLE heartbeats ADD COLUMN places INTEGER",
    """CREATE TABLE serving (
        run TEXT PRIMARY KEY, counted_s REAL NOT NULL DEFAULT 0, sizes TEXT NOT NULL DEFAULT '')""",
    f"INSERT INTO serving (run) VALUES ('{RUN}')",
    f"""CREATE TRIGGER count_engines AFTER UPDATE OF counted_s ON serving BEGIN
        UPDATE serving SET sizes = (SELECT coalesce(group_concat(places || ':' || num), '')
            FROM (SELECT places, count(*) AS num FROM heartbeats
                WHERE run = NEW.run AND places IS NOT NULL AND time_s > NEW.counted_s - {LIVE_S}
                GROUP BY places ORDER BY places LIMIT {MAX_SIZES}))
        WHERE run = NEW.run; END""",
)
# How often each topic was told of (`protocol.Topic`): who waits for one is not woken for the others.
_SINCE_7 = (
    """CREATE TABLE changes (
        run TEXT NOT NULL, topic TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (run, topic)) WITHOUT ROWID""",
)
# The longest correct runs of tasks' test cases (`ActorStore.anchors`).
_SINCE_8 = (
    """CREATE TABLE anchors (
        run TEXT NOT NULL, key TEXT NOT NULL, ms TEXT NOT NULL, PRIMARY KEY (run, key)) WITHOUT ROWID""",
)
CREATE = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    *_TABLES,
    *_SINCE_4,
    *_SINCE_6,
    *_SINCE_7,
    *_SINCE_8,
    f"INSERT INTO runs (run) VALUES ('{RUN}')",
    f"INSERT INTO meta VALUES ('schema_version', {SCHEMA_VERSION})",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
MIGRATIONS = {
    # A failed ticket's reason stood in the column of its actor. Heartbeats are of another form, and only signs of life.
    2: (
        "ALTER TABLE tickets ADD COLUMN failure TEXT",
        "UPDATE tickets SET failure = actor, actor = NULL WHERE state = 'failed'",
        "DELETE FROM heartbeats",
    ),
    # Columns that both engines have. A process of the older build that lives on is refused by SQLite from here on.
    3: (
        "DROP INDEX tickets_by_order",
        "DROP INDEX groups_by_kind",
        "ALTER TABLE tickets RENAME TO old_tickets",
        "ALTER TABLE groups RENAME TO old_groups",
        "ALTER TABLE fences RENAME TO old_fences",
        "DROP TABLE heartbeats",
        *_TABLES,
        f"""INSERT INTO runs (run, last_seq, reissued, incarnation) SELECT '{RUN}',
            coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'old_groups'), 0),
            (SELECT value FROM meta WHERE key = 'reissued'), (SELECT value - 1 FROM meta WHERE key = 'incarnations')""",
        f"""INSERT INTO restores SELECT '{RUN}', CAST(substr(key, 10) AS INTEGER), value
            FROM meta WHERE key LIKE 'restored/%'""",
        f"""INSERT INTO tickets (number, run, id, "order", kind, payload, fit, state, actor, lease_expires_s, served,
            attempts, failure)
            SELECT rowid, '{RUN}', id, "order", kind, payload, fit_of(payload), state, actor, lease_expires_s, served,
            attempts, failure FROM old_tickets""",
        f"""INSERT INTO groups SELECT '{RUN}', seq, ticket_id, old_groups.kind, coalesce(actor, ''),
            max_step_of(old_groups.payload), 'schema-3-' || seq
            FROM old_groups JOIN tickets ON tickets.id = ticket_id""",
        f"INSERT INTO payloads (run, call, payload) SELECT '{RUN}', 'schema-3-' || seq, payload FROM old_groups",
        f"INSERT INTO fences SELECT '{RUN}', actor, reason FROM old_fences",
        "DROP TABLE old_tickets",
        "DROP TABLE old_groups",
        "DROP TABLE old_fences",
        "DELETE FROM meta WHERE key <> 'schema_version'",
    ),
    4: _SINCE_4,
    # A manifest names its pieces: who reads it asks a learner that announces in this form.
    5: ("DELETE FROM announcements",),
    6: _SINCE_6,
    7: _SINCE_7,
    8: _SINCE_8,
}
"""Schema version -> what makes such a file one of the next version, so that a run goes on that an older build began."""


def add_migration_functions(db: sqlite3.Connection) -> None:
    """What the migrations ask of the messages that a file keeps."""
    functions: dict[str, Callable[[bytes], str | int]] = {"fit_of": _fit_of, "max_step_of": _max_step_of}
    for name, function in functions.items():
        db.create_function(name, 1, function, deterministic=True)


def _fit_of(payload: bytes) -> str:
    return fit_of(codec.decode(Ticket, payload, max_bytes=_ANY_SIZE))


def _max_step_of(payload: bytes) -> int:
    return codec.decode(Group, payload, max_bytes=_ANY_SIZE).max_step


_ANY_SIZE = 2**31  # SQLite's own limit on a value
