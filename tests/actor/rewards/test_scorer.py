import asyncio
import sys
from typing import Any, cast

import pytest

from actor.rewards.adaptive_timeout import AdaptiveTimeouts, task_key
from actor.rewards.scorer import NO_REWARD, RewardResult, RewardScorer
from actor.rewards.types import Response, Score
from actor.rewards.verifier_pool import HangError, VerifierError, VerifierPool
from actor.rewards.verifiers.judge import Judge, JudgeCounts
from bridge.rollout_types import Finish, RewardPart, RewardScore, Task, Verdict
from configs.sections import RewardsConfig
from configs.sections.prompts import Truncated
from tests.actor.fakes import until


def response(text: str, finish: Finish = "stop") -> Response:
    return Response(text=text, finish=finish, num_tokens=len(text))


async def no_pause(seconds: float) -> None:
    """Between attempts; tests don't wait."""


def bad(tmp_path, *, retries: int = 1) -> VerifierPool:
    """Whose verifiers misbehave as often as the response says, by task (`bad_verifiers`)."""
    command = (sys.executable, "-m", "tests.actor.rewards.verifiers.bad_verifiers", str(tmp_path / "attempts"))
    return VerifierPool(num_workers=1, timeout_s=0.5, retries=retries, command=command, sleep=no_pause)


def attempts(tmp_path) -> int:
    file = tmp_path / "attempts"
    return len(file.read_text().split()) if file.exists() else 0


async def judged(rewards: RewardScorer, text: str, task: Task, finish: Finish = "stop") -> RewardResult:
    try:
        return await rewards.score(response(text, finish), task)
    finally:
        await rewards.close()


class InMemoryAnchors:
    """A store of anchors that remembers nothing."""

    def anchors(self, keys):
        return {}

    def raise_anchors(self, anchors):
        pass


class Elsewhere:
    """A verifier that answers when it is told to."""

    def __init__(self, value: float | None, verdict: Verdict = "ok"):
        self._value = value
        self._verdict: Verdict = verdict
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.is_closed = self.was_cancelled = False
        self.counts = JudgeCounts()

    async def score(self, response: Response, task: Task) -> Score:
        self.asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self._value is None:
            raise VerifierError("away")
        return Score(value=self._value, verdict=self._verdict)

    async def close(self) -> None:
        self.is_closed = True


async def test_reward_is_the_weighted_sum_of_scores_that_are_kept_apart():
    task = Task(
        rewards=(RewardPart("exact", 0.5), RewardPart("format", -2.0)), answer="42", metadata='{"format": "4."}'
    )
    got = await judged(RewardScorer(VerifierPool(num_workers=2, timeout_s=30.0, retries=0)), "42", task)
    scores = tuple(
        RewardScore(name=name, value=1.0, verdict="ok", answer=answer)
        for name, answer in (("exact", "42"), ("format", None))
    )
    assert got == RewardResult(reward=-1.5, scores=scores)


async def test_wrong_answer_earns_nothing_and_is_told_from_a_right_one():
    got = await judged(
        RewardScorer(VerifierPool(num_workers=1, timeout_s=30.0, retries=0)), "41", Task.judged_by("exact", answer="42")
    )
    assert got == RewardResult(reward=0.0, scores=(RewardScore(name="exact", value=0.0, verdict="wrong", answer="41"),))


@pytest.mark.parametrize(("truncated", "num_asked"), [("zero", 0), ("keep", 1), ("mask", 1)])
async def test_truncated_response_is_judged_as_any_other_unless_it_earns_nothing(
    tmp_path, truncated: Truncated, num_asked
):
    rewards = RewardScorer(bad(tmp_path), truncated=truncated)
    got = await judged(rewards, "0", Task.judged_by("raise", answer="a"), "length")
    assert (got is NO_REWARD) == (num_asked == 0) and got.reward == 0.5 * num_asked
    assert attempts(tmp_path) == num_asked


async def test_episode_that_only_its_environment_rewards_is_not_asked_about(tmp_path):
    task = Task(rewards=(), answer="", environment="guess")
    assert await judged(RewardScorer(bad(tmp_path)), "0", task) is NO_REWARD


@pytest.mark.heavy
async def test_text_on_which_the_verifier_hangs_three_times_is_wrong_if_it_judges_the_own_answer(tmp_path):
    """The bad verifiers hang as often, by answer, as the text says; they judge the answer itself, 0, at once."""
    rewards = RewardScorer(bad(tmp_path))
    got = await rewards.score(response("9"), Task.judged_by("hang", answer="0"))
    assert got == RewardResult(reward=0.0, scores=(RewardScore(name="hang", value=0.0, verdict="hang"),))
    assert rewards.num_failures == 6 and attempts(tmp_path) == 7
    await rewards.close()


@pytest.mark.heavy
async def test_verifier_that_works_again_after_three_hangs_judges_the_response(tmp_path):
    got = await judged(RewardScorer(bad(tmp_path)), "3", Task.judged_by("hang", answer="0"))
    assert got == RewardResult(reward=0.5, scores=(RewardScore(name="hang", value=0.5, verdict="ok"),))


async def test_hang_of_programs_without_one_that_is_known_to_be_right_is_no_reward(tmp_path, monkeypatch):
    async def hang(*args, **options):
        raise HangError("no answer")

    monkeypatch.setattr(VerifierPool, "score", hang)
    task = Task.judged_by("code", answer="", metadata='{"tests": [{"input": "", "output": ""}]}')
    with pytest.raises(VerifierError, match="the row has no reference program"):
        await judged(RewardScorer(bad(tmp_path)), "x", task)


