"""What the actor, a zygote and an episode's process say to each other: msgpack.

To a zygote by packets (SOCK_SEQPACKET), with an episode's socket as ancillary data; to an episode's process over that
socket, four bytes of length (big-endian) before each message. There is one answer to each question, in order.
"""

from typing import Any

import msgspec

from bridge import processes
from bridge.text.chat_template import Message

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_PACKET_BYTES = 2**16


class Start(msgspec.Struct, frozen=True, tag=True):
    """To a zygote: fork a process for episode `id`, on the socket that comes with this."""

    id: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """To a zygote: end the process of episode `id`, and all that it started; it may have ended."""

    id: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a zygote, first of all: the environment is imported, or why it can't be."""

    error: str = ""
    num_threads: int = 1
    """Of the zygote; forking a process of several is a risk."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From a zygote: the process of episode `id` is no more."""

    id: int
    how: str
    """For people: exit 0, signal 9."""


ToZygote = Start | Kill
FromZygote = Ready | Ended


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Start the episode of this row."""

    row: str
    """JSON, as it came: msgpack has no form for some of what that holds (an integer of more than 64 bits)."""


class Act(msgspec.Struct, frozen=True, tag=True):
    """What the policy wrote."""

    action: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """End in order; the answer is the process's end."""


Question = Reset | Act | Close


class Observed(msgspec.Struct, frozen=True, tag=True):
    """What an environment answered."""

    messages: list[Message]
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = {}
    roles: list[str] = []
    """Of its messages, with the answer to a Reset."""
    plays_itself: bool = False
    """With the answer to a Reset: its one step is the whole episode."""
    sees_thinking: bool = False
    """With the answer to a Reset: its actions are whole turns, thinking included."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The environment's own code failed."""

    error: str


Answer = Observed | Failed


def encode(message: Any) -> bytes:
    """A message without its length; values that msgpack has no form for become text."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def frame(message: Question | Answer) -> bytes:
    """A message as it is sent to or by an episode's process; raises ValueError if it is too large."""
    return processes.frame(encode(message), max_bytes=MAX_MESSAGE_BYTES)


def frame_length(head: bytes) -> int:
    """How many bytes follow these four; raises ValueError if too many."""
    return processes.frame_length(head, max_bytes=MAX_MESSAGE_BYTES)
