"""Groups that move from one actor to another in their middle, with a made-up engine and a real store."""

import asyncio
from typing import Any

import numpy as np
import pytest

from actor.background import shut_down
from actor.engine_protocol import PartialSample
from actor.handover import progress_so_far
from actor.rewards.scorer import RewardResult
from actor.sampling import Sampler
from bridge import codec
from bridge.progress_types import ClaimedTicket, TicketProgress
from bridge.rollout_types import Task, Version
from bridge.timeline import Timeline
from tests.actor.fakes import FakeEngine, until
from tests.actor.loop_setup import Setup, make_setup, make_setup_beside
from tests.bridge.factories import make_progress, make_ticket


class Scorer:
    """Scores a response by the number of its tokens, each once `may` is set."""

    def __init__(self, s: Setup) -> None:
        self.scored: list[int] = []
        self.may = asyncio.Event()
        self.may.set()
        s.actor.serving.rewards.score = self.score

    async def score(self, response, task) -> RewardResult:
        del task
        await self.may.wait()
        self.scored.append(response.num_tokens)
        return RewardResult(reward=float(response.num_tokens), scores=())


def handed_over(s: Setup) -> ClaimedTicket:
    """The open ticket, as the next actor would claim it."""
    (ticket,) = s.store.claim("reader", limit=1, lease_s=60)
    s.store.release("reader", [ticket.id])
    return ticket


def lengths(ticket: ClaimedTicket) -> dict[int, tuple[int, str | None, float | None]]:
    """Tokens, finish and reward of each request, by index."""
    assert ticket.progress is not None
    return {r.index: (r.tokens.size, r.finish, r.reward) for r in ticket.progress.requests}


async def test_group_goes_on_where_the_actor_that_left_had_stopped(tmp_path):
    s = make_setup(tmp_path)
    first = Scorer(s)
    s.publish(3)
    s.put(0, num_samples=3)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t0.2")
        s.engine.step("t0.0", 4)
        s.engine.step("t0.1", 5)
        s.engine.finish("t0.1")
        await until(lambda: first.scored == [5], "its reward is known")
        await shut_down(s.actor)
        assert s.running() == [] and s.store.counts()["open"] == 1
    assert lengths(handed_over(s)) == {0: (4, None, None), 1: (5, "stop", 5.0)}

    other = make_setup_beside(s, "actor-1")
    second = Scorer(other)
    other.publish(4)
    async with other.serving():
        await other.runs("t0.0", "t0.2")  # what had ended is not sampled again
        other.engine.step("t0.0", 2)
        other.engine.finish("t0.0")
        other.engine.finish("t0.2")
        await until(lambda: bool(other.groups()), "the group")
    (group,) = other.groups()
    assert [r.token_versions.tolist() for r in group.rollouts] == [[3, 3, 3, 3, 4, 4], [3] * 5, [4, 4]]
    assert [r.reward for r in group.rollouts] == [6.0, 5.0, 2.0]
    assert sorted(second.scored) == [2, 6]  # nor scored again
    assert group.actor == "actor-0&actor-1" and group.actors == {"actor-0", "actor-1"}
    await asyncio.gather(s.rewards.close(), other.rewards.close())


async def test_response_without_a_reward_is_scored_by_the_next_actor(tmp_path):
    s = make_setup(tmp_path)
    Scorer(s).may.clear()
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.finish("t0.1")
        await s.runs("t0.0")
        await shut_down(s.actor)
    assert lengths(handed_over(s)) == {1: (2, "stop", None)}
    other = make_setup_beside(s, "actor-1")
    second = Scorer(other)
    async with other.serving():
        await other.runs("t0.0")
        await until(lambda: second.scored == [2], "it is scored")
    await s.rewards.close()


async def test_group_that_is_sampled_whole_is_scored_and_stored_by_the_actor_that_leaves(tmp_path):
    s = make_setup(tmp_path)
    scorer = Scorer(s)
    scorer.may.clear()
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await s.runs()
        leaving = asyncio.create_task(shut_down(s.actor))
        await until(lambda: s.actor.is_shutting_down, "it leaves")
        scorer.may.set()
        await leaving
    assert [g.ticket_id for g in s.groups()] == ["t0"]


