"""LLM judge: requests with retries and back-off, counts.

It runs in the actor's process, because it only waits; workers are for verifiers that compute.
"""

import asyncio
import collections
import dataclasses
import datetime
import email.utils
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from absl import logging

from actor.rewards.types import Response, Score
from actor.rewards.verifier_pool import VerifierError
from actor.rewards.verifiers import judge_text
from actor.rewards.verifiers.judge_text import JudgeParseError
from bridge.credentials import read_key_file
from bridge.rollout_types import Task
from configs.sections.rewards import JudgeConfig

MAX_BODY_BYTES = 4 * 2**20
RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""Client error statuses that are retried, like 5xx. Other 4xx mean a permanently invalid request or key."""
MAX_SHORTENED = 5
"""Maximum halvings of a response that exceeds the judge's context."""
_FORMAT_STATUSES = (400, 422, 501)
"""Statuses of endpoints that do not support `response_format`."""
_FORMAT_WORDS = ("response_format", "json_schema", "guided", "structured")
_TOO_LONG_STATUSES = (400, 413, 422)
_TOO_LONG_WORDS = (
    "context length", "context_length", "context window", "maximum model length", "max_model_len", "too long",
)  # fmt: skip
_MAX_SAID_CHARS = 200
ANSWER_RETRIES = 2
"""Retries after a malformed reply."""
BACKOFF_S = 0.5
"""Base of the retry delay. The n-th retry waits a random time below BACKOFF_S * 2^(n-1), at most MAX_BACKOFF_S."""
MAX_BACKOFF_S = 30.0
"""Upper bound of the retry delay. A longer Retry-After of the endpoint applies up to MAX_RETRY_AFTER_S."""
MAX_RETRY_AFTER_S = 120.0
"""Largest Retry-After delay that is obeyed."""


class JudgeRequestError(RuntimeError):
    """A request failed without an answer."""

    def __init__(self, kind: str, said: str, *, status: int = 0, retry_after_s: float = 0.0) -> None:
        """`status`: HTTP status, 0 without a reply. `retry_after_s`: pause requested by the endpoint, in seconds."""
        super().__init__(f"status {status}: {said}" if status else said)
        self.kind, self.said, self.status, self.retry_after_s = kind, said.casefold(), status, retry_after_s

    @property
    def is_refusal(self) -> bool:
        """True if the endpoint would reject every retry of this request."""
        return self.status != 0 and self.status not in RETRIED_STATUSES and self.status < 500


