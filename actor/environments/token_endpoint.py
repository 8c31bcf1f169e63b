"""Token endpoint on loopback for environments that play themselves: token ids in, token ids out.

It implements the part of vLLM's `/inference/v1/generate` that such environments use (`verifiers`' training client).
Each conversation has its own bearer token and is append-only: a request must begin with all earlier tokens, so that
tokens train exactly as sampled. A request with a changed (re-rendered) history is rejected.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
from aiohttp import web

from actor.engine_protocol import Sample
from actor.environments import wire
from actor.environments.protocol import EpisodeError
from actor.environments.transcript import EpisodeTurns
from bridge.rollout_types import MAX_STOP_TOKENS

MAX_REQUEST_BYTES = 32 * 2**20


_BROKEN_OFF = "the environment abandoned a turn that it had requested"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the policy for an environment."""

    url: str
    """Base URL; `{url}/inference/v1/generate` takes requests."""
    token: str
    """Token for the header `Authorization: Bearer ...`, valid for this episode only."""


class _Sampling(msgspec.Struct, frozen=True):
    """Request sampling parameters that are honored; the run sets the others (temperature, lengths)."""

    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_TOKENS)] = []


class _CompletionRequest(msgspec.Struct, frozen=True):
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    sampling_params: _Sampling = _Sampling()


class _RefusedError(Exception):
    """Answered with status 400, at which such clients end their episode."""


class Conversation:
    """Episode driven by the requests of its environment."""

    def __init__(self, turns: EpisodeTurns, *, max_turns: int) -> None:
        self._turns, self._max_turns = turns, max_turns
        self._asking = asyncio.Lock()
        self._is_truncated = False
        self._is_cut_off = False
        """True if the last turn was truncated: it is no action and receives no reward."""
        self._failure: BaseException | None = None

    async def go_on(self, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> Sample:
        """Samples the policy's next turn after `tokens`, the prompt and all later ones.

        `stop_token_ids` are added to the run's. Raises _RefusedError if the history was changed, or a budget is used
        up before or during the turn.
        """
        async with self._asking:
            turns, transcript = self._turns, self._turns.transcript
            had = transcript.request_tokens
            asked = np.asarray(tokens, np.int32)
            if not np.array_equal(asked[: had.size], had):
                size = min(asked.size, had.size)
                parting = int(np.argmax(np.append(asked[:size] != had[:size], True)))
                self._failure = EpisodeError(
                    "the environment's request differs from the history (rendered or tokenized again) or from its "
                    f"row's prompt: first difference at token {parting}",
                    is_final=True,
                )
                raise _RefusedError(str(self._failure))
            new = asked[had.size :]
            if transcript.num_turns and not new.size:
                raise _RefusedError("two turns without an observation between them")
            if transcript.num_turns >= self._max_turns or new.size >= turns.left_tokens:
                self._is_truncated = True
                raise _RefusedError(f"the episode's budget of {turns.budget_tokens} tokens or its turns are used up")
            transcript.observe(new)
            try:
                sample = await turns.take(stop_token_ids)
            except asyncio.CancelledError:  # the client disconnected, which cancels sampling
                self._failure = EpisodeError(_BROKEN_OFF)
                raise
            except BaseException as e:
                self._failure = e
                raise
            if sample.finish == "length" and turns.left_tokens <= 0:
                self._is_truncated = self._is_cut_off = True
                raise _RefusedError(f"the turn was truncated: the episode's {turns.budget_tokens} tokens are used up")
            return sample

    def end(self, step: wire.Observed) -> Sample:
        """Returns the episode, with its reward on the last turn that the environment received.

        Raises EpisodeError if no turn was sampled, the history was changed, or a turn was abandoned; see also
        `Engine.sample`.
        """
        if self._failure is not None:
            raise self._failure
        if self._asking.locked():
            raise EpisodeError(_BROKEN_OFF)
        transcript = self._turns.transcript
        if not transcript.num_turns:
            raise EpisodeError("the environment requested no turn", is_final=self._is_truncated)
        transcript.reward(step.reward, before_last=self._is_cut_off)
        return transcript.end("length" if self._is_truncated else "stop")


class TokenEndpoint:
    """HTTP server on a loopback port for any number of conversations; starts with the first one."""

    def __init__(self) -> None:
        self._conversations: dict[bytes, Conversation] = {}
        """Conversations by token hash, so that lookup time reveals nothing about tokens."""
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._url = ""

    @contextlib.asynccontextmanager
    async def serve(self, conversation: Conversation) -> AsyncIterator[Address]:
        """Serves a conversation's requests while the context lasts."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        token = secrets.token_urlsafe(32)
        key = _key(token)
        self._conversations[key] = conversation
        try:
            yield Address(url=self._url, token=token)
        finally:
            del self._conversations[key]

    async def close(self) -> None:
        """Stops the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        # A handler is cancelled with its client, so an abandoned episode samples no more.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"

    async def _generate(self, request: web.Request) -> web.Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        conversation = self._conversations.get(_key(token))
        if conversation is None:
            return web.json_response({"error": {"message": "no such conversation"}}, status=401)
        try:
            asked = msgspec.json.decode(await request.read(), type=_CompletionRequest)
            sample = await conversation.go_on(asked.token_ids, asked.sampling_params.stop_token_ids)
        except (_RefusedError, msgspec.MsgspecError) as e:
            return web.json_response({"error": {"message": str(e)}}, status=400)
        ids, logprobs = sample.tokens.tolist(), sample.logprobs.tolist()
        content = [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": sample.finish}
        return web.json_response({"request_id": "", "choices": [choice]})


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
