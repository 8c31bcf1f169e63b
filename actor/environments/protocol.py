"""`Environment` and `Step` protocol, errors, and environments by name."""

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from bridge.text.chat_template import Message
from configs import custom_functions


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an action."""

    messages: list[Message] = []
    """Messages that the policy sees next; ignored once the episode is done."""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = {}
    """Human-readable data; values that msgpack cannot hold (large integers, objects) become text."""


class Environment(Protocol):
    """Environment of one episode. Its methods may be plain or asynchronous.

    The class is called without arguments in a separate process, so a hang or crash affects only this episode. An
    exception is an infrastructure failure and restarts the episode. Report errors of the policy in an observation.

    Optional class attributes: `observation_roles`, the roles of its messages (default ("user",)), which are checked
    against the chat template before sampling. `sees_thinking = True` passes the whole turn as the action, including a
    prefilled beginning such as `<think>`.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Starts the episode of a prompt row; returns messages to show after the row's own messages.

        The same row must start the same episode, because a group compares episodes of one row.
        """
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Handles one turn's answer: text outside the thinking, without the stop token; special tokens as text.

        The answer is empty if the turn ended within its thinking. A truncated turn is no action: the episode ends.
        """
        ...

    def close(self) -> None | Awaitable[None]:
        """Releases resources after the episode; not called if the process is killed."""
        ...


class EpisodeError(RuntimeError):
    """An episode could not be played. This is an infrastructure failure and never becomes a reward."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        """`is_final`: another attempt would fail the same way."""
        super().__init__(message)
        self.is_final = is_final


CLASSES = {
    "guess": "actor.environments.builtin.toy:Guess",
    "calculator": "actor.environments.builtin.toy:Calculator",
    "textarena": "actor.environments.builtin.textarena:TextArena",
    "verifiers": "actor.environments.builtin.verifiers_library:VerifiersEnvironment",
}


OWN_ENVIRONMENT = custom_functions.Signature(
    takes=(), returns="an environment with reset, step and close", may_be_class=True
)


def may_need_own_interpreter(name: str) -> bool:
    """Returns True if an environment's libraries may conflict with the engine's (`environments.python`)."""
    return custom_functions.is_custom(name) or name == "verifiers"


def load(name: str) -> Callable[[], Environment]:
    """Returns the class of a built-in or custom environment (`module:Class`); raises ValueError if it is unusable."""
    if custom_functions.is_custom(name):
        made = custom_functions.load("environment", name, OWN_ENVIRONMENT)
        missing = [m for m in ("reset", "step", "close") if isinstance(made, type) and not hasattr(made, m)]
        if missing:
            raise ValueError(f"environment={name} has no {' and no '.join(missing)} (actor/environments/protocol.py)")
        return made
    if name not in CLASSES:
        raise ValueError(f"no environment {name!r}; expected one of {', '.join(sorted(CLASSES))}")
    module, _, attribute = CLASSES[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as e:
        raise ValueError(f"environment={name} does not import: {custom_functions.first_line(e)}") from e
