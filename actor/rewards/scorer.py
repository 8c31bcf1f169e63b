"""Reward scoring of each response as soon as it finishes, while its siblings still generate (RollPacker 4.3)."""

import asyncio
import contextlib
import dataclasses

from absl import logging

from actor.rewards.adaptive_timeout import AdaptiveTimeouts, task_key
from actor.rewards.registry import gold_response
from actor.rewards.types import Response, Score
from actor.rewards.verifier_pool import TIMES_CASES, HangError, VerifierError, VerifierPool
from actor.rewards.verifiers.judge import Judge, JudgeCounts
from bridge.rollout_types import RewardPart, RewardScore, Task
from configs import custom_functions
from configs.sections.prompts import READS_ANSWERS, Truncated

MAX_OWN_RUNS = 2**14
"""Maximum tasks for which the reference run is remembered."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Reward and verifier scores of a response."""

    reward: float
    """Weighted sum of the scores."""
    scores: tuple[RewardScore, ...]


NO_REWARD = RewardResult(reward=0.0, scores=())
"""Result of a truncated response with prompts.truncated_responses=zero (PipelineRL section 5), and of an episode that
only its environment rewards."""


class RewardScorer:
    """Scorer that runs verifiers and tells a wrong answer from a broken verifier."""

    def __init__(
        self,
        pool: VerifierPool,
        *,
        truncated: Truncated = "zero",
        judge: Judge | None = None,
        anchors: AdaptiveTimeouts | None = None,
    ) -> None:
        """Takes ownership of the parts. Without `anchors` each test case has `rewards.max_timeout_s`."""
        self._pool, self._judge, self._anchors = pool, judge, anchors
        self.judge_counts = JudgeCounts() if judge is None else judge.counts
        self._truncated: Truncated = truncated
        self._own_runs: dict[str, asyncio.Task[None]] = {}
        """Runs of tasks' reference answers, by anchor key."""

    @property
    def num_failures(self) -> int:
        """Failures and hangs of verifiers, including those that a retry followed successfully."""
        return self._pool.num_failures + self.judge_counts.num_retries + self.judge_counts.num_failures

    def begin(self, task: Task) -> None:
        """Prepares for a task whose group begins: runs its reference program as the first anchor, if none is known."""
        timed = [part.name for part in task.rewards if part.name in TIMES_CASES]
        if self._anchors is None or not timed:
            return
        key = task_key(task)
        self._anchors.begin(key)
        if key in self._own_runs or self._anchors.timeouts_s(key):
            return
        own = gold_response(timed[0], task, self._pool.settings)
        if own:
            self._own_runs[key] = asyncio.get_running_loop().create_task(self._run_own(timed[0], own, task))
            while len(self._own_runs) > MAX_OWN_RUNS and next(iter(self._own_runs.values())).done():
                del self._own_runs[next(iter(self._own_runs))]

    async def score(self, response: Response, task: Task) -> RewardResult:
        """Returns the reward of a response; its verifiers run concurrently. Raises VerifierError if one fails."""
        if not task.rewards or (response.finish == "length" and self._truncated == "zero"):
            return NO_REWARD
        if len(task.rewards) == 1:
            scores = [await self._score(task.rewards[0], response, task)]
        else:
            try:
                async with asyncio.TaskGroup() as asked:
                    asking = [asked.create_task(self._score(part, response, task)) for part in task.rewards]
            except* VerifierError as e:
                raise e.exceptions[0] from None
            scores = [a.result() for a in asking]
        reward = sum(part.weight * score.value for part, score in zip(task.rewards, scores, strict=True))
        return RewardResult(reward=reward, scores=tuple(scores))

    async def close(self) -> None:
        """Stops the verifiers."""
        for run in self._own_runs.values():
            run.cancel()
        await asyncio.gather(*self._own_runs.values(), return_exceptions=True)
        if self._judge is not None:
            await self._judge.close()
        await self._pool.close()
        if self._anchors is not None:
            # unwritten anchors are logged; other actors will measure them again
            with contextlib.suppress(TimeoutError):
                await self._anchors.close()

    async def _score(self, part: RewardPart, response: Response, task: Task) -> RewardScore:
        if self._judge is not None and part.name == "judge":
            score = await self._judge.score(response, task)
        else:
            score = await self._pooled(part.name, response, task)
        return RewardScore(name=part.name, value=score.value, verdict=score.verdict, answer=score.answer)

    async def _pooled(self, name: str, response: Response, task: Task) -> Score:
        anchors = self._anchors if name in TIMES_CASES else None
        key = task_key(task) if anchors is not None else ""
        # Re-read while a worker scores: siblings may be right meanwhile.
        timeouts_s = (lambda: anchors.timeouts_s(key)) if anchors is not None else tuple
        try:
            score = await self._pool.score(name, response, task, case_timeouts_s=timeouts_s)
        except HangError as e:
            if custom_functions.is_custom(name):  # it may call a service, so a hang says nothing about the text
                raise
            await self._check_it_works(name, task, e)
            try:  # it may have stalled only for a while
                score = await self._pool.score(name, response, task, case_timeouts_s=timeouts_s)
            except HangError:
                logging.warning(
                    "verifier timed out on this response only, scored 0 verifier=%s answer=%r", name, task.answer
                )
                return Score(value=0.0, verdict="hang", answer="" if name in READS_ANSWERS else None)
        if anchors is None:
            return score
        is_within = sum(score.case_s) < self._pool.settings.max_answer_s
        if score.verdict == "timeout" and is_within and anchors.allows(key, score.case_s):
            # A sibling was right as this one was stopped, and its anchor allows more.
            with contextlib.suppress(HangError):  # the first score stands
                score = await self._pool.score(name, response, task, case_timeouts_s=timeouts_s)
        if score.verdict == "ok":
            anchors.passed(key, score.case_s)
        return score

    async def _run_own(self, name: str, text: str, task: Task) -> None:
        assert self._anchors is not None
        try:
            score = await self._pool.score(
                name, Response(text=text, finish="stop", num_tokens=1, begun_by_prompt=""), task
            )
        except VerifierError as e:  # scoring responses will fail in the same way and is counted
            logging.warning("reference answer not scored verifier=%s problem=%r", name, str(e))
            return
        if score.verdict == "ok":
            self._anchors.passed(task_key(task), score.case_s)

    async def _check_it_works(self, name: str, task: Task, hang: HangError) -> None:
        """Raises VerifierError if the verifier fails on the task's reference answer as well."""
        own = Response(
            text=gold_response(name, task, self._pool.settings), finish="stop", num_tokens=1, begun_by_prompt=""
        )
        if name in TIMES_CASES and not own.text:
            raise VerifierError(f"{hang}; the row has no reference program for a test of the verifier")
        try:
            await self._pool.score(name, own, task)
        except VerifierError as e:
            raise VerifierError(f"{hang}; on the task's reference answer: {e}") from e
