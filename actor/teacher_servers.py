"""Logprobs of sampled tokens by teachers on vLLM servers, for on-policy distillation (`distillation.distilled`).

A server computes them in one prefill of prompt and response (`prompt_logprobs`).
"""

import asyncio
import dataclasses
import json
import math
import random
from collections.abc import Mapping
from typing import Any

import aiohttp
import numpy as np
import tokenizers
from absl import logging
from jaxtyping import Float32, Int32

from actor.engine_protocol import Sample
from actor.rewards.verifier_pool import VerifierError
from actor.rewards.verifiers.judge import RETRIED_STATUSES
from bridge.rollout_types import Ticket
from configs.schema import Config

CONCURRENCY = 32
"""Concurrent requests of an actor to each server; the server has a queue of its own."""
TIMEOUT_S = 120.0
"""Timeout of a request, in seconds."""
RETRY_S, CHECK_RETRY_S = 600.0, 20.0
"""Time to retry from the first failure of a request on, of a run and of the check before it, in seconds."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Upper bounds of the random delay before the first retry, which doubles with each, and before any, in seconds."""
MAX_ERROR_CHARS = 200
"""Characters of a server's reply in an error."""
MIN_LOGPROB, MAX_LOGPROB = -9999.0, 1e-3
"""Bounds of valid logprobs, in nats. vLLM sends -9999 instead of minus infinity."""
PROBE_TEXT = 'The 3 teachers said: "x = 4 - 10.5"\n\n\tétude, 漢字 and 🙂 <think> are {tokens}.'
"""Text whose tokens must be equal in the tokenizers of the policy and of a teacher."""


class UnreachableTeacherError(VerifierError):
    """A server was unreachable or overloaded for the whole time of the retries."""


class TeacherServers:
    """Client of the run's teachers on servers; without any it asks nothing."""

    def __init__(self, urls: Mapping[str, tuple[str, str]], *, retry_s: float = RETRY_S) -> None:
        """`urls` has config field and base URL by the teacher's name (`LossConfig.teacher_urls`).

        A request to a server that is unreachable or overloaded is retried for `retry_s` seconds.
        """
        self._urls, self._retry_s = dict(urls), retry_s
        self._slots = {name: asyncio.Semaphore(CONCURRENCY) for name in urls}
        self._session: aiohttp.ClientSession | None = None

    async def score(self, ticket: Ticket, sample: Sample) -> Sample:
        """Returns a sample of a training ticket with its teacher's logprobs; unchanged if no server has the teacher.

        Raises VerifierError if the server did not answer, or its answer has no logprobs of the tokens.
        """
        if ticket.kind != "train" or ticket.task.teacher not in self._urls:
            return sample
        logprobs = await self._logprobs(ticket.task.teacher, ticket.prompt_tokens, sample.tokens)
        return dataclasses.replace(sample, teacher_logprobs=logprobs)

    async def close(self) -> None:
        """Closes the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def check(self, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> None:
        """Checks that each server can score the policy's tokens, at most `max_tokens` per prompt and response.

        Raises TimeoutError if a server is unreachable or overloaded, and ValueError if it tokenizes otherwise, has too
        short a context, or gives no logprobs.
        """
        added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
        text = "".join([PROBE_TEXT, *added])
        own = tokenizer.encode(text, add_special_tokens=False).ids
        for name, (field, url) in self._urls.items():
            try:
                reply = await self._request(name, "/tokenize", {"prompt": text, "add_special_tokens": False})
                if reply.get("tokens") != own:
                    raise ValueError(
                        f"{field}={url}: expected the policy's tokenizer, but the server tokenizes a test text "
                        "otherwise. Serve a model with the same tokenizer"
                    )
                longest = reply.get("max_model_len")
                if not isinstance(longest, int) or longest <= max_tokens:
                    raise ValueError(
                        f"{field}={url}: expected a server with --max-model-len above model.max_tokens "
                        f"({max_tokens}), got {longest}"
                    )
                tokens = np.array(own[:max_tokens], np.int32)
                await self._logprobs(name, tokens[:1], tokens[1:])
            except UnreachableTeacherError as e:
                raise TimeoutError(f"{e}. Start the server before the run, with: vllm serve FOLDER") from e
            except VerifierError as e:
                raise ValueError(str(e)) from e

    async def _logprobs(
        self, name: str, prompt: Int32[np.ndarray, " P"], response: Int32[np.ndarray, " T"]
    ) -> Float32[np.ndarray, " T"]:
        field, url = self._urls[name]
        tokens = [*prompt.tolist(), *response.tolist()]
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        reply = await self._request(name, "/v1/completions", body)
        try:
            (choice,) = reply["choices"]
            rows = choice["prompt_logprobs"][prompt.size :]
            found = np.array([row[str(t)]["logprob"] for row, t in zip(rows, response.tolist(), strict=True)], float)
        except (KeyError, TypeError, ValueError) as e:
            raise VerifierError(f"{field}={url}: expected prompt_logprobs of vLLM in the answer: {e!r}") from e
        if not np.all((found > MIN_LOGPROB) & (found <= MAX_LOGPROB)):
            raise VerifierError(
                f"{field}={url}: expected logprobs in nats, got values from {found.min():g} to {found.max():g}; serve "
                "the teacher with --logprobs-mode=raw_logprobs"
            )
        return found.astype(np.float32)

    async def _request(self, name: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts a request to a server and returns its JSON reply, retrying while it is unreachable or overloaded."""
        field, base = self._urls[name]
        url = base.rstrip("/").removesuffix("/v1") + path
        clock_s = asyncio.get_running_loop().time
        end_s, delay_s = math.inf, FIRST_BACKOFF_S
        while True:
            try:
                async with self._slots[name]:
                    status, text = await self._post(url, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as e:
                status, text = None, f"{type(e).__name__}: {e}"
            if status == 200:
                return _object(text, where=f"{field}={base}")
            problem = text[:MAX_ERROR_CHARS] if status is None else f"status {status}: {text[:MAX_ERROR_CHARS]}"
            if status is not None and status < 500 and status not in RETRIED_STATUSES:
                raise VerifierError(f"{field}={base}: {problem}")
            end_s = min(end_s, clock_s() + self._retry_s)  # from the first failure on
            if clock_s() >= end_s:
                raise UnreachableTeacherError(f"{field}={base}: {problem} (retried for {self._retry_s:g} s)")
            logging.log_every_n_seconds(logging.WARNING, "teacher failed, retrying %s=%s: %s", 60, field, base, problem)
            await asyncio.sleep(random.uniform(0, delay_s))
            delay_s = min(2 * delay_s, MAX_BACKOFF_S)

    async def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the semaphores are the limit
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        # A redirect would send the response to another host.
        async with self._session.post(url, json=body, allow_redirects=False) as reply:
            return reply.status, (await reply.read()).decode(errors="replace")


def _object(text: str, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise VerifierError(f"{where}: expected a JSON object as answer, got {text[:MAX_ERROR_CHARS]!r}")
    return value


def check_teacher_servers(config: Config, tokenizer: tokenizers.Tokenizer) -> None:
    """Checks the run's teachers on servers, before its engine starts; raises as `TeacherServers.check`."""

    async def check() -> None:
        servers = TeacherServers(config.loss.teacher_urls, retry_s=CHECK_RETRY_S)
        try:
            await servers.check(tokenizer, config.model.max_tokens)
        finally:
            await servers.close()

    asyncio.run(check())
