"""The loop with a made-up engine, a real store, real snapshots and real verifier workers."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import sys
import threading

import numpy as np
import pytest

from actor.admission import Admission, Policy
from actor.engine import EngineDeadError
from actor.loop import MAX_DROPPED_IN_A_ROW, Actor, Limits
from actor.verifiers.pool import VerifierPool
from actor.weight_client import WeightClient
from bridge import timeline
from bridge.snapshot import SnapshotWriter
from bridge.sqlite_store import SqliteStore
from bridge.store import FencedError
from bridge.timeline import Timeline
from bridge.types import Task, Ticket, Version
from tests.actor.fakes import FakeEngine, until
from tests.bridge.factories import make_group, make_ticket

TABLE = {"a": ("float32", (4,))}
LIMITS = Limits(lease_s=30.0, heartbeat_s=0.01)


@dataclasses.dataclass
class Setup:
    root: pathlib.Path
    store: SqliteStore
    writer: SnapshotWriter
    engine: FakeEngine
    actor: Actor
    verifiers: VerifierPool

    def publish(self, step: int, incarnation: int = 0) -> Version:
        version = Version(incarnation=incarnation, step=step)
        self.writer.write(version, {"a": np.full(4, step, np.float32)}, dtype="float32")
        return version

    def put(self, *orders: int, **fields) -> None:
        self.store.put_tickets(ticket(o, **fields) for o in orders)

    def groups(self, kind: str = "train"):
        return [s.group for s in self.store.read_groups(after_seq=0, limit=1000, kind=kind)]

    def running(self) -> list[str]:
        return sorted(self.engine.running)

    async def served(self, version: Version) -> None:
        await until(lambda: self.engine.version == version, f"{version} is served")

    async def runs(self, *request_ids: str) -> None:
        await until(lambda: self.running() == sorted(request_ids), f"{request_ids} run")

    @contextlib.asynccontextmanager
    async def serving(self):
        task = asyncio.create_task(self.actor.run())
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await task
            await self.verifiers.close()


def ticket(order: int, **fields) -> Ticket:
    return make_ticket(f"t{order}", order=order, **({"num_samples": 2} | fields))


def make_setup(
    root: pathlib.Path,
    *,
    auto: bool = False,
    policy: Policy = "frontier",
    width: int = 2,
    limits: Limits = LIMITS,
    command: tuple[str, ...] = (),
    name: str = "actor-0",
) -> Setup:
    engine = FakeEngine(auto=auto)
    store = SqliteStore(root / "store.sqlite")
    events = Timeline(root / "events", name)
    weights = WeightClient(
        root / "snapshots",
        root / f"copy-{name}" / "weights",
        engine,
        run="r",
        tokenizer_hash="t",
        expected=TABLE,
        timeline=events,
    )
    extra = {"command": command} if command else {}
    verifiers = VerifierPool(num_workers=1, timeout_s=5.0, retries=0, **extra)
    actor = Actor(
        name,
        store=store,
        engine=engine,
        weights=weights,
        verifiers=verifiers,
        decode=lambda tokens: bytes(tokens.astype(np.uint8)).decode(),
        admission=Admission(policy, width=width, max_sequences=8, samples_per_group=2),
        timeline=events,
        limits=limits,
    )
    writer = SnapshotWriter(root / "snapshots", run="r", tokenizer_hash="t")
    return Setup(root, store, writer, engine, actor, verifiers)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def failure(group: BaseException | None) -> BaseException | None:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def ended(task: asyncio.Task) -> BaseException | None:
    await asyncio.wait({task})
    return failure(task.exception())


def test_tickets_wait_for_the_first_weights(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True)
        s.put(0, 1)
        async with s.serving():
            await until(lambda: bool(s.store.heartbeats()), "a heartbeat")
            assert s.store.heartbeats()[0].version is None
            assert s.store.counts()["open"] == 2  # not even claimed
            s.publish(3)
            await until(lambda: len(s.groups()) == 2, "both groups")

    run(body())


def test_group_in_the_store_is_what_the_engine_and_the_verifier_made(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True)
        s.publish(3, incarnation=1)
        s.put(0, num_samples=3)
        s.put(1, task=Task(verifier="exact", answer="43"))
        async with s.serving():
            await until(lambda: len(s.groups()) == 2, "both groups")
        right, wrong = sorted(s.groups(), key=lambda g: g.order)
        assert [r.reward for r in right.rollouts] == [1.0] * 3
        assert [r.reward for r in wrong.rollouts] == [0.0] * 2
        assert right.rollouts[0].tokens.tolist() == [ord("4"), ord("2")]
        assert right.rollouts[0].token_versions.tolist() == [3, 3]
        assert (right.ticket_id, right.actor, right.incarnation) == ("t0", "actor-0", 1)
        assert 0 < right.started_s <= right.finished_s
        assert s.actor.held == {}

    run(body())


def test_frontier_runs_the_lowest_orders_and_refills_when_a_group_is_served(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        s.put(3, 1, 0, 2)
        async with s.serving():
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            assert {r.priority for r in s.engine.running.values()} == {0, 1}
            assert s.store.counts()["open"] == 2  # the deferred ones stay in the store
            s.engine.finish("t1.0")
            await s.runs("t0.0", "t0.1", "t1.1")
            s.engine.finish("t1.1")
            await s.runs("t0.0", "t0.1", "t2.0", "t2.1")
            await until(lambda: [g.order for g in s.groups()] == [1], "group 1 is complete")

    run(body())


def test_slot_is_free_before_the_reward_is_known(tmp_path):
    async def body():
        command = (sys.executable, "-m", "tests.actor.bad_verifiers", str(tmp_path / "attempts"))
        s = make_setup(tmp_path, width=1, command=command)
        s.engine.reply = np.frombuffer(b"1", np.uint8).astype(np.int32)
        s.publish(0)
        s.put(0, task=Task(verifier="hang", answer="a"))
        s.put(1)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            s.engine.finish("t0.0")
            s.engine.finish("t0.1")
            await s.runs("t1.0", "t1.1")  # serving-complete, not reward-complete (RolloutPipe 3.3)
            assert s.groups() == []

    run(body())


def test_evaluations_go_first_and_beside_a_full_frontier(tmp_path):
    async def body():
        s = make_setup(tmp_path, width=1)
        s.publish(0)
        s.put(0, 1)
        s.store.put_tickets(make_ticket(f"e{i}", order=i - 10, kind="eval", num_samples=1) for i in range(3))
        async with s.serving():
            await s.runs("e0.0", "e1.0", "e2.0", "t0.0", "t0.1")
            for i in range(3):
                s.engine.finish(f"e{i}.0")
            await until(lambda: len(s.groups("eval")) == 3, "the evaluation")

    run(body())


def test_ticket_for_newer_weights_waits_for_them(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True)
        s.publish(0)
        s.put(0, min_version=Version(incarnation=0, step=1))
        s.put(1)
        async with s.serving():
            await until(lambda: [g.order for g in s.groups()] == [1], "the servable one")
            s.publish(1)
            await until(lambda: len(s.groups()) == 2, "the other one")
        assert {g.order: g.min_step for g in s.groups()} == {0: 1, 1: 0}

    run(body())


def test_update_in_flight_reaches_the_group(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        await asyncio.to_thread(s.publish, 0)
        s.put(0)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            s.engine.step("t0.0", 2)
            await s.served(s.publish(1))
            s.engine.step("t0.0", 1)
            s.engine.finish("t0.0")
            s.engine.finish("t0.1")
            await until(lambda: bool(s.groups()), "the group")
        (group,) = s.groups()
        assert group.rollouts[0].token_versions.tolist() == [0, 0, 1]
        assert (group.min_step, group.max_step) == (0, 1)
        assert s.engine.aborted == []

    run(body())


def test_abandoned_future_is_sampled_again(tmp_path):
    """Served 0:5; the learner is back at step 3 under incarnation 1: nothing of 0:5 may stay."""

    async def body():
        s = make_setup(tmp_path)
        s.publish(5)
        s.put(0, 1)
        async with s.serving():
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            s.engine.step("t0.0", 1)
            s.engine.finish("t0.1")
            await s.runs("t0.0", "t1.0", "t1.1")
            await s.served(s.publish(3, incarnation=1))
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            assert sorted(s.engine.aborted) == ["t0.0", "t1.0", "t1.1"]
            for id_ in s.running():
                s.engine.finish(id_)
            await until(lambda: len(s.groups()) == 2, "both groups")
        for group in s.groups():
            assert (group.incarnation, group.min_step, group.max_step) == (1, 3, 3)
        assert s.store.counts()["reissued"] == 0

    run(body())


def test_higher_incarnation_that_lost_nothing_aborts_nothing(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(5)
        s.put(0)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            s.engine.step("t0.0", 1)
            await s.served(s.publish(5, incarnation=1))
            s.engine.step("t0.0", 1)
            s.engine.finish("t0.0")
            s.engine.finish("t0.1")
            await until(lambda: bool(s.groups()), "the group")
        assert s.engine.aborted == []
        assert s.groups()[0].incarnation == 1

    run(body())


def test_verifier_that_fails_drops_the_group_and_reissues_its_ticket(tmp_path):
    async def body():
        command = (sys.executable, "-m", "tests.actor.bad_verifiers", str(tmp_path / "attempts"))
        s = make_setup(tmp_path, auto=True, command=command)
        s.engine.reply = np.frombuffer(b"1", np.uint8).astype(np.int32)
        s.publish(0)
        s.put(0, task=Task(verifier="raise", answer="a"))
        async with s.serving():
            await until(lambda: bool(s.groups()), "the second attempt's group")
        assert [r.reward for r in s.groups()[0].rollouts] == [0.5, 0.5]
        assert s.store.counts()["reissued"] == s.actor.num_dropped == 1
        assert [e["args"]["ticket"] for e in timeline.read(tmp_path / "events") if e["name"] == "dropped"] == ["t0"]

    run(body())


def test_verifier_that_never_works_ends_the_actor(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True)
        s.publish(0)
        s.put(*range(MAX_DROPPED_IN_A_ROW), task=Task(verifier="nope", answer=""))
        async with s.serving() as task:
            error = await ended(task)
        assert isinstance(error, RuntimeError) and f"{MAX_DROPPED_IN_A_ROW} groups in a row" in str(error)
        assert s.groups() == []

    run(body())


def test_cancelled_loop_aborts_requests_and_gives_its_tickets_back(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        s.put(0, 1, 2)
        async with s.serving():
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        assert s.running() == [] and len(s.engine.aborted) == 4
        assert s.store.counts()["open"] == 3
        assert {t.id for t in s.store.claim("other", limit=9, lease_s=9)} == {"t0", "t1", "t2"}

    run(body())


def test_ticket_claimed_while_the_loop_is_cancelled_is_given_back(tmp_path, monkeypatch):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        claimed, go_on = threading.Event(), threading.Event()
        claim = s.store.claim

        def slow_claim(*args, **kwargs):
            tickets = claim(*args, **kwargs)
            if tickets:
                claimed.set()
                assert go_on.wait(30)
            return tickets

        monkeypatch.setattr(s.store, "claim", slow_claim)
        s.put(0)
        async with s.serving():
            await until(claimed.is_set, "the store has leased it")
            asyncio.get_running_loop().call_soon(go_on.set)  # after the cancellation that ends this block
        assert s.store.counts()["open"] == 1

    run(body())


def test_leases_are_renewed_and_a_lost_one_ends_its_group(tmp_path):
    async def body():
        s = make_setup(tmp_path, limits=Limits(lease_s=0.3, heartbeat_s=0.01))
        s.publish(0)
        s.put(0, 1)
        async with s.serving():
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            end = asyncio.get_running_loop().time() + 3 * 0.3
            while asyncio.get_running_loop().time() < end:  # three leases long
                assert s.store.claim("thief", limit=9, lease_s=9.0) == []
                await asyncio.sleep(0.02)
            s.store.put_group(make_group(ticket(0), actor="thief"))
            await s.runs("t1.0", "t1.1")
            assert set(s.actor.held) == {"t1"}

    run(body())


def test_ticket_withdrawn_while_it_is_served_is_forgotten(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        s.put(0)
        async with s.serving() as task:
            await s.runs("t0.0", "t0.1")
            s.store.withdraw(["t0"])
            s.engine.finish("t0.0")
            s.engine.finish("t0.1")
            await until(lambda: not s.actor.groups, "the group ended")
            assert not task.done()
            assert s.actor.num_emitted == 0

    run(body())


def test_fenced_actor_ends(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        async with s.serving() as task:
            await s.served(Version(incarnation=0, step=0))
            s.store.fence("actor-0", "off by 2.2")
            error = await ended(task)
        assert isinstance(error, FencedError) and "off by 2.2" in str(error)

    run(body())


def test_dead_engine_ends_the_actor_and_its_tickets_are_free(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        s.put(0)
        async with s.serving() as task:
            await s.runs("t0.0", "t0.1")
            s.engine.die()
            assert isinstance(await ended(task), EngineDeadError)
        assert s.store.counts()["open"] == 1

    run(body())


def test_engine_that_samples_nothing_is_found(tmp_path):
    async def body():
        s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, stall_s=0.5))
        s.publish(0)
        async with s.serving() as task:
            await s.served(Version(incarnation=0, step=0))
            await asyncio.wait({task}, timeout=1.0)
            assert not task.done()  # idle is not hung
            s.put(0)
            error = await ended(task)
        assert isinstance(error, EngineDeadError) and "no token for 0.5 s with 2 requests" in str(error)

    run(body())


def test_update_that_hangs_is_found(tmp_path):
    async def body():
        s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, swap_s=0.2))
        s.engine.hang_swaps = True
        s.publish(0)
        async with s.serving() as task:
            error = await ended(task)
        assert isinstance(error, EngineDeadError) and "longer than 0.2 s" in str(error)

    run(body())


def test_broken_snapshot_gives_waiting_tickets_back_and_serves_on(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        v0 = s.publish(0)
        s.put(0)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            v1 = Version(incarnation=0, step=1)
            s.engine.refuse = {v1}
            s.put(1, min_version=v1)
            await until(lambda: "t1" in s.actor.held, "it is claimed")
            s.publish(1)
            await until(lambda: s.store.counts()["open"] == 1, "it is given back")
            assert (s.engine.version, s.running()) == (v0, ["t0.0", "t0.1"])
            await s.served(s.publish(2))
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")

    run(body())


def test_heartbeat_carries_the_version_and_the_updates_timings(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True)
        v = s.publish(4)
        s.put(0)
        async with s.serving():
            await until(lambda: bool(s.groups()), "the group")
            await until(lambda: json.loads(s.store.heartbeats()[0].detail)["groups"] == 1, "it is told")
        (beat,) = s.store.heartbeats()
        detail = json.loads(beat.detail)
        assert (beat.process, beat.role, beat.version) == ("actor-0", "actor", v)
        assert detail["pause_s"] == 0.02 and detail["load_s"] == 0.01 and detail["prefetch_s"] > 0

    run(body())


def test_two_actors_share_the_frontier(tmp_path):
    async def body():
        limits = dataclasses.replace(LIMITS, heartbeat_s=1.0)
        a = make_setup(tmp_path, width=3, limits=limits)
        b = make_setup_beside(a, "actor-1", width=3, limits=limits)
        a.publish(0)
        async with a.serving(), b.serving():
            await until(lambda: (a.actor.admission.width, b.actor.admission.width) == (2, 1), "shares")
            a.put(*range(8))
            await until(lambda: len(a.running()) == 4 and len(b.running()) == 2, "three groups run")
            assert a.store.counts()["open"] == 5

    run(body())


def make_setup_beside(other: Setup, name: str, **fields) -> Setup:
    other.writer.close()  # one writer a folder
    s = make_setup(other.root, name=name, **fields)
    other.writer = s.writer
    return s


def test_overlapping_groups_lie_in_lanes_of_their_own(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True, width=4)
        s.publish(0)
        s.put(*range(20))
        async with s.serving():
            await until(lambda: len(s.groups()) == 20, "all groups")
            await until(lambda: not s.actor.groups, "all are recorded")

    run(body())
    spans = [e for e in timeline.read(tmp_path / "events") if e["ph"] == "X" and e["name"] in ("rollout", "reward")]
    assert len(spans) == 40
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for e in spans:
        by_lane.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert 0 not in by_lane  # the actor's own
    for lane in by_lane.values():
        lane.sort()
        assert all(end <= start + 1 for (_, end), (start, _) in zip(lane, lane[1:], strict=False))


def test_group_sent_twice_is_taken_once(tmp_path):
    async def body():
        s = make_setup(tmp_path)
        s.publish(0)
        s.put(0)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            assert s.store.put_group(make_group(ticket(0), actor="other"))
            for id_ in s.running():
                s.engine.finish(id_)
            await until(lambda: not s.actor.groups, "the group ended")
            assert s.actor.num_emitted == 0
        assert [g.actor for g in s.groups()] == ["other"]

    run(body())


@pytest.mark.parametrize("policy", ["fifo", "window"])
def test_every_ticket_is_served_once_under(tmp_path, policy):
    async def body():
        s = make_setup(tmp_path, auto=True, policy=policy, width=2)
        s.publish(0)
        s.put(*range(30))
        async with s.serving():
            await until(lambda: len(s.groups()) == 30, "all groups")
        assert sorted(g.order for g in s.groups()) == list(range(30))
        assert s.store.counts()["reissued"] == 0

    run(body())