async def test_timeouts_of_a_response_that_waits_for_a_worker_are_those_that_are_known_when_it_is_free(monkeypatch):
    given = []

    async def attempt(pool, one, question):
        given.append(question.context.case_timeouts_s)
        if len(given) == 1:
            await until(lambda: bool(pool._idle._getters), "the other waits for the worker")
        return Score(value=1.0, verdict="ok", case_s=(4.0,))

    monkeypatch.setattr(VerifierPool, "_attempt", attempt)
    task = Task.judged_by("code", answer="", metadata='{"tests": [{"input": "", "output": ""}]}')
    store: Any = InMemoryAnchors()
    anchors = AdaptiveTimeouts(store, factor=1.5, min_s=2.0, max_s=30.0)
    rewards = RewardScorer(VerifierPool(num_workers=1, timeout_s=1.0, retries=0), anchors=anchors)
    await asyncio.gather(*(rewards.score(response(text), task) for text in ("right", "never ends")))
    await rewards.close()
    assert given == [(), (6.0,)]


@pytest.mark.parametrize(
    ("stopped_s", "raised_to_s", "verdicts"),
    [
        ((1.0, 3.1), 2.4, ["timeout", "ok"]),  # 3.6 s are allowed by now
        ((1.0, 3.1), 2.0, ["timeout"]),  # 3 s are, as when it was stopped
        ((50.0, 3.1), 2.4, ["timeout"]),  # its cases together took too long
        ((), 2.4, ["timeout"]),
        ((1.0, 3.1), 2.4, ["timeout", "hang"]),  # the first score stands
    ],
)
async def test_response_stopped_as_its_siblings_anchor_rose_is_scored_again(
    monkeypatch, stopped_s, raised_to_s, verdicts
):
    task = Task.judged_by("code", answer="", metadata='{"tests": [{"input": "", "output": ""}]}')
    found = []
    store: Any = InMemoryAnchors()
    anchors = AdaptiveTimeouts(store, factor=1.5, min_s=2.0, max_s=30.0)
    anchors.passed(task_key(task), (2.0, 2.0))

    async def score(pool, name, response, task, *, case_timeouts_s):
        if not found:
            anchors.passed(task_key(task), (2.0, raised_to_s))
            found.append("timeout")
            return Score(value=0.0, verdict="timeout", case_s=stopped_s)
        assert case_timeouts_s() == pytest.approx((3.0, 1.5 * raised_to_s))
        found.append(verdicts[1])
        if verdicts[1] == "hang":
            raise HangError("no answer")
        return Score(value=1.0, verdict="ok", case_s=(1.0, 3.5))

    monkeypatch.setattr(VerifierPool, "score", score)
    settings = RewardsConfig(max_answer_s=53.0)
    rewards = RewardScorer(VerifierPool(num_workers=1, timeout_s=1.0, settings=settings), anchors=anchors)
    got = await rewards.score(response("x"), task)
    assert got.scores[0].verdict == ("ok" if "ok" in verdicts else "timeout")
    await rewards.close()
    assert found == verdicts


@pytest.mark.heavy
async def test_verifier_that_hangs_on_the_own_answer_too_is_broken_and_gives_no_reward(tmp_path):
    with pytest.raises(VerifierError, match=r"3 times\); on the task's reference answer: .*3 times"):
        await judged(RewardScorer(bad(tmp_path)), "9", Task.judged_by("hang", answer="9"))
    assert attempts(tmp_path) == 6


async def test_verifier_that_fails_gives_no_reward_and_takes_its_siblings_with_it(tmp_path):
    slow = Elsewhere(1.0)
    rewards = RewardScorer(bad(tmp_path), judge=cast(Judge, slow))
    task = Task(rewards=(RewardPart("judge"), RewardPart("raise")), answer="a")
    with pytest.raises(VerifierError, match=r"verifier raise: .*2 attempts"):
        await rewards.score(response("9"), task)
    assert slow.was_cancelled
    await rewards.close()
    assert slow.is_closed


async def test_failures_are_those_of_workers_and_of_what_is_asked_elsewhere(tmp_path):
    one = Elsewhere(1.0)
    rewards = RewardScorer(bad(tmp_path), judge=cast(Judge, one))
    await rewards.score(response("1"), Task.judged_by("raise", answer="a"))
    one.counts.num_retries, one.counts.num_failures = 3, 2
    assert rewards.num_failures == 6 and rewards.judge_counts is one.counts
    await rewards.close()


async def test_verifiers_of_a_response_are_asked_side_by_side(monkeypatch):
    one, other = Elsewhere(0.25), Elsewhere(0.5, "timeout")
    pool = VerifierPool(num_workers=1, timeout_s=1.0, retries=0)
    monkeypatch.setattr(pool, "score", lambda name, response, task, **_: other.score(response, task))
    rewards = RewardScorer(pool, judge=cast(Judge, one))
    judging = asyncio.create_task(
        rewards.score(response("x"), Task(rewards=(RewardPart("judge"), RewardPart("b", 2.0)), answer=""))
    )
    await one.asked.wait()
    await other.asked.wait()
    other.may_answer.set()
    one.may_answer.set()
    got = await judging
    assert got.reward == 1.25 and [s.name for s in got.scores] == ["judge", "b"]
    assert [s.verdict for s in got.scores] == ["ok", "timeout"]
    await rewards.close()