@dataclasses.dataclass
class JudgeCounts:
    """Cumulative counts of judge requests."""

    num_requests: int = 0
    """Requests sent, one per attempt."""
    num_retries: int = 0
    num_failures: int = 0
    """Responses without a score; each is a `VerifierError`."""
    num_clamped: int = 0
    """Scores outside the bounds."""
    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Failed attempts by kind: status_429, timeout, no_connection, connection, no_json, wrong_schema, ..."""


class Judge:
    """Scorer that queries a judge model, with many concurrent requests."""

    def __init__(
        self,
        config: JudgeConfig,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        """Reads key and template. A colocated judge's address is in the config (`launch.services.judge_server`).

        `failure` returns the reason that the judge is permanently gone; empty while it may return. Raises ValueError if
        the judge has no URL, or its key or template file is unusable.
        """
        if not config.url:
            raise ValueError("no judge: set judge.url or judge.colocate")
        self._config = config
        self._template = judge_text.read_template(config)
        self._sleep, self._clock, self._draw = sleep, clock, draw
        self.failure = failure
        self._places = asyncio.Semaphore(config.concurrency)
        self._resume_at_s = 0.0
        """Time before which no request is sent, as the endpoint requested."""
        self._asks_for_schema = config.parser == "json"
        key = read_key_file(os.path.expanduser(config.api_key_file)) if config.api_key_file else None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self.counts = JudgeCounts()

    async def score(self, response: Response, task: Task) -> Score:
        """Returns the judge's score of a response's answer, in [0, 1]; the verdict is ok above 0.

        A response that ends within its thinking has no answer: it scores 0 without a request. Raises VerifierError if
        on every attempt the judge was unreachable, rejected the request, or gave no readable score.
        """
        if not response.is_thinking_finished:
            return Score(value=0.0, verdict="wrong")
        try:
            number = await self._ask(response, task)
        except VerifierError as e:
            self.counts.num_failures += 1
            logging.warning("judge returned no score problem=%r", str(e))
            raise
        value = judge_text.scaled(number, self._config)
        self.counts.num_clamped += not self._config.min_score <= number <= self._config.max_score
        return Score(value=value, verdict="ok" if value > 0 else "wrong")

    async def close(self) -> None:
        """Closes the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, response: Response, task: Task) -> float:
        config = self._config
        num_attempts = num_away = num_unreadable = num_shortened = 0
        unreached_since_s: float | None = None
        max_chars = config.max_response_chars
        while True:
            body = self._body(response, task, max_chars)  # with a new nonce per attempt
            try:
                return judge_text.raw_score(await self._attempt(body), config)
            except (JudgeRequestError, JudgeParseError) as e:
                problem = e
            self.counts.problems[problem.kind] += 1
            logging.warning("verifier failed verifier=judge kind=%s problem=%r", problem.kind, str(problem))
            if isinstance(problem, JudgeRequestError) and problem.is_refusal:
                if "response_format" in body and _is_about_schema(problem):
                    if self._asks_for_schema:
                        logging.warning("judge endpoint does not support response_format, omitting it: %s", problem)
                    self._asks_for_schema = False  # the answer is validated anyway
                elif (
                    num_shortened < MAX_SHORTENED
                    and problem.status in _TOO_LONG_STATUSES
                    and any(words in problem.said for words in _TOO_LONG_WORDS)
                ):
                    num_shortened, max_chars = num_shortened + 1, max(min(max_chars, len(response.answer)) // 2, 1)
                else:
                    raise VerifierError(f"the judge rejected the request: {problem}") from problem
                self.counts.num_retries += 1
                continue
            num_attempts += 1
            if gone := self.failure():
                raise VerifierError(f"the judge exited: {gone}") from problem
            if problem.kind == "no_connection":
                # Bounded by time, because a restarting judge refuses many connections.
                unreached_since_s = self._clock() if unreached_since_s is None else unreached_since_s
                is_over = self._clock() - unreached_since_s >= config.outage_timeout_s
                said = f"asked for {config.outage_timeout_s:g} s, judge.outage_timeout_s"
                logging.log_every_n_seconds(logging.WARNING, "judge unreachable, retrying: %s", 60, problem)
            else:
                unreached_since_s = None
                num_away += isinstance(problem, JudgeRequestError)
                num_unreadable += isinstance(problem, JudgeParseError)
                is_over = num_away > config.retries or num_unreadable > ANSWER_RETRIES
                said = f"{num_attempts} attempts"
            if is_over:
                raise VerifierError(f"the judge returned no score: {problem} ({said})") from problem
            self.counts.num_retries += 1
            # Exponential with full jitter, so that simultaneous failures do not retry simultaneously. The exponent is
            # bounded because floats end at 2 ** 1023.
            bound_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(num_attempts - 1, 60))
            await self._sleep(self._draw(0.0, bound_s))

    async def _attempt(self, body: dict[str, Any]) -> str:
        while True:
            while (wait_s := self._resume_at_s - self._clock()) > 0:
                await self._sleep(wait_s)
            async with self._places:
                if self._resume_at_s > self._clock():
                    continue  # another request was told to wait meanwhile
                self.counts.num_requests += 1
                try:
                    return await self._post(body)
                except JudgeRequestError as e:
                    until_s = self._clock() + min(e.retry_after_s, MAX_RETRY_AFTER_S)
                    self._resume_at_s = max(self._resume_at_s, until_s)
                    raise

    async def _post(self, body: Mapping[str, Any]) -> str:
        config = self._config
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=config.concurrency),
                timeout=aiohttp.ClientTimeout(total=config.timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        url = f"{config.url.rstrip('/')}/chat/completions"
        data = bytearray()
        try:
            # A redirect would send key and response to another host.
            async with self._session.post(url, json=body, allow_redirects=False) as reply:
                async for chunk in reply.content.iter_any():
                    data += chunk
                    if len(data) > MAX_BODY_BYTES:
                        raise JudgeParseError("too_large", f"the reply has more than {MAX_BODY_BYTES} bytes")
        except TimeoutError as e:
            raise JudgeRequestError(
                "timeout", f"the judge did not answer within {config.timeout_s:g} s (judge.timeout_s)"
            ) from e
        except aiohttp.ClientSSLError as e:  # the host is reachable but not trusted
            raise JudgeRequestError("connection", f"{type(e).__name__}: {e}") from e
        except aiohttp.ClientConnectorError as e:
            raise JudgeRequestError("no_connection", f"no connection: {e}") from e
        except (aiohttp.ClientError, OSError) as e:
            raise JudgeRequestError("connection", f"{type(e).__name__}: {e}") from e
        if reply.status != 200:
            said = " ".join(data[: 4 * _MAX_SAID_CHARS].decode(errors="replace").split())[:_MAX_SAID_CHARS]
            wait_s = retry_after_s(reply.headers.get("Retry-After"), datetime.datetime.now(datetime.UTC))
            raise JudgeRequestError(f"status_{reply.status}", said, status=reply.status, retry_after_s=wait_s)
        return _completion_text(bytes(data))

    def _body(self, response: Response, task: Task, max_chars: int) -> dict[str, Any]:
        config = self._config
        try:
            messages = judge_text.judge_messages(self._template, config.system_prompt, task, response.answer, max_chars)
        except ValueError as e:
            raise VerifierError(str(e)) from e
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        return body | ({"response_format": judge_text.schema(config)} if self._asks_for_schema else {})


def _is_about_schema(error: JudgeRequestError) -> bool:
    return error.status in _FORMAT_STATUSES and any(word in error.said for word in _FORMAT_WORDS)


def retry_after_s(value: str | None, now: datetime.datetime) -> float:
    """Returns the pause of a Retry-After header (number or date), in seconds; 0 if it is neither."""
    if not value:
        return 0.0
    if value.strip().isdecimal():
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=datetime.UTC)
    return max(0.0, (until - now).total_seconds())


def _completion_text(data: bytes) -> str:
    try:
        choices = json.loads(data)["choices"]
        content, finish = choices[0]["message"]["content"], choices[0].get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as e:
        raise JudgeParseError("no_completion", f"expected a chat completion as reply, got {data[:80]!r}") from e
    if finish == "length":
        raise JudgeParseError("cut_off", "the answer was truncated at judge.max_tokens")
    if not isinstance(content, str):
        raise JudgeParseError("no_text", f"expected text in the answer, got {type(content).__name__}")
    return content
