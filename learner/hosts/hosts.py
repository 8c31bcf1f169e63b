"""What the learner's processes know of each other, and how they tell each other small things, each with a deadline.

Process 0 leads: it alone reads the store and decides. What it decides goes to the others over a channel, in order; data
as large as a batch never does: a packed one is spread over the devices (`learner.update.spread`) once all have heard
that it comes. Channels know nothing of devices, so nobody waits in a collective for a decision.
"""

from typing import Protocol

MAX_MESSAGE_BYTES = 1 << 26
"""Of one message. Most are commands, of a few hundred bytes; a snapshot's hashes and a checkpoint's are a few MiB."""


class HostLostError(TimeoutError):
    """Another process of the learner ended, hangs, or can't be reached: all end, and start again from a checkpoint."""


class Channel(Protocol):
    """Messages in order, apart from those of other channels; one thread at a time uses it in a process.

    All processes make the same calls in the same order.
    """

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        """The leader's message, at every process.

        Args:
          message: the leader's; None elsewhere.
          timeout_s: how long the others wait for it, and then for each MiB of it. The leader waits for nobody.

        Raises:
          HostLostError: it did not come in time.
          ValueError: it is larger than MAX_MESSAGE_BYTES.
        """
        ...

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Every process's message by index at the leader, once all are there; nothing elsewhere, at once.

        Args:
          message: this process's.
          timeout_s: how long the leader waits for the last one, and then for each MiB of it.

        Raises:
          HostLostError: one did not come in time; says whose.
          ValueError: it is larger than MAX_MESSAGE_BYTES.
        """
        ...


class Hosts(Protocol):
    """The learner's processes as one of them sees them."""

    @property
    def index(self) -> int:
        """This process's, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def is_leader(self) -> bool:
        """Whether this one decides."""
        ...

    def channel(self, name: str) -> Channel:
        """The channel of that name; made once a name in every process."""
        ...

    def ask_to_stop(self) -> None:
        """Tells the leader that this process was asked to end; returns at once. More than once is fine."""
        ...

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether any process was asked to end; for the leader, which then tells all."""
        ...


class OneHost:
    """A learner of one process: it leads, and is told what it says."""

    index, count, is_leader = 0, 1, True

    def __init__(self) -> None:
        """Not asked to stop."""
        self.is_asked_to_stop = False

    def channel(self, name: str) -> "OneChannel":
        """All alike."""
        del name
        return OneChannel()

    def ask_to_stop(self) -> None:
        """Remembered."""
        self.is_asked_to_stop = True


class OneChannel:
    """From one process to itself."""

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        """The message."""
        del timeout_s
        return check_size(_own(message))

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """The message alone."""
        del timeout_s
        return [check_size(message)]


def check_size(message: bytes) -> bytes:
    """The message.

    Raises:
      ValueError: it is too large for a channel.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message between hosts has {len(message)} bytes, at most {MAX_MESSAGE_BYTES} may go")
    return message


def _own(message: bytes | None) -> bytes:
    if message is None:
        raise ValueError("the leader broadcasts a message, got None")
    return message
