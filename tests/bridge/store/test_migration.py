"""A run goes on from a store that an older build wrote; its file is made here by that build's own statements."""

import contextlib
import dataclasses
import json
import sqlite3

import msgspec
import numpy as np
import pytest

from bridge.store.sqlite import SqliteStore
from bridge.types import Heartbeat
from tests.bridge.factories import as_plain, make_announcement, make_group, make_report, make_ticket

VERSION_2 = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE tickets (
        id TEXT PRIMARY KEY, "order" INTEGER NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL,
        state TEXT NOT NULL, actor TEXT, lease_expires_s REAL, attempts INTEGER NOT NULL DEFAULT 0,
        served INTEGER NOT NULL DEFAULT 0)""",
    """CREATE INDEX tickets_by_order ON tickets (state, "order")""",
    """CREATE TABLE groups (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, ticket_id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
        payload BLOB NOT NULL)""",
    "CREATE INDEX groups_by_kind ON groups (kind, seq)",
    "CREATE TABLE heartbeats (process TEXT PRIMARY KEY, payload BLOB NOT NULL)",
    "CREATE TABLE fences (actor TEXT PRIMARY KEY, reason TEXT NOT NULL)",
    "INSERT INTO meta VALUES ('schema_version', 2), ('incarnations', 3), ('reissued', 4), ('restored/2', 8)",
    "PRAGMA application_id = 1397511491",
)


def message(type_: str, **fields) -> bytes:
    return msgspec.msgpack.encode([2, type_, fields])


def int32(*values: int) -> list:
    return ["<i4", np.array(values, "<i4").tobytes()]


def ticket_message(id_: str, order: int) -> bytes:
    return message(
        "Ticket",
        id=id_,
        kind="train",
        round=0,
        order=order,
        prompt_tokens=int32(7, 8),
        task={"verifier": "exact", "answer": "42", "metadata": "{}"},
        num_samples=2,
        num_requests=2,
        sampling={
            "max_tokens": 16,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_tokens": 0,
            "ignore_eos": False,
            "stop_token_ids": [],
        },
        min_version={"incarnation": 0, "step": 0},
    )


def group_message(id_: str, order: int) -> bytes:
    rollout = {
        "tokens": int32(0, 1, 2),
        "loss_mask": ["|b1", b"\x01\x01\x01"],
        "behavior_logprobs": ["<f4", np.full(3, -0.5, "<f4").tobytes()],
        "token_versions": int32(0, 0, 0),
        "finish": "stop",
        "reward": 1.0,
    }
    return message(
        "Group",
        ticket_id=id_,
        kind="train",
        round=0,
        order=order,
        prompt_tokens=int32(7, 8),
        rollouts=[rollout, rollout],
        incarnation=0,
        actor="a",
        started_s=1.0,
        finished_s=2.0,
    )


VERSION_3 = (
    "ALTER TABLE tickets ADD COLUMN failure TEXT",
    "UPDATE tickets SET failure = actor, actor = NULL WHERE state = 'failed'",
    "DELETE FROM heartbeats",
    "UPDATE meta SET value = 3 WHERE key = 'schema_version'",
)
"""What makes a file of version 2 one of version 3."""


@pytest.fixture(params=[2, 3])
def old_file(request, tmp_path):
    path = tmp_path / "store.sqlite"
    tickets = [
        ("open", "open", None, 0),
        ("claimed", "claimed", "x", 0),
        ("done", "done", "a", 0),
        ("failed", "failed", "no verdict", 3),
        ("acknowledged", "acknowledged", None, 0),
        ("again", "open", "no verdict", 1),
    ]
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for statement in VERSION_2:
            db.execute(statement)
        db.execute("PRAGMA journal_mode = WAL")
        for order, (id_, state, actor, attempts) in enumerate(tickets):
            lease = 9e9 if state == "claimed" else None
            row = (id_, order, "train", ticket_message(id_, order), state, actor, lease, attempts, 0)
            db.execute("INSERT INTO tickets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        db.execute("INSERT INTO groups VALUES (17, 'done', 'train', ?)", (group_message("done", 2),))
        beat = message(
            "Heartbeat", process="x", role="actor", pid=1, time_s=1.0, version=None, detail=json.dumps({"groups": 3})
        )
        db.execute("INSERT INTO heartbeats VALUES ('x', ?)", (beat,))
        db.execute("INSERT INTO fences VALUES ('y', 'logprobs off by 2.2')")
        for statement in VERSION_3 if request.param == 3 else ():
            db.execute(statement)
    return path


def test_store_of_an_older_schema_version_goes_on_with_all_it_held(old_file):
    with contextlib.closing(SqliteStore(old_file)) as store:
        counts = {"open": 2, "claimed": 1, "done": 1, "acknowledged": 1, "failed": 1, "reissued": 4}
        assert store.counts() == counts
        assert store.failed() == {"failed": "no verdict"}
        (stored,) = store.read_groups(after_seq=0, limit=9)
        assert stored.seq == 17 and as_plain(stored.group) == as_plain(make_group(make_ticket("done", order=2)))
        assert store.leased("x") == {"claimed"}
        assert store.fenced("y") == "logprobs off by 2.2"
        assert (store.lead("here", lease_s=60), store.restores()) == (3, {2: 8})
        claimed = store.claim("z", limit=9, lease_s=60.0)
        assert [as_plain(t) for t in claimed] == [
            as_plain(make_ticket(i, order=o)) for i, o in (("open", 0), ("again", 5))
        ]
        # The old signs of life are gone; new ones are read.
        assert store.heartbeats() == []
        beat = Heartbeat(process="x", role="actor", pid=2, time_s=2.0, report=make_report())
        store.heartbeat(beat)
        assert [dataclasses.replace(b, time_s=2.0) for b in store.heartbeats()] == [beat]
        store.give_up("again", "no verdict again", max_attempts=2)
        assert store.failed() == {"failed": "no verdict", "again": "no verdict again"}
        store.raise_anchors({"task": [0.5]})
        assert store.anchors(["task"]) == {"task": (0.5,)}
        # What it holds now and what it held go through the same calls: a late copy, the next number, a rewind.
        assert store.put_group(make_group(make_ticket("done", order=2))) is False
        assert store.put_group(make_group(make_ticket("claimed", order=1))) is True
        assert [s.seq for s in store.read_groups(after_seq=17, limit=9)] == [18]
        assert store.rewind(["acknowledged"], next_order=5, step=0) == 1
        store.rewind([], next_order=1, step=0)  # keeps groups by weights of step 0
        assert [s.group.ticket_id for s in store.read_groups(after_seq=0, limit=9)] == ["done", "claimed"]
        store.acknowledge(["done", "claimed"])
    with contextlib.closing(sqlite3.connect(old_file)) as db:
        assert db.execute("SELECT count(*) FROM payloads").fetchone() == (0,)


def test_store_is_brought_up_once_and_has_the_columns_of_a_new_one(old_file, tmp_path):
    def columns(path):
        with contextlib.closing(sqlite3.connect(path)) as db:
            return [
                db.execute(f"PRAGMA table_info({t})").fetchall()
                for t in ("runs", "tickets", "heartbeats", "serving", "anchors")
            ]

    SqliteStore(old_file).close()
    SqliteStore(old_file).close()
    SqliteStore(tmp_path / "new.sqlite").close()
    assert columns(old_file) == columns(tmp_path / "new.sqlite")
    with contextlib.closing(sqlite3.connect(old_file)) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() == (9,)


def test_announcement_of_an_older_form_is_dropped_and_the_learner_announces_anew(tmp_path):
    path = tmp_path / "store.sqlite"
    SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for since in (
            "DROP TABLE anchors",
            "DROP TABLE changes",
            "DROP TABLE serving",
            "ALTER TABLE heartbeats DROP COLUMN places",
        ):
            db.execute(since)
        db.execute("UPDATE meta SET value = 5 WHERE key = 'schema_version'")
        old = message("Announcement", manifest={"file": {}}, sources=[], hmac=None)
        db.execute("INSERT INTO announcements VALUES ('local', 0, 7, 'c', ?)", (old,))
    with contextlib.closing(SqliteStore(path)) as store:
        assert store.announced() is None
        assert store.lead("here", lease_s=60) == 0
        store.announce(make_announcement(step=7))
        assert store.announced() == make_announcement(step=7)


def test_store_that_could_not_be_brought_up_is_left_as_it_was(old_file):
    def contents():
        with contextlib.closing(sqlite3.connect(old_file)) as db:
            return list(db.iterdump())

    with contextlib.closing(sqlite3.connect(old_file)) as db, db:
        db.execute("DROP TABLE fences")  # so that one of the migration's last statements fails
    before = contents()
    with pytest.raises(sqlite3.OperationalError):
        SqliteStore(old_file)
    assert contents() == before
