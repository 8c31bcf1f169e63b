"""What every store does, over both engines: as one caller sees it."""

import dataclasses
import itertools
import threading

import msgspec
import numpy as np
import pytest

from bridge import codec
from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Sampling, Version
from bridge.store.open import SqlStore
from bridge.store.sql import ticket_rows
from bridge.store.store_types import FencedError
from tests.bridge.factories import as_plain, make_group, make_report, make_rollout, make_ticket
from tests.bridge.store.engines import rows


def put(store: SqlStore, *ids: str, **fields) -> dict:
    tickets = {i: make_ticket(i, **({"order": n} | fields)) for n, i in enumerate(ids)}
    store.put_tickets(tickets.values())
    return tickets


def claim_ids(store: SqlStore, actor: str, limit: int = 10, lease_s: float = 60.0) -> list[str]:
    return [t.id for t in store.claim(actor, limit=limit, lease_s=lease_s)]


def stored_ids(store: SqlStore, after_seq: int = 0, limit: int = 100, kind: str = "train") -> list[str]:
    return [s.group.ticket_id for s in store.read_groups(after_seq=after_seq, limit=limit, kind=kind)]


def test_put_tickets_known_ids_are_left_alone(store):
    assert store.put_tickets([]) == 0
    assert store.put_tickets([make_ticket("a", round=1), make_ticket("b")]) == 2
    assert store.put_tickets([make_ticket("a", round=2), make_ticket("c"), make_ticket("c")]) == 1
    assert [(t.id, t.round) for t in store.claim("x", limit=9, lease_s=1.0)] == [("a", 1), ("b", 0), ("c", 0)]


def test_claim_returns_the_ticket_as_it_was_put(store):
    ticket = make_ticket(
        "ä-1",
        order=-3,
        kind="probe",
        sampling=Sampling(max_tokens=9, temperature=0.7, stop_token_ids=(1, 2)),
        min_version=Version(incarnation=2, step=5),
    )
    store.put_tickets([ticket])
    (got,) = store.claim("x", limit=1, lease_s=1.0)
    assert got.progress is None
    assert [as_plain(getattr(got, f.name)) for f in dataclasses.fields(ticket)] == list(as_plain(ticket)[1:])


def test_claim_lowest_order_first_then_as_put(store):
    store.put_tickets([make_ticket(i, order=o) for i, o in (("c", 5), ("b", 1), ("a", 5), ("d", -1))])
    assert claim_ids(store, "x", limit=3) == ["d", "b", "c"]
    assert claim_ids(store, "y") == ["a"]
    assert claim_ids(store, "z") == []


def test_claim_expired_lease_is_offered_again_in_order(store, clock):
    put(store, "a", "b", "c")
    assert claim_ids(store, "x", limit=2, lease_s=10.0) == ["a", "b"]
    clock.now_s += 9.999
    assert claim_ids(store, "y", limit=1) == ["c"]
    clock.now_s += 0.001
    assert claim_ids(store, "y") == ["a", "b"]
    assert store.renew("x", ["a", "b"], lease_s=10.0) == []


def test_claim_unusable_arguments_refused(store):
    put(store, "a")
    assert claim_ids(store, "x", limit=0) == []
    with pytest.raises(ValueError, match="limit"):
        store.claim("x", limit=-1, lease_s=1.0)
    with pytest.raises(ValueError, match="limit"):
        store.read_groups(after_seq=0, limit=-1)
    for lease_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="lease_s"):
            store.claim("x", limit=1, lease_s=lease_s)
        with pytest.raises(ValueError, match="lease_s"):
            store.renew("x", ["a"], lease_s=lease_s)


def test_renew_moves_the_end_of_held_leases_only(store, clock):
    put(store, "a", "b", "c")
    claim_ids(store, "x", limit=2, lease_s=10.0)
    clock.now_s += 8
    assert store.renew("x", ["b", "c", "a", "unknown"], lease_s=10.0) == ["b", "a"]
    assert store.renew("y", ["a"], lease_s=10.0) == []
    clock.now_s += 8
    assert claim_ids(store, "y") == ["c"]


def test_release_offers_own_tickets_at_once(store):
    put(store, "a", "b")
    claim_ids(store, "x")
    store.release("y", ["a"])
    store.release("x", ["b", "unknown"])
    assert claim_ids(store, "y") == ["b"]


def test_put_group_round_trips_and_ends_the_lease(store):
    ticket = put(store, "a")["a"]
    claim_ids(store, "x")
    group = make_group(ticket, rollouts=(make_rollout(5, step=3), make_rollout(2, reward=-0.25)))
    assert store.put_group(group) is True
    (got,) = store.read_groups(after_seq=0, limit=9)
    assert as_plain(got.group) == as_plain(group)
    assert store.renew("x", ["a"], lease_s=1.0) == [] == claim_ids(store, "x")


