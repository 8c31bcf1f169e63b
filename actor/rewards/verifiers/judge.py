"""LLM judge: prompt, request with retries and back-off, counts.

It runs in the actor's own process, as it only waits; workers are for verifiers that compute.
"""

import asyncio
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from absl import logging

from actor.rewards.types import Response, Score
from actor.rewards.verifier_pool import VerifierError
from actor.rewards.verifiers import judge_answer
from actor.rewards.verifiers.judge_endpoint import Endpoint, JudgeAwayError, JudgeRefusedError, JudgeUnreachedError
from bridge.credentials import read_key_file
from bridge.rollout_types import Task
from configs.sections.rewards import PLACEHOLDERS, JudgeConfig, check_template

_PLACEHOLDER = re.compile("|".join(rf"\{{({name})\}}" for name in PLACEHOLDERS))
_BAR = "[|\uff5c]"
"""Full-width in some models' marks."""
_CONTROL = re.compile(
    rf"<{_BAR}[^|\uff5c<>\s]{{1,40}}{_BAR}>"
    r"|<</?[A-Z]+>>|</?(?:s|bos|eos|pad|unk|mask|cls|sep|think|\w{0,40}[_:]\w{0,40})>"
    r"|\[/?(?:[gs]?[A-Z][A-Z_]{2,40}|sop|eop)\]"
)
"""What chat templates put between messages, by its shape: a server would read it in a response's text, too."""
_WORD_JOINER = "\u2060"


def judge_messages(
    template: str, system_prompt: str, task: Task, response_text: str, max_chars: int
) -> list[dict[str, str]]:
    """The messages of a request.

    The response stands between markers with a nonce that is drawn for this request, so it can't close them: it can't
    pass for what stands outside. Marks of chat templates in it are broken up, so it can't begin a message of its own.
    The template is filled in one pass: braces and placeholders in a response are text. None of this keeps a model from
    believing what it reads there; the system prompt asks it not to, and a score is only ever a number in its bounds.

    Raises:
      ValueError: the template asks for a question, and the task's metadata holds none.
    """
    nonce = secrets.token_hex(8)
    values = {
        "answer": task.answer,
        "response": f"<<<response {nonce}>>>\n{harmless(shortened(response_text, max_chars))}\n<<<end {nonce}>>>",
    }
    if "{question}" in template:
        values["question"] = _question(task)
    filled = _PLACEHOLDER.sub(lambda m: values[m.group()[1:-1]], template)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": filled}]


def shortened(text: str, max_chars: int) -> str:
    """A text of so many characters at most, and a word about what its middle leaves out."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"


def harmless(text: str) -> str:
    """A text in which no mark of a chat template is one any more; it reads as before."""
    while (broken := _CONTROL.sub(lambda m: m.group()[0] + _WORD_JOINER + m.group()[1:], text)) != text:
        text = broken  # there may be one within another
    return text


def _question(task: Task) -> str:
    metadata = json.loads(task.metadata)
    question = metadata.get("question") if isinstance(metadata, dict) else None
    if not isinstance(question, str):
        raise ValueError(
            "judge.template asks for {question}, and the row's metadata holds no text of that name; leave it out, or "
            "give the row one"
        )
    return question


_FORMAT_STATUSES = (400, 422, 501)
"""What endpoints that know no `response_format` answer to one."""


MAX_SHORTENED = 5
"""A response that is too long for the judge's context is halved so many times."""
_TOO_LONG_STATUSES = (400, 413, 422)
_TOO_LONG = ("context length", "context_length", "context window", "maximum model length", "max_model_len", "too long")


