"""Messages between the actor, a zygote and an episode's process, in msgpack.

A zygote receives packets (SOCK_SEQPACKET) with an episode's socket as ancillary data. An episode's process uses that
socket; four bytes of length (big-endian) precede each message. Answers follow the order of questions.
"""

from typing import Any

import msgspec

from bridge import processes
from bridge.text.chat_template import Message

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_PACKET_BYTES = 2**16


class Start(msgspec.Struct, frozen=True, tag=True):
    """Message to a zygote: fork a process for episode `id` on the attached socket."""

    id: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Message to a zygote: kill the process of episode `id` and its descendants; it may have exited."""

    id: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """First message from a zygote: the environment is imported, or `error` tells why not."""

    error: str = ""
    num_threads: int = 1
    """Threads of the zygote; forking with more than one is unsafe."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Message from a zygote: the process of episode `id` has exited."""

    id: int
    how: str
    """Human-readable exit: "exit 0", "signal 9"."""


ToZygote = Start | Kill
FromZygote = Ready | Ended


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Starts the episode of a row."""

    row: str
    """Row as JSON, because msgpack cannot hold integers above 64 bits."""


class Act(msgspec.Struct, frozen=True, tag=True):
    """Action of the policy."""

    action: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Request to exit gracefully; the process's exit is the answer."""


Question = Reset | Act | Close


class Observed(msgspec.Struct, frozen=True, tag=True):
    """Reply of an environment."""

    messages: list[Message]
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = {}
    roles: list[str] = []
    """Roles of its messages; set in the reply to Reset."""
    plays_itself: bool = False
    """True if one step is the whole episode; set in the reply to Reset."""
    sees_thinking: bool = False
    """True if actions are whole turns, thinking included; set in the reply to Reset."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Exception in the environment's code."""

    error: str


Answer = Observed | Failed


def encode(message: Any) -> bytes:
    """Returns a message without its length prefix; values that msgpack cannot hold become text."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def frame(message: Question | Answer) -> bytes:
    """Returns a message with its length prefix. Raises ValueError if it is too large."""
    return processes.frame(encode(message), max_bytes=MAX_MESSAGE_BYTES)


def frame_length(head: bytes) -> int:
    """Returns the message length from its four-byte prefix. Raises ValueError if it is too large."""
    return processes.frame_length(head, max_bytes=MAX_MESSAGE_BYTES)