def test_put_group_second_copy_refused_and_first_kept(store, clock):
    ticket = put(store, "a")["a"]
    claim_ids(store, "x", lease_s=1.0)
    clock.now_s += 2
    claim_ids(store, "y", lease_s=1.0)
    assert store.put_group(make_group(ticket, actor="x")) is True  # lost its lease, came first
    assert store.put_group(make_group(ticket, actor="y")) is False
    assert [s.group.actor for s in store.read_groups(after_seq=0, limit=9)] == ["x"]
    store.acknowledge(["a"])
    assert store.put_group(make_group(ticket, actor="y")) is False
    assert stored_ids(store) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "eval"},
        {"round": 1},
        {"order": 1},
        {"prompt_tokens": np.array([7, 9], np.int32)},
        {"prompt_tokens": np.array([7, 8, 8], np.int32)},
        {"rollouts": (make_rollout(),)},
        {"rollouts": (make_rollout(),) * 3},
    ],
)
def test_put_group_that_does_not_fit_its_ticket_refused(store, fields):
    ticket = put(store, "a")["a"]
    with pytest.raises(ValueError, match="does not fit"):
        store.put_group(make_group(ticket, **fields))
    assert stored_ids(store) == []
    assert store.put_group(make_group(ticket)) is True


def test_read_groups_stops_after_so_many_bytes_and_goes_on_from_there(store):
    tickets = put(store, "a", "b", "c", "d")
    for ticket in tickets.values():
        store.put_group(make_group(ticket))
    side = getattr(store, "learner", store)
    everything = [s.seq for s in store.read_groups(after_seq=0, limit=9)]
    side.page_bytes = len(codec.encode(make_group(tickets["a"]))) + 1
    first = [s.seq for s in store.read_groups(after_seq=0, limit=9)]
    second = [s.seq for s in store.read_groups(after_seq=first[-1], limit=9)]
    assert (len(first), first + second) == (2, everything)
    side.page_bytes = 1  # one at least, however large
    assert [s.seq for s in store.read_groups(after_seq=0, limit=9)] == everything[:1]


def test_read_groups_by_arrival_kind_and_position(store):
    trained = put(store, "a", "b", "c")
    held_out = put(store, "e", kind="eval")
    for ticket in (trained["c"], held_out["e"], trained["a"], trained["b"]):
        store.put_group(make_group(ticket))
    first, second, third = store.read_groups(after_seq=0, limit=9)
    assert [s.group.ticket_id for s in (first, second, third)] == ["c", "a", "b"]
    assert first.seq < second.seq < third.seq
    assert stored_ids(store, after_seq=first.seq, limit=1) == ["a"]
    assert stored_ids(store, after_seq=third.seq) == []
    assert stored_ids(store, kind="eval") == ["e"]


def test_seq_of_a_dropped_group_is_never_given_out_again(store):
    tickets = put(store, "a", "b")
    store.put_group(make_group(tickets["a"]))
    (before,) = store.read_groups(after_seq=0, limit=9)
    store.acknowledge(["a"])
    store.put_group(make_group(tickets["b"]))
    (after,) = store.read_groups(after_seq=0, limit=9)
    assert after.seq > before.seq


def test_reissue_opens_tickets_in_every_state(store):
    tickets = put(store, "open", "claimed", "done", "acknowledged")
    store.put_group(make_group(tickets["done"]))
    store.put_group(make_group(tickets["acknowledged"]))
    store.acknowledge(["acknowledged"])
    assert claim_ids(store, "y") == ["open", "claimed"]
    store.release("y", ["open"])
    assert store.reissue(["claimed", "done", "done", "acknowledged", "open", "unknown"]) == 4
    assert store.reissue([]) == 0
    assert store.counts() == {"open": 4, "claimed": 0, "done": 0, "acknowledged": 0, "failed": 0, "reissued": 4}
    assert stored_ids(store) == []
    assert store.renew("y", ["claimed"], lease_s=1.0) == []
    assert claim_ids(store, "x") == ["open", "claimed", "done", "acknowledged"]
    assert store.put_group(make_group(tickets["acknowledged"])) is True


def test_withdraw_forgets_tickets_and_groups(store):
    tickets = put(store, "a", "b", "c")
    claim_ids(store, "x", limit=1)
    store.put_group(make_group(tickets["b"]))
    store.withdraw(["a", "b", "unknown"])
    assert store.counts() == {"open": 1, "claimed": 0, "done": 0, "acknowledged": 0, "failed": 0, "reissued": 0}
    assert store.renew("x", ["a"], lease_s=1.0) == stored_ids(store) == []
    with pytest.raises(KeyError):
        store.put_group(make_group(tickets["a"]))
    assert store.put_tickets([tickets["a"]]) == 1


