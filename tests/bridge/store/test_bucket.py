"""Groups in a bucket, through the store and over both engines; the bucket is a folder that the tests look into."""

import contextlib
import os
import pathlib
import shutil
import time

import obstore
import pytest

from bridge.store.group_blobs import GroupBlobs
from bridge.store.sql.database import Transaction
from bridge.store.store_types import FencedError, StoreLostError, UnfitGroupError
from tests.bridge.factories import as_plain, make_group, make_rollout, make_run_card, make_ticket
from tests.integration.support.processes import wait_until

INLINE_BYTES, MAX_BYTES = 2_000, 200_000
LARGE, SMALL = 1000, 5
"""Tokens of a rollout whose group is over `INLINE_BYTES`, and of one whose isn't."""


class Bucket:
    """A folder, and the stores that use it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def attach(self, store, *, retry_s: float = 600.0):
        """A store whose large groups go here, each side by a client of its own."""
        sides = [store.learner, store.actor] if hasattr(store, "learner") else [store]
        for side in sides:
            objects = GroupBlobs(f"file://{self.folder}", run="run", max_bytes=MAX_BYTES, retry_s=retry_s)
            side.use_bucket(objects, inline_bytes=INLINE_BYTES)
        return store

    def files(self) -> list[pathlib.Path]:
        return sorted(p for p in self.folder.rglob("*") if p.is_file() and p.name not in (".clock", ".run"))

    def make_older(self, seconds: float) -> None:
        for file in self.files():
            when = time.time() - seconds
            os.utime(file, (when, when))


@pytest.fixture
def bucket(tmp_path: pathlib.Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def store(place, bucket):
    with contextlib.closing(place.open()) as opened:
        yield bucket.attach(opened)


def put_groups(store, *ids: str, num_tokens: int = LARGE, **fields):
    """Tickets, and a group of each."""
    tickets = [make_ticket(i, order=n, **fields) for n, i in enumerate(ids)]
    store.put_tickets(tickets)
    groups = [make_group(t, rollouts=(make_rollout(num_tokens),) * 2) for t in tickets]
    for group in groups:
        assert store.put_group(group)
    return groups


def read_ids(store, kind: str = "train") -> list[str]:
    return [one.group.ticket_id for one in store.read_groups(after_seq=0, limit=100, kind=kind)]


def test_large_groups_are_read_from_the_bucket_and_small_ones_from_the_database(store, bucket):
    large, small = put_groups(store, "large"), put_groups(store, "small", num_tokens=SMALL)
    assert len(bucket.files()) == 1
    got = [one.group for one in store.read_groups(after_seq=0, limit=9)]
    assert [as_plain(g) for g in got] == [as_plain(g) for g in large + small]


ENDS = {
    "acknowledge": lambda s: s.acknowledge(["a", "b"]),
    "reissue": lambda s: s.reissue(["a", "b"]),
    "withdraw": lambda s: s.withdraw(["a", "b"]),
    "roll_back": lambda s: s.roll_back([], next_order=0, step=-1),
    "fence": lambda s: s.fence("a", "why"),
}


@pytest.mark.parametrize("end", ENDS)
def test_objects_go_with_their_groups(store, bucket, end):
    put_groups(store, "a", "b")
    kept = make_ticket("kept", order=-1)
    store.put_tickets([kept])
    store.put_group(make_group(kept, actor="other", rollouts=(make_rollout(LARGE),) * 2))
    ENDS[end](store)
    assert len(bucket.files()) == 3
    assert store.delete_dropped() == 2
    assert len(bucket.files()) == 1 and read_ids(store) == ["kept"]
    assert store.delete_dropped() == 0


def test_objects_of_evaluations_go_when_nobody_waits_for_them(store, bucket):
    put_groups(store, "e", kind="eval")
    assert read_ids(store, kind="eval") == ["e"]
    store.withdraw_pinned()
    assert store.delete_dropped() == 1 and bucket.files() == []


def test_group_that_is_not_taken_leaves_no_object(store, bucket):
    (group,) = put_groups(store, "a")
    assert store.put_group(group) is False
    large = (make_rollout(LARGE),) * 2
    with pytest.raises(KeyError):
        store.put_group(make_group(make_ticket("unknown"), rollouts=large))
    store.put_tickets([make_ticket("b", order=1)])
    with pytest.raises(UnfitGroupError):
        store.put_group(make_group(make_ticket("b", order=2), rollouts=large))
    store.fence("fenced", "why")
    with pytest.raises(FencedError):
        store.put_group(make_group(make_ticket("b", order=1), actor="fenced", rollouts=large))
    assert len(bucket.files()) == 1 and read_ids(store) == ["a"]


def test_group_whose_put_was_committed_and_its_answer_lost_keeps_its_object(store, bucket, monkeypatch):
    side = store.actor if hasattr(store, "actor") else store
    write = side._database.write

    def write_and_lose(run: str, script: Transaction):
        write(run, script)
        raise StoreLostError("the answer was lost")

    store.put_tickets([make_ticket("a")])
    with monkeypatch.context() as lost:
        lost.setattr(side._database, "write", write_and_lose)
        with pytest.raises(StoreLostError):
            store.put_group(make_group(make_ticket("a"), rollouts=(make_rollout(LARGE),) * 2))
    assert read_ids(store) == ["a"] and len(bucket.files()) == 1


def test_learner_that_takes_over_deletes_what_one_that_died_left(place, store, bucket):
    put_groups(store, "a", "b")
    store.acknowledge(["a"])  # and dies
    assert len(bucket.files()) == 2
    with contextlib.closing(bucket.attach(place.open())) as another:
        another.acquire_leadership("elsewhere", lease_s=60)
        wait_until(lambda: len(bucket.files()) == 1, "the next learner's sweep")
        another.acknowledge(["b"])
        wait_until(lambda: bucket.files() == [], "its own deletions")


def test_restarted_learner_does_not_take_an_unmounted_folder_for_the_bucket_that_has_its_groups(place, store, bucket):
    store.put_run_card(make_run_card(), {})
    put_groups(store, "a")
    mounted = bucket.folder.rename(bucket.folder.with_name("elsewhere"))
    with contextlib.closing(bucket.attach(place.open())) as restarted:
        with pytest.raises(ValueError, match="Mount the folder"):
            restarted.put_run_card(make_run_card(), {})
        shutil.rmtree(bucket.folder, ignore_errors=True)
        mounted.rename(bucket.folder)
        restarted.put_run_card(make_run_card(), {})
        assert read_ids(restarted) == ["a"]


def test_object_of_an_actor_that_died_before_its_row_is_swept_when_nobody_can_want_it(store, bucket):
    put_groups(store, "a")
    objects = GroupBlobs(f"file://{bucket.folder}", run="run", max_bytes=MAX_BYTES)
    objects.put("a", b"an orphan")
    assert store.sweep_objects() == 0 and len(bucket.files()) == 2
    bucket.make_older(objects.min_age_s + 60)
    assert store.sweep_objects() == 1
    assert len(bucket.files()) == 1 and read_ids(store) == ["a"]


SPOILS = {
    "is gone": lambda file: file.unlink(),
    "has other bytes": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "is larger": lambda file: file.write_bytes(bytes(MAX_BYTES + 1)),
    "is another group": None,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_group_whose_object_is_not_what_was_put_is_set_aside_and_its_ticket_offered_again(store, bucket, spoil):
    put_groups(store, "a")
    (bad,) = bucket.files()
    put_groups(store, "b", num_tokens=LARGE + 1)
    (other,) = set(bucket.files()) - {bad}
    store.acquire_leadership("here", lease_s=60)
    if (act := SPOILS[spoil]) is not None:
        act(bad)
    else:
        bad.write_bytes(other.read_bytes())
    assert read_ids(store) == ["b"]
    assert read_ids(store) == ["b"]
    assert dict(store.unreadable) == {"a": 1}
    assert [t.id for t in store.claim("x", limit=9, lease_s=60)] == ["a"]
    wait_until(lambda: bucket.files() == [other], "the bad object to go")


def test_learner_that_was_given_no_bucket_asks_for_the_group_anew_and_says_so(place, store, caplog):
    put_groups(store, "a")
    with contextlib.closing(place.open()) as without:
        without.acquire_leadership("here", lease_s=60)
        assert read_ids(without) == []
        assert without.unreadable == {"a": 1} and "give both store.bucket" in caplog.text
        assert [t.id for t in without.claim("x", limit=9, lease_s=60)] == ["a"]


def test_bucket_that_is_away_keeps_group_and_ticket_as_they_were(place, store, bucket, monkeypatch):
    store.put_tickets([make_ticket("a")])
    group = make_group(make_ticket("a"), rollouts=(make_rollout(LARGE),) * 2)

    def broken(*args):
        raise obstore.exceptions.GenericError("connection refused")

    with contextlib.closing(bucket.attach(place.open(), retry_s=0.0)) as impatient:
        with monkeypatch.context() as away:
            away.setattr(obstore, "put", broken)
            with pytest.raises(StoreLostError):
                impatient.put_group(group)
        assert read_ids(store) == []
        assert store.put_group(group)
        with monkeypatch.context() as away:
            away.setattr(obstore, "get", broken)
            with pytest.raises(StoreLostError):
                read_ids(impatient)
    assert read_ids(store) == ["a"] and store.unreadable == {}
