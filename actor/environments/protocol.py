"""`Environment`, `Step`, errors, environments by name."""

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from bridge.text.chat_template import Message
from configs import custom_functions


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What an action led to."""

    messages: list[Message] = []
    """What the policy sees next; not shown to it once the episode is done."""
    reward: float = 0.0
    """Of this turn."""
    done: bool = False
    info: dict[str, Any] = {}
    """For people; what msgpack can't hold (a large integer, an object) is written as text."""


class Environment(Protocol):
    """One episode. Its methods may be plain or asynchronous.

    It is made by its class without arguments, in a process of its own: it may hang, crash or block, and nothing but its
    own episode notices. What it raises is a failure of the infrastructure, by which the episode is played again; what
    the policy did wrong is said in an observation.

    A class may have `observation_roles`, the roles of its messages (default: ("user",)): whether the model's chat
    template takes them is then tried before anything is sampled. With `sees_thinking = True` an action is the whole
    turn, from what the prompt began of it, such as `<think>`.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Starts the episode that a row of prompts describes; what is to be seen besides the row's own messages.

        The same row must start the same episode: a group is compared over it.
        """
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Takes the answer of one turn: what the policy wrote outside its thinking, special tokens as text.

        The token that ended the turn is left out. The answer is empty where the turn ended within its thinking. A turn
        that a limit cut off is no action: the episode ends.
        """
        ...

    def close(self) -> None | Awaitable[None]:
        """The episode has ended; not called where the process is killed."""
        ...


class EpisodeError(RuntimeError):
    """An episode could not be played: the infrastructure's fault, never a reward."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        """With `is_final` another attempt at it would fail alike."""
        super().__init__(message)
        self.is_final = is_final


CLASSES = {
    "guess": "actor.environments.builtin.toy:Guess",
    "calculator": "actor.environments.builtin.toy:Calculator",
    "textarena": "actor.environments.builtin.textarena:TextArena",
    "verifiers": "actor.environments.builtin.verifiers_library:Verifiers",
}


OWN_ENVIRONMENT = custom_functions.Signature(
    takes=(), returns="an environment with reset, step and close", may_be_class=True
)


def may_need_own_interpreter(name: str) -> bool:
    """Whether an environment may need libraries that don't go together with the engine's (`environments.python`)."""
    return custom_functions.is_custom(name) or name == "verifiers"


def load(name: str) -> Callable[[], Environment]:
    """The class of an environment, or the user's own, named `module:Class`.

    Raises:
      ValueError: no such environment; or (in one line) why it can't be used.
    """
    if custom_functions.is_custom(name):
        made = custom_functions.load("environment", name, OWN_ENVIRONMENT)
        missing = [m for m in ("reset", "step", "close") if isinstance(made, type) and not hasattr(made, m)]
        if missing:
            raise ValueError(f"environment={name} has no {' and no '.join(missing)} (actor/environments/protocol.py)")
        return made
    if name not in CLASSES:
        raise ValueError(f"no environment {name!r}; there are {', '.join(sorted(CLASSES))}")
    module, _, attribute = CLASSES[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as e:
        raise ValueError(f"environment={name} does not import: {custom_functions.first_line(e)}") from e