def test_withdraw_pinned_forgets_evaluation_and_probe_only(store):
    trained = put(store, "a", "b")
    pinned = put(store, "e", kind="eval") | put(store, "p", "q", kind="probe")
    for ticket in (trained["a"], pinned["e"], pinned["p"]):
        store.put_group(make_group(ticket))
    store.withdraw_pinned()
    assert store.counts() == {"open": 1, "claimed": 0, "done": 1, "acknowledged": 0, "failed": 0, "reissued": 0}
    assert stored_ids(store) == ["a"]
    assert stored_ids(store, kind="eval") == stored_ids(store, kind="probe") == []


def test_groups_are_read_again_after_each_break_under_numbers_that_grow_by_no_more_than_they_are(store, monkeypatch):
    learner = getattr(store, "learner", store)
    learner.acquire_leadership("here", lease_s=60.0)
    for name, ticket in put(store, *"abc").items():
        store.put_group(make_group(ticket))
        if name == "a":
            rows(store, "UPDATE runs SET last_seq = 100000 WHERE run = :run")
    seqs = [s.seq for s in learner.read_groups(after_seq=0, limit=9)]
    for _ in range(70):  # doubled as often, they would not fit 64 bits
        monkeypatch.setattr(learner, "_num_breaks_met", -1)
        stored = learner.read_groups(after_seq=seqs[-1], limit=9)
        assert [s.group.ticket_id for s in stored] == ["a", "b", "c"]
        seqs = [s.seq for s in stored]
    ((last_seq,),) = rows(store, "SELECT last_seq FROM runs WHERE run = :run")
    assert last_seq == seqs[-1] <= 71 * 100_003
    # An older copy, which lacks the last two and numbers the next one as one that was read.
    rows(store, "DELETE FROM groups WHERE run = :run AND ticket_id <> 'a'")
    rows(store, "UPDATE runs SET last_seq = 1 WHERE run = :run")
    monkeypatch.setattr(learner, "_num_breaks_met", -1)
    (again,) = learner.read_groups(after_seq=seqs[-1], limit=9)
    assert again.group.ticket_id == "a" and again.seq == seqs[-1] + 1


def test_rewind_offers_again_what_was_open_and_keeps_what_needs_no_second_generation(store):
    tickets = put(store, "trained", "was-open", "later", "held", "future", "unserved")  # orders 0 to 5
    tickets |= put(store, "e", kind="eval", order=9)
    for name in ("trained", "was-open", "later", "held", "e"):
        store.put_group(make_group(tickets[name]))  # by weights of step 0
    newer = (make_rollout(2, token_versions=np.array([4, 5], np.int32)),) * 2
    store.put_group(make_group(tickets["future"], rollouts=newer))
    store.acknowledge(["trained", "was-open", "later", "e"])
    assert store.roll_back(["was-open", "unknown"], next_order=2, step=4) == 1
    assert stored_ids(store) == ["held"]  # made by weights that the checkpoint has
    assert claim_ids(store, "x") == ["was-open"]
    # The rest is the learner's to issue anew, under the same ids.
    assert store.put_tickets([tickets[name] for name in ("later", "held", "future", "unserved")]) == 3


@pytest.mark.parametrize("call", ["acknowledge", "withdraw", "roll_back", "withdraw_pinned"])
def test_groups_are_deleted_a_few_per_transaction_so_that_none_holds_the_runs_lock_for_long(store, monkeypatch, call):
    monkeypatch.setattr(ticket_rows, "_TICKETS_PER_TRANSACTION", 2)
    tickets = put(store, *"abcde", kind="eval" if call == "withdraw_pinned" else "train")
    for ticket in tickets.values():
        store.put_group(make_group(ticket))
    learner = getattr(store, "learner", store)
    write, sizes = learner._database.write, [5]

    def counted(*args):
        done = write(*args)
        ((num_groups,),) = learner._read("SELECT count(*) FROM groups WHERE run = :run")
        sizes.append(num_groups)
        return done

    monkeypatch.setattr(learner._database, "write", counted)
    args = {"roll_back": ([],), "withdraw_pinned": ()}.get(call, (list(tickets),))
    getattr(learner, call)(*args, **({"next_order": 0, "step": -1} if call == "roll_back" else {}))
    assert sizes[-1] == 0 and max(a - b for a, b in itertools.pairwise(sizes)) == 2


