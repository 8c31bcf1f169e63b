"""One episode's process, forked from a zygote: answers over its socket until that ends."""

import asyncio
import contextlib
import gc
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from actor.environments import wire
from actor.environments.protocol import Environment, Step
from bridge import framing
from bridge.processes import die_with_parent


def run(make: Callable[[], Environment], link: socket.socket, *, parent: int, max_memory_bytes: int) -> None:
    """The life of a forked process; never returns."""
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()  # what it starts is killed with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
        gc.enable()
        # Python seeds its own random state after a fork; an episode that is to come again is seeded from its row.
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        _serve(make, link)
        status = 0
    finally:
        os._exit(status)  # no clean-up of the zygote's: it is the zygote's


def _serve(make: Callable[[], Environment], link: socket.socket) -> None:
    environment: Environment | None = None
    with link.makefile("rb") as source, asyncio.Runner() as runner:
        while head := source.read(framing.HEAD_BYTES):
            question = msgspec.msgpack.decode(source.read(wire.frame_length(head)), type=wire.Question)
            if isinstance(question, wire.Close):
                break
            try:
                if environment is None:
                    environment = make()
                answer = _answer(environment, question, runner)
                framed = wire.frame(answer)
            except BaseException as e:  # an environment may raise anything, SystemExit too
                framed = wire.frame(wire.Failed(error=f"{type(e).__name__}: {e}"[:10_000]))
            link.sendall(framed)
        if environment is not None:
            with contextlib.suppress(Exception):  # the episode is over, and what it says counts no more
                _settle(environment.close(), runner)


def _answer(environment: Environment, question: wire.Reset | wire.Act, runner: asyncio.Runner) -> wire.Observed:
    if isinstance(question, wire.Reset):
        messages = _settle(environment.reset(json.loads(question.row)), runner)
        roles: list[str] = [*getattr(environment, "observation_roles", ("user",))]
        plays_itself = bool(getattr(environment, "plays_itself", False))
        sees_thinking = bool(getattr(environment, "sees_thinking", False))
        return wire.Observed(
            messages=_checked(messages), roles=roles, plays_itself=plays_itself, sees_thinking=sees_thinking
        )
    step = _settle(environment.step(question.action), runner)
    if not isinstance(step, Step):
        raise TypeError(f"step must return a Step (actor/environments/protocol.py), got {type(step).__name__}")
    info = {str(name): _for_people(value) for name, value in step.info.items()}
    return wire.Observed(messages=_checked(step.messages), reward=float(step.reward), done=bool(step.done), info=info)


def _settle(returned: Any, runner: asyncio.Runner) -> Any:
    """What a plain method returned, or an asynchronous one will have."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return runner.run(wait())


def _for_people(value: Any) -> Any:
    """A value of an info, or its text where msgpack can't hold it: large integers, half characters, odd keys."""
    try:
        return msgspec.msgpack.decode(wire.encode(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return ascii(value)


def _checked(messages: Any) -> list[dict[str, str]]:
    for message in messages:
        if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise TypeError(f"a message is {{'role': text, 'content': text}}, got {message!r}")
    return list(messages)
