"""What the learner looks after while it waits: over a real store whose bucket one actor's groups never reach."""

import contextlib
import pathlib

import pytest

from bridge.store.group_blobs import GroupBlobs
from bridge.store.open import SqliteStore
from bridge.store.store_types import FencedError
from learner.parity import MAX_LOST_IN_A_ROW, LostGroupsFence
from tests.bridge.factories import make_group, make_rollout, make_run_card, make_ticket

LARGE = 1000


def opened(path: pathlib.Path, bucket: pathlib.Path) -> SqliteStore:
    store = SqliteStore(path)
    store.use_bucket(GroupBlobs(bucket.as_uri(), run="run", max_bytes=200_000), inline_bytes=2000)
    return store


def put(store: SqliteStore, actor: str) -> None:
    (ticket,) = store.claim(actor, limit=1, lease_s=60)
    rollouts = tuple(make_rollout(LARGE) for _ in range(ticket.num_samples))
    assert store.put_group(make_group(ticket, actor=actor, rollouts=rollouts))


def test_actor_whose_groups_never_reach_the_bucket_is_kept_out_and_its_ticket_goes_to_others(tmp_path):
    path, bucket = tmp_path / "store.sqlite", tmp_path / "bucket"
    with contextlib.ExitStack() as parts:
        learner, good = (parts.enter_context(contextlib.closing(opened(path, bucket))) for _ in range(2))
        elsewhere = parts.enter_context(contextlib.closing(opened(path, tmp_path / "of-another-machine")))
        learner.acquire_leadership("here", lease_s=600)
        kept_out: list[str] = []

        def keep_out(actor: str, reason: str) -> None:
            kept_out.append(reason)
            learner.fence(actor, reason)

        lost = LostGroupsFence(learner, bucket=bucket.as_uri(), keep_out=keep_out)

        def read() -> list[str]:
            ids = [s.group.ticket_id for s in learner.read_groups(after_seq=0, limit=9)]
            lost.look()
            return ids

        learner.put_tickets([make_ticket("a"), make_ticket("b", order=1)])
        for actor, num in (("elsewhere", MAX_LOST_IN_A_ROW - 1), ("good", 1), ("elsewhere", 1)):
            for _ in range(num):
                put(good if actor == "good" else elsewhere, actor)
                assert read() == (["a"] if actor == "good" else [] if num > 1 else ["a"])
        (reason,) = kept_out
        assert f"none of its last {MAX_LOST_IN_A_ROW} large groups is in {bucket.as_uri()}" in reason
        with pytest.raises(FencedError):
            elsewhere.claim("elsewhere", limit=1, lease_s=60)
        assert learner.lost_in_a_row == {}
        put(good, "good")
        assert read() == ["a", "b"] and kept_out == [reason]


def test_actor_of_which_a_group_is_there_again_starts_the_count_anew(tmp_path):
    path, bucket = tmp_path / "store.sqlite", tmp_path / "bucket"
    with contextlib.closing(opened(path, bucket)) as store:
        store.acquire_leadership("here", lease_s=600)
        store.put_tickets([make_ticket("a")])
        for is_lost in (True, True, False):
            put(store, "a")
            if is_lost:
                for file in bucket.rglob("*-*"):
                    file.unlink()
            store.read_groups(after_seq=0, limit=9)
            assert ("a" in store.lost_in_a_row) == is_lost


def test_groups_from_before_a_learner_led_are_no_actors_fault(tmp_path):
    """They lie in the bucket that the learner before it had; with another one it would not start."""
    path, kept_out = tmp_path / "store.sqlite", []
    num = MAX_LOST_IN_A_ROW
    with contextlib.ExitStack() as parts:
        actor = parts.enter_context(contextlib.closing(opened(path, tmp_path / "old")))
        actor.put_tickets([make_ticket(f"t{i}", order=i) for i in range(num)])
        for _ in range(num):
            put(actor, "far")
        learner = parts.enter_context(contextlib.closing(SqliteStore(path)))
        learner.acquire_leadership("here", lease_s=600)
        learner.put_run_card(make_run_card(), {})
        lost = LostGroupsFence(learner, bucket="", keep_out=lambda *given: kept_out.append(given))
        assert learner.read_groups(after_seq=0, limit=2 * num) == []
        lost.look()
        assert kept_out == [] and learner.counts()["open"] == num  # for others, by the bucket of now
        for _ in range(num):
            put(actor, "far")
        assert learner.read_groups(after_seq=num, limit=2 * num) == []
        lost.look()
        assert [name for name, _ in kept_out] == ["far"]  # what comes since counts


def test_learner_whose_own_bucket_is_away_ends_and_blames_nobody(tmp_path):
    path, bucket, num = tmp_path / "store.sqlite", tmp_path / "bucket", MAX_LOST_IN_A_ROW
    with contextlib.closing(opened(path, bucket)) as store:
        store.acquire_leadership("here", lease_s=600)
        store.put_run_card(make_run_card(), {})
        store.put_tickets([make_ticket(f"t{i}", order=i) for i in range(num)])
        for _ in range(num):
            put(store, "far")
        bucket.rename(tmp_path / "mounted-elsewhere")
        bucket.mkdir()
        with pytest.raises(ValueError, match=f"store.bucket={bucket.as_uri()} has lost .* Mount the folder"):
            store.read_groups(after_seq=0, limit=num)
        assert store.lost_in_a_row == {} and store.num_unreadable == 0
        bucket.rmdir()
        (tmp_path / "mounted-elsewhere").rename(bucket)
        assert len(store.read_groups(after_seq=0, limit=num)) == num