def test_give_up_offers_again_until_it_has_failed_too_often(store):
    put(store, "a", "b")
    for attempt in range(3):
        assert claim_ids(store, "x", limit=1) == ["a"], attempt
        assert store.failed() == {}
        store.fail_ticket("a", "no verdict", max_attempts=3)
    assert store.failed() == {"a": "no verdict"}
    assert claim_ids(store, "x") == ["b"]
    store.fail_ticket("unknown", "no verdict", max_attempts=1)
    assert store.counts()["failed"] == 1


def test_give_up_reason_stands_in_a_column_of_its_own(store):
    put(store, "a", "b")
    claim_ids(store, "x")
    store.fail_ticket("a", "y", max_attempts=1)
    store.fail_ticket("b", "y", max_attempts=2)
    assert rows(store, "SELECT id, state, actor, failure FROM tickets WHERE run = :run ORDER BY id") == [
        ("a", "failed", None, "y"),
        ("b", "open", None, "y"),
    ]


def test_heartbeats_of_another_build_and_corrupt_ones_are_passed_over(store, clock):
    beat = Heartbeat(process="learner", role="learner", pid=1, time_s=clock.now_s)
    store.heartbeat(beat)
    store.heartbeat(dataclasses.replace(beat, process="x", role="actor"))
    other = msgspec.msgpack.encode([codec.FORMAT - 1, "Heartbeat", {"process": "x"}])
    rows(store, "UPDATE heartbeats SET payload = :payload WHERE run = :run AND process = 'x'", payload=other)
    assert store.heartbeats() == [beat]
    rows(store, "UPDATE heartbeats SET payload = :payload WHERE run = :run AND process = 'x'", payload=b"\0")
    assert store.heartbeats() == [beat]


def test_fence_drops_what_the_actor_made_and_nobody_acknowledged(store):
    tickets = put(store, *"abcde")
    for name, actor in zip("abcde", "xxyxy", strict=True):
        store.put_group(make_group(tickets[name], actor=actor))
    store.acknowledge(["a"])
    store.fence("x", "why", trained=["d", "e"])
    assert stored_ids(store) == ["c", "e"]
    assert claim_ids(store, "y") == ["b"]
    assert store.fenced_actors() == {"x"}
    assert store.roll_back(["d", "e"], next_order=9, step=9) == 1  # a checkpoint without what was trained of it
    assert claim_ids(store, "y") == ["d"]


def test_fence_refuses_claims_and_groups_and_frees_what_it_held(store):
    ticket = put(store, "a")["a"]
    claim_ids(store, "x")
    assert store.fenced("x") is None
    store.fence("x", "logprobs off by 2.2")
    assert store.fenced("x") == "logprobs off by 2.2"
    for refused in (lambda: claim_ids(store, "x"), lambda: store.put_group(make_group(ticket, actor="x"))):
        with pytest.raises(FencedError, match="off by 2.2"):
            refused()
    assert stored_ids(store) == []
    assert claim_ids(store, "y") == ["a"]
    assert store.put_group(make_group(ticket, actor="y")) is True


def test_heartbeats_last_one_of_each_process(store, clock):
    version = Version(incarnation=1, step=2)
    beats = [
        Heartbeat(process="b", role="actor", pid=1, time_s=1.0),
        Heartbeat(process="a", role="learner", pid=2, time_s=2.0, version=version),
        Heartbeat(process="c", role="actor", pid=3, time_s=3.0, version=version),
        Heartbeat(
            process="b",
            role="actor",
            pid=4,
            time_s=4.0,
            version=version,
            report=make_report(num_groups=3, pause_s=0.02),
        ),
    ]
    for beat in (beats[0], beats[2], beats[3], beats[1]):
        store.heartbeat(beat)
        clock.now_s += 10
    # By the store's clock: a process's own may be an hour off.
    want = [(beats[1], 1030.0), (beats[3], 1020.0), (beats[2], 1010.0)]
    assert store.heartbeats() == [dataclasses.replace(beat, time_s=time_s) for beat, time_s in want]
    assert store.now_s() == 1040.0


@pytest.mark.heavy
def test_threads_share_a_store(store):
    put(store, *(f"t{i}" for i in range(40)))
    claimed: list[list[str]] = [[], [], [], []]

    def serve(mine: list[str], actor: str) -> None:
        while tickets := store.claim(actor, limit=1, lease_s=60.0):
            mine.extend(t.id for t in tickets)
            store.put_group(make_group(tickets[0], actor=actor))

    threads = [threading.Thread(target=serve, args=(m, f"x{i}")) for i, m in enumerate(claimed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [i for mine in claimed for i in mine]
    assert len(everything) == 40 == len(set(everything)) == len(stored_ids(store))