async def test_those_that_had_won_a_race_keep_their_places(tmp_path):
    s = make_setup(tmp_path)
    Scorer(s)
    s.publish(0)
    s.put(0, num_samples=2, num_requests=4)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t0.2", "t0.3")
        s.engine.finish("t0.2")
        await s.runs("t0.0", "t0.1", "t0.3")
        await shut_down(s.actor)
    other = make_setup_beside(s, "actor-1")
    Scorer(other)
    async with other.serving():
        await other.runs("t0.0", "t0.1", "t0.3")
        other.engine.finish("t0.3")
        await until(lambda: bool(other.groups()), "the group")
    assert sorted(other.engine.aborted) == ["t0.0", "t0.1"]  # the losers
    await s.rewards.close()


async def test_evaluations_and_episodes_are_not_stopped(tmp_path):
    s = make_setup(tmp_path)
    Scorer(s)
    s.publish(0)
    s.put(0, kind="eval")
    s.put(1, task=Task(rewards=(), answer="", environment="own"))
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        await until(lambda: not s.actor.admission.waiting, "the episode is dropped: nobody plays it here")
        leaving = asyncio.create_task(shut_down(s.actor))
        await until(lambda: s.actor.is_shutting_down, "it leaves")
        assert s.running() == ["t0.0", "t0.1"]
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await leaving
    assert [g.ticket_id for g in s.groups("eval")] == ["t0"]


async def test_actor_waits_for_weights_that_are_as_new_as_the_tokens_that_it_continues(tmp_path):
    s = make_setup(tmp_path)
    s.put(0)
    s.store.claim("x", limit=1, lease_s=60)
    s.store.hand_over("x", make_progress("t0", step=5))
    version = s.publish(4)
    async with s.serving():
        await s.served(version)
        await until(lambda: bool(s.actor.held), "it has the ticket")
        assert s.running() == []
        s.publish(5)
        await s.runs("t0.0", "t0.1")
        assert [v.step for v in s.engine.running["t0.0"].versions] == [5]


@pytest.mark.parametrize("how", ["lag", "rollback"])
async def test_tokens_that_no_group_may_have_are_not_continued(tmp_path, how):
    s = make_setup(tmp_path, max_lag_steps=1)
    Scorer(s)
    s.publish(5)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 3)
        s.engine.finish("t0.1")
        await s.runs("t0.0")
        await shut_down(s.actor)
    other = make_setup_beside(s, "actor-1", max_lag_steps=1)
    if how == "lag":
        version = other.publish(7)
    else:
        other.restart_learner({1: 4})
        version = other.publish(4, incarnation=1)
    async with other.serving():
        await other.served(version)
        await other.runs("t0.0", "t0.1")
        assert all(not r.versions for r in other.engine.running.values())
    await s.rewards.close()


async def test_restart_of_what_was_continued_begins_at_the_prompt(tmp_path):
    s = make_setup(tmp_path, max_lag_steps=1)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 3)
        await shut_down(s.actor)
    other = make_setup_beside(s, "actor-1", max_lag_steps=1)
    other.publish(1)
    async with other.serving():
        await other.runs("t0.0", "t0.1")
        await other.served(other.publish(2))  # the continued one began at step 0
        await other.runs("t0.0+1", "t0.1")
        assert other.engine.running["t0.0+1"].versions == []


async def test_logprobs_and_tokens_travel_as_they_were_sampled(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 3)
        await shut_down(s.actor)
    progress = handed_over(s).progress
    assert progress is not None and progress.actors == ("actor-0",)
    (request,) = progress.requests
    np.testing.assert_array_equal(request.tokens, np.resize(s.engine.reply, 3))
    np.testing.assert_array_equal(request.behavior_logprobs, np.full(3, -0.5, np.float32))


async def begun(s: Setup, request_id: str, step: int) -> bool:
    """Whether the request begins with tokens of the step."""
    await until(lambda: request_id in s.engine.running, "it runs")
    return [v.step for v in s.engine.running[request_id].versions] == [step]


