"""Environments of the `verifiers` library (0.4): its tasks and rewards, its agent, our policy.

The library's training client requests each turn at the token endpoint, with the history as token ids. The row names a
custom function, `task="module:function"`. Called with the row, it returns the library's `Task`, or a pair of a `Task`
and a user function. The user function maps the messages to the next user message, or None at the end.

The library's own harnesses run a program that `uv` downloads, or a remote sandbox. `_Chat` runs in this process, so
that nothing is installed and only the endpoint is contacted. `environments.python` must point to a virtual environment
with `verifiers`, msgspec and jinja2: it requires openai < 3, which conflicts with the engine's.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  # in a virtual environment of its own
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.client import TrainClientConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.harness import Harness  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.null import NullHarnessConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes.subprocess import SubprocessConfig  # pyright: ignore[reportMissingImports]

from actor.environments.protocol import Step
from bridge.text.chat_template import Message

User = Callable[[list[Message]], str | None]
_TOKEN = "SLUICE_EPISODE_TOKEN"  # the library reads keys from the environment


class VerifiersEnvironment:
    """Task of the library, played by its agent."""

    plays_itself = True

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Creates the task."""
        module, _, name = str(row["task"]).partition(":")
        made = getattr(importlib.import_module(module), name)(row)
        self._task, self._user = made if isinstance(made, tuple) else (made, lambda _: None)
        self._model = str(row["model_folder"])
        """Model folder with the tokenizer and chat template for the library's renderer."""
        return []

    async def step(self, action: str) -> Step:
        """Plays the whole episode; the reward is the library's weighted sum."""
        address = msgspec.json.decode(action)
        os.environ[_TOKEN] = address["token"]
        client = TrainClientConfig(base_url=f"{address['url']}/v1", api_key_var=_TOKEN)
        config = NullHarnessConfig(id="null")
        agent = vf.make_agent(AgentConfig(model=self._model, client=client, harness=config, runtime=SubprocessConfig()))
        agent.harness = _Chat(config, self._user)
        trace = await agent.run(self._task)
        if trace.errors:
            raise RuntimeError("; ".join(f"{e.type}: {e.message}" for e in trace.errors))
        return Step(reward=float(trace.reward), done=True, info={"rewards": str(trace.rewards)})

    def close(self) -> None:
        """Does nothing."""


class _Chat(Harness[NullHarnessConfig]):
    """In-process harness that alternates messages until the user function returns None or a budget is used up."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: NullHarnessConfig, user: User) -> None:
        super().__init__(config)
        self._user = user

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        said: str | None = prompt
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while said is not None:
                messages.append({"role": "user", "content": said})
                try:
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                except APIStatusError as e:
                    if e.status_code == 400:  # the endpoint ended the episode and knows the reason
                        break
                    raise
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                said = self._user(messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")
