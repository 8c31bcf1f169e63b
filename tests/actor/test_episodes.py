"""Tickets of environments in the actor's loop; how an episode is played is `tests/actor/environments`' matter."""

import asyncio
import collections
from typing import cast

import numpy as np

from actor import background
from actor.engine_protocol import Episode, Sample
from actor.environments.episode import Episodes
from actor.environments.protocol import EpisodeError
from actor.environments.transcript import EpisodeRequest
from bridge.rollout_types import Task, Version
from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup

GUESS = Task(rewards=(), answer="7", metadata='{"seed": 3}', environment="guess")


class TwoTurns:
    """Plays two turns of one token each, an observation of two before and between; fails as often as it is told to."""

    def __init__(self, num_failing: int = 0, *, is_final: bool = False) -> None:
        self.num_failures = 0
        self.failures: collections.Counter[str] = collections.Counter()
        self.asked: list[EpisodeRequest] = []
        self._num_failing, self._is_final = num_failing, is_final

    async def play(self, episode: EpisodeRequest) -> Sample:
        self.asked.append(episode)
        if self.num_failures < self._num_failing:
            self.num_failures += 1
            self.failures["crash"] += 1
            raise EpisodeError("its environment is broken", is_final=self._is_final)
        mask = np.array([False, False, True, False, False, True])
        return Sample(
            tokens=np.arange(6, dtype=np.int32),
            logprobs=np.where(mask, -0.5, 0).astype(np.float32),
            token_versions=(Version(incarnation=0, step=0),) * 6,
            finish="stop",
            episode=Episode(sampled=mask, turn_rewards=np.array([0.25, 1.0], np.float32)),
        )

    async def close(self) -> None:
        """Nothing is open."""


def setup_of(tmp_path, episodes: TwoTurns | None):
    return make_setup(tmp_path, auto=True, episodes=cast(Episodes, episodes))


async def test_ticket_of_an_environment_is_played_and_its_rewards_are_its_turns(tmp_path):
    episodes = TwoTurns()
    s = setup_of(tmp_path, episodes)
    s.publish(0)
    s.put(0, task=GUESS)
    async with s.serving():
        await until(lambda: bool(s.groups()), "the group")
    (group,) = s.groups()
    assert [r.reward for r in group.rollouts] == [1.25, 1.25] and group.rollouts[0].scores == ()
    assert group.rollouts[0].loss_mask.tolist() == [False, False, True, False, False, True]
    assert group.rollouts[0].turn_rewards.tolist() == [0.25, 1.0]
    assert {(e.environment, e.row["seed"], e.row["answer"]) for e in episodes.asked} == {("guess", 3, "7")}
    assert len({e.request_id for e in episodes.asked}) == 2


async def test_episode_that_can_not_be_played_drops_its_group_and_its_ticket_is_offered_again(tmp_path):
    episodes = TwoTurns(num_failing=1)
    s = setup_of(tmp_path, episodes)
    s.publish(0)
    s.put(0, task=GUESS)
    async with s.serving():
        await until(lambda: bool(s.groups()), "the second attempt's group")
    assert s.store.counts()["reissued"] == s.actor.serving.tally.num_dropped == episodes.num_failures == 1


async def test_failures_of_environments_are_reported_by_kind(tmp_path):
    episodes = TwoTurns()
    episodes.failures.update(deadline=1, crash=2, exception=3, reply=4, start=5)
    s = setup_of(tmp_path, episodes)
    await background.send_heartbeat(s.actor)
    report = s.report()
    assert (report.num_episode_deadlines, report.num_episode_crashes, report.num_episode_exceptions) == (1, 2, 3)
    assert (report.num_episode_bad_replies, report.num_episode_bad_starts) == (4, 5)
    await s.rewards.close()


async def test_redundant_episode_that_fails_leaves_its_group_to_the_others(tmp_path):
    episodes = TwoTurns(num_failing=1)
    s = setup_of(tmp_path, episodes)
    s.publish(0)
    s.put(0, task=GUESS, num_samples=2, num_requests=3)
    async with s.serving():
        await until(lambda: bool(s.groups()), "the group")
        await until(lambda: s.actor.admission.in_service == [] and not s.actor.num_groups, "its place is free")
    assert len(s.groups()[0].rollouts) == 2 and len(episodes.asked) == 3
    assert s.actor.serving.tally.num_dropped == s.store.counts()["reissued"] == 0


async def test_group_of_which_too_few_redundant_episodes_are_left_is_dropped(tmp_path):
    s = setup_of(tmp_path, TwoTurns(num_failing=2))
    s.publish(0)
    s.put(0, task=GUESS, num_samples=2, num_requests=3)
    async with s.serving():
        await until(lambda: bool(s.groups()), "the second attempt's group")
    assert s.actor.serving.tally.num_dropped == s.store.counts()["reissued"] == 1


async def test_request_that_is_cancelled_though_nobody_asked_for_it_drops_its_group_and_not_the_actor(tmp_path):
    class Cancelled(TwoTurns):
        async def play(self, episode):
            try:
                return await super().play(episode)
            except EpisodeError:
                raise asyncio.CancelledError from None

    s = setup_of(tmp_path, Cancelled(num_failing=1))
    s.publish(0)
    s.put(0, task=GUESS)
    async with s.serving() as task:
        await until(lambda: bool(s.groups()) or task.done(), "the second attempt's group")
        assert not task.done()
    assert s.actor.serving.tally.num_dropped == 1


async def test_episode_that_would_fail_alike_each_time_fails_its_ticket_at_once(tmp_path):
    s = setup_of(tmp_path, TwoTurns(num_failing=1, is_final=True))
    s.publish(0)
    s.put(0, task=GUESS)
    async with s.serving():
        await until(lambda: bool(s.store.failed()), "its ticket failed")
    assert s.store.failed() == {"t0": "its environment is broken"} and s.groups() == []
    assert s.store.counts()["reissued"] == 0 and s.actor.serving.tally.num_dropped == 1


async def test_ticket_of_an_environment_is_no_single_turn_where_none_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr("actor.circuit_breaker.MIN_ROWS", 1)
    monkeypatch.setattr("actor.circuit_breaker.MIN_S", 0.0)
    s = setup_of(tmp_path, None)
    s.publish(0)
    s.put(0, task=GUESS)
    async with s.serving() as task:
        await until(task.done, "the actor ends")
    assert s.groups() == []


async def test_task_without_an_environment_goes_straight_to_the_engine(tmp_path):
    episodes = TwoTurns()
    s = setup_of(tmp_path, episodes)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await until(lambda: bool(s.groups()), "the group")
    assert episodes.asked == [] and s.groups()[0].rollouts[0].loss_mask.all()