def put_progress(s: Setup, **fields) -> None:
    """Ticket t0 with progress of actor x."""
    s.put(0)
    s.store.claim("x", limit=1, lease_s=60)
    values: dict[str, Any] = {"actors": ("x",)} | fields
    s.store.hand_over("x", make_progress("t0", **values))


async def test_tokens_of_weights_that_a_later_learner_went_back_behind_are_not_continued(tmp_path):
    s = make_setup(tmp_path)
    s.publish(4)
    s.restart_learner({1: 3})  # step 4 of incarnation 0 is abandoned; step 3 is not
    version = s.publish(6, incarnation=1)
    put_progress(s, step=4)
    async with s.serving():
        await s.served(version)
        assert not await begun(s, "t0.0", 4)
    s.store.reissue(["t0"])
    (ticket,) = s.store.claim("x", limit=1, lease_s=60)
    s.store.hand_over("x", make_progress("t0", step=3, actors=("x",)))
    assert ticket.progress is None


FOREIGN = {
    "another prompt": {"prompt": "other"},
    "a request that the ticket has not": {"indexes": (0, 2)},
}


@pytest.mark.parametrize("what", FOREIGN)
async def test_progress_that_is_not_of_the_ticket_is_ignored(tmp_path, what):
    s = make_setup(tmp_path)
    version = s.publish(0)
    fields = dict(FOREIGN[what])
    s.put(0)
    s.store.claim("x", limit=1, lease_s=60)
    s.store.hand_over("x", make_progress("t0", *fields.pop("indexes", (0,)), actors=("x",), **fields))
    async with s.serving():
        await s.served(version)
        assert not await begun(s, "t0.0", 0)


async def test_group_begins_anew_when_the_actor_that_began_it_is_fenced(tmp_path):
    s = make_setup(tmp_path)
    Scorer(s)
    s.publish(0)
    put_progress(s, step=0)
    async with s.serving():
        assert await begun(s, "t0.0", 0)
        s.store.fence("x", "why")
        await until(lambda: not s.engine.running.get("t0.0") or not s.engine.running["t0.0"].versions, "anew")
        await s.runs("t0.0", "t0.1")
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: bool(s.groups()), "the group")
    assert s.groups()[0].actor == "actor-0"


async def test_tokens_count_once_over_all_actors(tmp_path):
    s = make_setup(tmp_path)
    Scorer(s)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 3)
        s.engine.finish("t0.1")
        await s.runs("t0.0")
        await shut_down(s.actor)
    assert s.actor.serving.tally.num_submitted_tokens == 5
    other = make_setup_beside(s, "actor-1")
    Scorer(other)
    async with other.serving():
        await other.runs("t0.0")
        other.engine.step("t0.0", 4)
        other.engine.finish("t0.0")
        await until(lambda: other.actor.serving.tally.num_emitted == 1, "the group")
    assert other.actor.serving.tally.num_submitted_tokens == 4
    await s.rewards.close()


def test_tokens_that_move_keep_their_routing(tmp_path):
    ticket = make_ticket(num_samples=1)
    rows = np.arange(2 * (ticket.prompt_tokens.size + 2)).reshape(-1, 2, 1).astype(np.uint8)
    version = Version(incarnation=0, step=3)
    begun = PartialSample(
        tokens=np.array([5, 6, 7], np.int32),
        logprobs=np.full(3, -0.5, np.float32),
        token_versions=(version,) * 3,
        routed_experts=rows,
    )
    handed = progress_so_far(ticket, ["a"], {0: begun.finished("stop")}, {}, {})
    assert handed is not None
    arrived = codec.decode(TicketProgress, codec.encode(handed))
    engine = FakeEngine()
    engine.version = version
    sampler = Sampler(engine, timeline=Timeline(tmp_path, "a"), max_lag_steps=None)
    sample = asyncio.run(sampler.sample(ticket, 0, arrived.requests[0]))
    np.testing.assert_array_equal(sample.routed_experts, rows)
