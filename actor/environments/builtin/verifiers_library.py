"""Environments of the `verifiers` library: its tasks and rewards, played by its agent with our policy (0.4).

The library's training client asks for each turn at our token endpoint with what was said as token ids. The row names
a function of the user's own, `task="module:function"`: called with the row it returns the library's `Task`, or a pair
of a `Task` and the answers of its user, a function from the messages so far to the next message, or None at the end.

The library's own harnesses run a program that `uv` installs from the network, or a remote sandbox; `_Chat` is one that
talks in this process, so that nothing is installed and nothing is connected to but the endpoint. Needs
`environments.python` of a virtual environment with `verifiers`, msgspec and jinja2: it wants an openai below 3, which
does not go together with the engine's.
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
    """One task of the library, played by its agent."""

    plays_itself = True

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Makes the task."""
        module, _, name = str(row["task"]).partition(":")
        made = getattr(importlib.import_module(module), name)(row)
        self._task, self._user = made if isinstance(made, tuple) else (made, lambda _: None)
        self._model = str(row["model_folder"])
        """Where the library's renderer finds the tokenizer and the chat template."""
        return []

    async def step(self, action: str) -> Step:
        """The whole episode; what its rewards give, each times its weight as the library has it."""
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
        """Nothing is held."""


class _Chat(Harness[NullHarnessConfig]):
    """Messages to and fro in this process, until the user has nothing to say or a budget is used up."""

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
                    if e.status_code == 400:  # the endpoint ended it; it knows why
                        break
                    raise
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                said = self._user(messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")
