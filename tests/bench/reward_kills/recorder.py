"""What the store itself writes down of each group that comes into it, whoever asks for what: a trigger of SQLite."""

import contextlib
import pathlib
import sqlite3

_RECORDER = """
CREATE TABLE recorder (
    number INTEGER PRIMARY KEY, time_s REAL NOT NULL, ticket_id TEXT NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL
);
CREATE TRIGGER recorder_notes AFTER INSERT ON groups BEGIN
    INSERT INTO recorder (time_s, ticket_id, kind, payload) SELECT
        (julianday('now') - 2440587.5) * 86400, NEW.ticket_id, NEW.kind, payload
        FROM payloads WHERE run = NEW.run AND call = NEW.call;
END;
"""


def install(store: pathlib.Path) -> bool:
    """Puts the trigger into a run's store; False while there is none yet."""
    if not store.is_file():
        return False
    with contextlib.closing(_open(store)) as db:
        if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
            return False
        db.executescript("BEGIN IMMEDIATE;" + _RECORDER + "COMMIT;")
    return True


def groups(store: pathlib.Path, *, since_s: float = 0.0) -> list[tuple[float, str, bytes]]:
    """Training groups in the order in which they came: when, their ticket, their bytes."""
    with contextlib.closing(_open(store)) as db:
        return db.execute(
            "SELECT time_s, ticket_id, payload FROM recorder WHERE kind = 'train' AND time_s > ? ORDER BY number",
            (since_s,),
        ).fetchall()


def tickets(store: pathlib.Path) -> dict[str, str]:
    """The state of each training ticket."""
    with contextlib.closing(_open(store)) as db:
        return dict(db.execute("SELECT id, state FROM tickets WHERE kind = 'train'"))


def _open(store: pathlib.Path) -> sqlite3.Connection:
    return sqlite3.connect(store, timeout=60.0, isolation_level=None)
