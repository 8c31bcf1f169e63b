"""What an environment is, and what it says."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from bridge.chat_template import Message


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