@dataclasses.dataclass
class JudgeCounts:
    """What happened so far."""

    num_requests: int = 0
    """That were sent, each attempt being one."""
    num_retries: int = 0
    num_failures: int = 0
    """Responses that got no score: each is a `VerifierError`."""
    num_clamped: int = 0
    """Scores that were beyond the bounds."""
    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Attempts that failed, by kind: status_429, timeout, no_connection, connection, no_json, wrong_schema, ..."""


class Judge:
    """Scores responses by asking a model; many at once."""

    def __init__(
        self,
        config: JudgeConfig,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        """Asks nothing yet. Of a colocated judge the config has its address (`launch.services.judge_server`).

        Args:
          config: `judge`.
          sleep: between attempts.
          clock: seconds.
          draw: how long to wait, between two bounds.
          failure: why the judge will not be there again; empty as long as it may.

        Raises:
          ValueError: the key's or the template's file can't be used.
        """
        if not config.url:
            raise ValueError("there is no judge: judge.url is empty, and none was started (judge.colocate)")
        self._config = config
        self._template = read_template(config)
        self._sleep, self._clock, self._draw = sleep, clock, draw
        self.failure = failure
        self._places = asyncio.Semaphore(config.concurrency)
        self._resume_at_s = 0.0
        """Before this nothing is asked: the endpoint said so."""
        self._asks_for_schema = config.parser == "json" and config.structured != "off"
        self._endpoint = Endpoint(
            config.url,
            api_key=read_key_file(os.path.expanduser(config.api_key_file)) if config.api_key_file else None,
            timeout_s=config.timeout_s,
            concurrency=config.concurrency,
        )
        self.counts = JudgeCounts()

    async def score(self, response: Response, task: Task) -> Score:
        """The judge's score of a response's answer, between 0 and 1; ok where it is above 0.

        A response that ends within its thinking has no answer: 0, and the judge is not asked.

        Raises:
          VerifierError: the judge is away, refuses, or gives no score that can be read, each time it was asked.
        """
        if not response.is_thinking_finished:
            return Score(value=0.0, verdict="wrong")
        try:
            number = await self._ask(response, task)
        except VerifierError as e:
            self.counts.num_failures += 1
            logging.warning("judge gave no score problem=%r", str(e))
            raise
        value = judge_answer.scaled(number, self._config)
        self.counts.num_clamped += not self._config.min_score <= number <= self._config.max_score
        return Score(value=value, verdict="ok" if value > 0 else "wrong")

    async def close(self) -> None:
        """Closes its connections."""
        await self._endpoint.close()

    async def _ask(self, response: Response, task: Task) -> float:
        failed = _RetryBudget(self._config)
        num_shortened, max_chars = 0, self._config.max_response_chars
        while True:
            body = self._body(response, task, max_chars)  # with a nonce of its own at each attempt
            try:
                return judge_answer.raw_score(await self._attempt(body), self._config)
            except JudgeAwayError as e:
                problem = e
                self._pause_until(e.retry_after_s)
            except judge_answer.JudgeParseError as e:
                problem = e
            except JudgeRefusedError as e:
                self._note(f"status_{e.status}", e)
                if self._may_drop_schema(e, body):
                    continue
                if _is_too_long(e) and num_shortened < MAX_SHORTENED:
                    num_shortened, max_chars = num_shortened + 1, max(min(max_chars, len(response.answer)) // 2, 1)
                    self.counts.num_retries += 1
                    continue
                raise VerifierError(f"the judge refuses: {e}") from e
            self._note(problem.kind, problem)
            if gone := self.failure():
                raise VerifierError(f"the judge is gone: {gone}") from problem
            if said := failed.add(problem, self._clock()):
                raise VerifierError(f"the judge gave no score: {problem} ({said})") from problem
            if isinstance(problem, JudgeUnreachedError):
                logging.log_every_n_seconds(logging.WARNING, "judge is not there, it is waited for: %s", 60, problem)
            self.counts.num_retries += 1
            await self._sleep(self._backoff_s(failed.num_attempts - 1))

    def _note(self, kind: str, problem: Exception) -> None:
        self.counts.problems[kind] += 1
        logging.warning("verifier failed verifier=judge kind=%s problem=%r", kind, str(problem))

    async def _attempt(self, body: dict[str, Any]) -> str:
        while True:
            while (wait_s := self._resume_at_s - self._clock()) > 0:
                await self._sleep(wait_s)
            async with self._places:
                if self._resume_at_s <= self._clock():  # else another was told so while this one waited for its place
                    self.counts.num_requests += 1
                    return await self._endpoint.ask(body)

    def _body(self, response: Response, task: Task, max_chars: int) -> dict[str, Any]:
        config = self._config
        try:
            messages = judge_messages(self._template, config.system_prompt, task, response.answer, max_chars)
        except ValueError as e:
            raise VerifierError(str(e)) from e
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        return body | ({"response_format": judge_answer.schema(config)} if self._asks_for_schema else {})

    def _may_drop_schema(self, error: JudgeRefusedError, body: dict[str, Any]) -> bool:
        """Whether to ask again without a schema: the endpoint knows none. The answer is checked all the same."""
        is_about_it = error.status in _FORMAT_STATUSES and any(
            word in error.said for word in ("response_format", "json_schema", "guided", "structured")
        )
        if self._config.structured != "auto" or "response_format" not in body or not is_about_it:
            return False
        if self._asks_for_schema:
            logging.warning("judge's endpoint knows no response_format; it is left out from here on: %s", error)
        self._asks_for_schema = False
        self.counts.num_retries += 1
        return True

    def _pause_until(self, wait_s: float) -> None:
        bounded_s = min(wait_s, self._config.max_retry_after_s)
        self._resume_at_s = max(self._resume_at_s, self._clock() + bounded_s)

    def _backoff_s(self, num_before: int) -> float:
        """Exponential, with full jitter: those that failed together don't come back together."""
        # The power is bounded, too: a float ends at 2 ** 1023.
        return self._draw(0.0, min(self._config.max_backoff_s, self._config.backoff_s * 2.0 ** min(num_before, 60)))


class _RetryBudget:
    """The attempts to have a response judged that failed."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self.num_attempts = 0
        self._num_away = self._num_unreadable = 0
        self._unreached_since_s: float | None = None

    def add(self, problem: JudgeAwayError | judge_answer.JudgeParseError, now_s: float) -> str:
        """Counts one; why there shall be no other, empty while there shall."""
        self.num_attempts += 1
        if isinstance(problem, JudgeUnreachedError):
            # Counted by time: a judge that is started again takes a while, and refuses many connections meanwhile.
            if self._unreached_since_s is None:
                self._unreached_since_s = now_s
            is_over = now_s - self._unreached_since_s >= self._config.outage_timeout_s
            return f"asked for {self._config.outage_timeout_s:g} s, judge.outage_timeout_s" if is_over else ""
        self._unreached_since_s = None
        self._num_away += isinstance(problem, JudgeAwayError)
        self._num_unreadable += isinstance(problem, judge_answer.JudgeParseError)
        is_over = self._num_away > self._config.retries or self._num_unreadable > self._config.answer_retries
        return f"{self.num_attempts} attempts" if is_over else ""


def _is_too_long(error: JudgeRefusedError) -> bool:
    """Whether a request was refused as the prompt and the answer don't fit the model's context."""
    said = error.said.casefold()
    return error.status in _TOO_LONG_STATUSES and any(words in said for words in _TOO_LONG)


def read_template(config: JudgeConfig) -> str:
    """What is asked, from the config or its file.

    Raises:
      ValueError: the file can't be used.
    """
    if not config.template_file:
        return config.template
    try:
        template = pathlib.Path(config.template_file).expanduser().read_text(encoding="utf-8")
        check_template(template)
    except (OSError, ValueError) as e:
        raise ValueError(f"judge.template_file={config.template_file} can't be used: {e}") from e
    return template
