"""Logprobs of sampled tokens by teachers on vLLM servers, for on-policy distillation (`losses.distilled`).

A server computes them in one prefill of prompt and response (`prompt_logprobs`).
"""

import asyncio
import dataclasses
import json
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
TIMEOUT_S = 600.0
"""Timeout of a request, in seconds."""
RETRY_S, CHECK_RETRY_S = 600.0, 20.0
"""Time to retry a request of a run, and of the check before it, in seconds."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Upper bounds of the random delay before the first retry, which doubles with each, and before any, in seconds."""
MAX_SAID_CHARS = 200
"""Characters of a server's reply in an error."""
PROBE_TEXT = 'The 3 teachers said: "x = 4 - 10.5"\n\n\tétude, 漢字 and 🙂 <think> are {tokens}.'
"""Text whose tokens must be equal in the tokenizers of the policy and of a teacher."""


class TeacherServers:
    """Client of the run's teachers on servers; without any it asks nothing."""

    def __init__(self, urls: Mapping[str, tuple[str, str]], *, retry_s: float = RETRY_S) -> None:
        """Connects to nothing yet.

        Args:
          urls: config field and base URL by the teacher's name (`LossConfig.teacher_urls`).
          retry_s: time to retry a request to a server that is unreachable or overloaded, in seconds.
        """
        self._urls, self._retry_s = dict(urls), retry_s
        self._places = {name: asyncio.Semaphore(CONCURRENCY) for name in urls}
        self._session: aiohttp.ClientSession | None = None

    async def score(self, ticket: Ticket, sample: Sample) -> Sample:
        """Returns a sample of a training ticket with its teacher's logprobs; unchanged if no server has the teacher.

        Raises:
          VerifierError: the server did not answer, or its answer has no logprobs of the tokens.
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
        """Checks that each server can score the policy's tokens.

        Args:
          tokenizer: tokenizer of the policy.
          max_tokens: most tokens of a prompt and response (`model.max_tokens`).

        Raises:
          ValueError: a server does not answer, tokenizes otherwise, or has too short a context.
        """
        own = tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids
        for name, (field, url) in self._urls.items():
            try:
                told = await self._ask(name, "/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False})
            except VerifierError as e:
                raise ValueError(f"{e}. Start the server before the run, with: vllm serve FOLDER") from e
            if told.get("tokens") != own:
                raise ValueError(
                    f"{field}={url}: expected the policy's tokenizer, but the server tokenizes a test text otherwise. "
                    "Serve a model with the same tokenizer"
                )
            if (longest := told.get("max_model_len", 0)) <= max_tokens:
                raise ValueError(
                    f"{field}={url}: expected a server with --max-model-len above model.max_tokens ({max_tokens}), got "
                    f"{longest}"
                )

    async def _logprobs(
        self, name: str, prompt: Int32[np.ndarray, " P"], response: Int32[np.ndarray, " T"]
    ) -> Float32[np.ndarray, " T"]:
        tokens = [*prompt.tolist(), *response.tolist()]
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        told = await self._ask(name, "/v1/completions", body)
        try:
            (choice,) = told["choices"]
            rows = choice["prompt_logprobs"][prompt.size :]
            found = np.array([row[str(t)]["logprob"] for row, t in zip(rows, response.tolist(), strict=True)], float)
        except (KeyError, TypeError, ValueError) as e:
            raise VerifierError(f"{self._urls[name][0]}: expected prompt_logprobs of vLLM in the answer: {e!r}") from e
        if not np.all(np.isfinite(found)):
            raise VerifierError(f"{self._urls[name][0]}: expected finite logprobs, got {found[~np.isfinite(found)][0]}")
        return found.astype(np.float32)

    async def _ask(self, name: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts a request to a server and returns its JSON reply, retrying while it is unreachable or overloaded."""
        field, base = self._urls[name]
        url = base.rstrip("/").removesuffix("/v1") + path
        loop = asyncio.get_running_loop()
        end_s, delay_s = loop.time() + self._retry_s, FIRST_BACKOFF_S
        while True:
            try:
                async with self._places[name]:
                    status, said = await self._post(url, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as e:
                status, said = None, f"{type(e).__name__}: {e}"
            if status == 200:
                return _object(said, where=f"{field}={base}")
            may_pass = status is None or status in RETRIED_STATUSES or status >= 500
            if not may_pass or loop.time() >= end_s:
                tried = f" (retried for {self._retry_s:g} s)" if may_pass else ""
                raise VerifierError(f"{field}={base}: status {status}: {said[:MAX_SAID_CHARS]}{tried}")
            logging.log_every_n_seconds(logging.WARNING, "teacher failed, retrying %s: %s", 60, field, said)
            await asyncio.sleep(random.uniform(0, delay_s))
            delay_s = min(2 * delay_s, MAX_BACKOFF_S)

    async def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), cookie_jar=aiohttp.DummyCookieJar()
            )
        # A redirect would send the response to another host.
        async with self._session.post(url, json=body, allow_redirects=False) as reply:
            return reply.status, await reply.text()


def _object(text: str, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise VerifierError(f"{where}: expected a JSON object as answer, got {text[:MAX_SAID_CHARS]!r}")
    return value


def check_teacher_servers(config: Config, tokenizer: tokenizers.Tokenizer) -> None:
    """Checks the run's teachers on servers before its engine starts (`TeacherServers.check`).

    Raises:
      ValueError: a server cannot be used.
    """

    async def check() -> None:
        servers = TeacherServers(config.loss.teacher_urls, retry_s=CHECK_RETRY_S)
        try:
            await servers.check(tokenizer, config.model.max_tokens)
        finally:
            await servers.close()

    asyncio.run(check())
