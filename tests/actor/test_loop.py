"""The loop with a made-up engine, a real store, real snapshots and real verifier workers: what is served, when."""

import asyncio
import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from actor.admission import Admission
from actor.rewards.types import Response
from bridge import timeline
from bridge.rollout_types import Task
from tests.actor.fakes import until
from tests.actor.loop_setup import LIMITS, make_setup, make_setup_beside
from tests.bridge.factories import make_ticket


async def test_group_in_the_store_is_what_the_engine_and_the_verifier_made(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.publish(3, incarnation=1)
    s.put(0, num_samples=3)
    s.put(1, task=Task.judged_by("exact", answer="43"))
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


async def test_truncated_response_earns_nothing_whatever_it_says(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.engine.ends_by = "length"
    s.publish(0)
    s.put(0, num_samples=3)
    async with s.serving():
        await until(lambda: len(s.groups()) == 1, "the group")
    (group,) = s.groups()
    assert [(r.reward, r.finish) for r in group.rollouts] == [(0.0, "length")] * 3  # "42" is right


async def test_frontier_runs_the_lowest_orders_and_refills_when_a_group_is_served(tmp_path):
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


async def test_frontier_of_the_run_bounds_an_actor_that_has_no_width(tmp_path):
    s = make_setup(tmp_path, width=0)
    s.publish(0)
    s.store.set_frontier_width(1)
    s.put(0, 1, 2, 3, 4)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        assert s.store.counts()["open"] == 4
        s.store.set_frontier_width(2)
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        s.store.set_frontier_width(None)
        await s.runs(*(f"t{order}.{i}" for order in range(4) for i in range(2)))  # the engine is full
        assert s.store.counts()["open"] == 1


async def test_slot_is_free_before_the_reward_is_known(tmp_path):
    command = (sys.executable, "-m", "tests.actor.rewards.verifiers.bad_verifiers", str(tmp_path / "attempts"))
    s = make_setup(tmp_path, width=1, command=command)
    s.engine.reply = np.frombuffer(b"1", np.uint8).astype(np.int32)
    s.publish(0)
    s.put(0, task=Task.judged_by("hang", answer="a"))
    s.put(1)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await s.runs("t1.0", "t1.1")  # serving-complete, not reward-complete (RolloutPipe 3.3)
        assert s.groups() == []


@pytest.mark.heavy
async def test_evaluations_go_first_and_beside_a_full_frontier(tmp_path):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    s.put(0, 1)
    s.store.put_tickets(make_ticket(f"e{i}", order=i - 10, kind="eval", num_samples=1) for i in range(3))
    async with s.serving():
        await s.runs("e0.0", "e1.0", "e2.0", "t0.0", "t0.1")
        for i in range(3):
            s.engine.finish(f"e{i}.0")
        await until(lambda: len(s.groups("eval")) == 3, "the evaluation")


async def test_two_actors_share_the_frontier(tmp_path, monkeypatch):
    def claims_of(s) -> list[int]:
        """Among how many actors each claim of this one shares, from here on."""
        among, claim = [], s.store.claim

        def recorded(*arguments, **fields):
            among.append(fields["among"])
            return claim(*arguments, **fields)

        monkeypatch.setattr(s.store, "claim", recorded)
        return among

    limits = dataclasses.replace(LIMITS, heartbeat_s=1.0)
    a = make_setup(tmp_path, width=3, limits=limits)
    b = make_setup_beside(a, "actor-1", width=3, limits=limits)
    a.publish(0)
    claims = claims_of(a), claims_of(b)
    async with a.serving(), b.serving():
        await until(lambda: all(c and c[-1] == 2 for c in claims), "they share; no earlier claim is under way")
        a.put(*range(8))
        await until(lambda: {len(a.running()), len(b.running())} == {4, 2}, "three groups run")
        assert a.store.counts()["open"] == 5


async def test_full_engine_leaves_the_frontier_place_of_a_served_group_to_another_actor(tmp_path):
    s = make_setup(tmp_path, width=2)
    s.actor.admission = s.actor.serving.admission = Admission("frontier", width=2, max_sequences=3, samples_per_group=4)

    async def score(response: Response, task: Task) -> Any:
        await asyncio.Event().wait()  # no reward is ever known

    s.rewards.score = score
    s.publish(0)
    s.put(1, 2, 3, num_samples=4)
    async with s.serving():
        await s.runs(*(f"t1.{i}" for i in range(4)))
        for i in range(2):
            s.engine.finish(f"t1.{i}")  # one place is free, and the four requests of the next group begin
        await until(lambda: "t2.3" in s.running(), "the next group runs")
        mark = s.store.mark()
        for i in range(2, 4):
            s.engine.finish(f"t1.{i}")
        await until(lambda: s.store.mark()["tickets"] != mark["tickets"], "other actors are told")
        assert [t.id for t in s.store.claim("actor-1", limit=1, lease_s=30, width=2)] == ["t3"]


@pytest.mark.heavy
async def test_samples_of_a_prompt_are_spread_over_actors_that_all_have_room_for_it(tmp_path):
    def claims_of(s) -> list[tuple[int | None, int]]:
        """What part of a group it asked for, and how many tickets it got, a claim."""
        found, claim = [], s.store.claim

        def recorded(*arguments, **fields):
            found.append((fields["part"], 0))
            tickets = claim(*arguments, **fields)
            found[-1] = (fields["part"], len(tickets))
            return tickets

        s.store.claim = recorded
        return found

    limits = dataclasses.replace(LIMITS, heartbeat_s=1.0)
    a = make_setup(tmp_path, policy="fifo", tickets_per_group=2, limits=limits)
    b = make_setup_beside(a, "actor-1", policy="fifo", tickets_per_group=2, limits=limits)
    a.publish(0)
    claims = claims_of(a), claims_of(b)
    async with a.serving(), b.serving():
        await until(lambda: all(c and c[-1][0] == 1 for c in claims), "they share; no earlier claim is under way")
        a.store.put_tickets([make_ticket(f"t{n}", order=n // 2, num_samples=1) for n in range(8)])
        await until(lambda: len(a.running()) + len(b.running()) == 8, "all run")
        assert [sorted(int(i[1]) // 2 for i in s.running()) for s in (a, b)] == [[0, 1, 2, 3]] * 2  # one of each
    assert [max(size for _, size in c) for c in claims] == [4, 4]  # in one claim


async def test_a_race_keeps_the_first_samples_to_end_and_aborts_the_others(tmp_path):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    s.put(0, num_samples=2, num_requests=4)
    s.put(1)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t0.2", "t0.3")
        s.engine.finish("t0.3")
        await s.runs("t0.0", "t0.1", "t0.2")
        s.engine.finish("t0.1")
        await s.runs("t1.0", "t1.1")  # the losers have ended, so the slot is free
        await until(lambda: s.actor.serving.tally.num_emitted == 1, "the group")
        assert sorted(s.engine.aborted) == ["t0.0", "t0.2"]
    (group,) = s.groups()
    assert len(group.rollouts) == 2
    assert s.actor.serving.tally.num_submitted_tokens == sum(r.tokens.size for r in group.rollouts)


@pytest.mark.heavy
async def test_overlapping_groups_lie_in_lanes_of_their_own(tmp_path):
    s = make_setup(tmp_path, auto=True, width=4)
    s.publish(0)
    s.put(*range(20))
    async with s.serving():
        await until(lambda: len(s.groups()) == 20, "all groups")
        await until(lambda: not s.actor.num_groups, "all are recorded")
    spans = [e for e in timeline.read(tmp_path / "events") if e["ph"] == "X" and e["name"] in ("rollout", "reward")]
    assert len(spans) == 40
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for e in spans:
        by_lane.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert 0 not in by_lane  # the actor's own
    for lane in by_lane.values():
        lane.sort()
        assert all(end <= start + 1 for (_, end), (start, _) in zip(lane, lane[1:], strict=False))


async def test_a_ticket_that_is_begun_is_in_the_event_log_before_it_ends(tmp_path):
    def entries(name):
        events = [e["args"] for e in timeline.read(tmp_path / "events") if e["name"] == name]
        return [(e["ticket"], e["lane"]) for e in events]

    s = make_setup(tmp_path, width=2)
    s.publish(0)
    s.put(0, 1)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        assert entries("begin") == [("t0", 1), ("t1", 2)] and not entries("aborted")
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await until(lambda: len(s.groups()) == 1, "the group")
        await until(lambda: s.actor.num_groups == 1, "it is recorded")
    assert entries("aborted") == [("t1", 2)]  # the actor's end; t0 has its group


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["fifo", "window"])
async def test_every_ticket_is_served_once_under(tmp_path, policy):
    s = make_setup(tmp_path, auto=True, policy=policy, width=2)
    s.publish(0)
    s.put(*range(30))
    async with s.serving():
        await until(lambda: len(s.groups()) == 30, "all groups")
    assert sorted(g.order for g in s.groups()) == list(range(30))
    assert s.store.counts()["reissued"] == 0


async def test_ticket_that_was_claimed_anew_during_a_pause_is_not_offered_again(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.actor.pause()
        (old,) = await s.actor.abort_all()
        anew = dataclasses.replace(old)  # by a claim that was on its way, after a rollback
        s.actor.holdings.add([anew])
        s.actor.admission.offer([anew])
        s.actor.resume([old])
        await s.runs("t0.0", "t0.1")
