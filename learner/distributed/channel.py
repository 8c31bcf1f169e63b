"""Broadcast, gather and agree between learner processes, over JAX's coordination service.

Process 0 leads: it alone reads the store and decides. What it decides goes to the others over a channel, in order; data
as large as a batch never does: a packed one is spread over the devices (`learner.distributed.broadcast`) once all have
heard that it comes. Channels know nothing of devices, so nobody waits in a collective for a decision.

The one place that reaches for the service's client, which JAX uses itself but does not export. A message is a key that
is deleted by the last one who read it, so the leader's memory holds what is on its way alone.

A read that does not end within its wait begins anew, whatever part of the message had come. So a message that is not
small lies there in pieces before its key says how many, and each piece has the whole of the time that silence has.
"""

import threading
import time
from typing import Any, Protocol

import jax
from jax._src import distributed

from bridge.files import first_line

MAX_MESSAGE_BYTES = 1 << 26
"""Of one message. Most are commands, of a few hundred bytes; a snapshot's hashes and a checkpoint's are a few MiB."""


class ProcessLostError(TimeoutError):
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
          ProcessLostError: it did not come in time.
          ValueError: it is larger than MAX_MESSAGE_BYTES.
        """
        ...

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Every process's message by index at the leader, once all are there; nothing elsewhere, at once.

        Args:
          message: this process's.
          timeout_s: how long the leader waits for the last one, and then for each MiB of it.

        Raises:
          ProcessLostError: one did not come in time; says whose.
          ValueError: it is larger than MAX_MESSAGE_BYTES.
        """
        ...


class Processes(Protocol):
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

    def request_stop(self) -> None:
        """Tells the leader that this process was asked to end; returns at once. More than once is fine."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether any process was asked to end; for the leader, which then tells all."""
        ...


class SingleProcess:
    """A learner of one process: it leads, and is told what it says."""

    index, count, is_leader = 0, 1, True

    def __init__(self) -> None:
        """Not asked to stop."""
        self.stop_requested = False

    def channel(self, name: str) -> "SingleChannel":
        """All alike."""
        del name
        return SingleChannel()

    def request_stop(self) -> None:
        """Remembered."""
        self.stop_requested = True


class SingleChannel:
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


_PREFIX = "sluice"
_SLICE_S = 1.0
"""A wait is made of pieces of this length, so that a process that is asked to end is never deaf for longer."""
_SMALL_BYTES = 1 << 16
"""Of a message that its key holds itself: also on a busy machine it is read within a slice."""
_PIECE_BYTES = 1 << 20
_PIECE_S = 600.0
"""At most, of one piece."""
_WHOLE, _IN_PIECES = b"w", b"p"
"""How the value of a message's key begins: then comes the message, or the number of pieces."""
_TIMED_OUT = "DEADLINE_EXCEEDED"
_NOT_FOUND = "NOT_FOUND"


class JaxProcesses:
    """All processes of `jax.distributed`; it is initialised already."""

    def __init__(self) -> None:
        """Knows who it is.

        Raises:
          RuntimeError: `jax.distributed` is not initialised.
        """
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError("jax.distributed is not initialised; see learner.distributed.initialize")
        self._client = client
        self.index, self.count = jax.process_index(), jax.process_count()
        self.is_leader = self.index == 0

    def channel(self, name: str) -> "ServiceChannel":
        """The channel of that name; a second one of the same name would mix their messages."""
        return ServiceChannel(self._client, name, index=self.index, count=self.count)

    def request_stop(self) -> None:
        """Leaves a note at the leader; one that is gone needs none."""
        try:
            self._client.key_value_set(f"{_PREFIX}/stop", str(self.index), allow_overwrite=True)
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLostError(f"the learner's process 0 can't be reached: {first_line(e)}") from e

    @property
    def stop_requested(self) -> bool:
        """Whether there is such a note."""
        try:
            self._client.key_value_try_get(f"{_PREFIX}/stop")
        except jax.errors.JaxRuntimeError as e:
            if _NOT_FOUND in str(e):
                return False
            raise ProcessLostError(f"the learner's processes can't be reached: {first_line(e)}") from e
        return True


class ServiceChannel:
    """See `Channel`."""

    def __init__(self, client: Any, name: str, *, index: int, count: int) -> None:
        """Nothing was said yet."""
        self._client, self._index, self._count = client, index, count
        self._prefix = f"{_PREFIX}/channel/{name}"
        self._num_broadcasts = self._num_gathers = 0

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        """See `Channel`; the last of the others to read it deletes it."""
        key, self._num_broadcasts = f"{self._prefix}/to/{self._num_broadcasts}", self._num_broadcasts + 1
        if self._index == 0:
            if message is None:
                raise ValueError("the leader broadcasts a message, got None")
            self._set(f"{key}/message", message)
            return message
        got = self._get(f"{key}/message", "process 0", timeout_s)
        try:
            if self._client.key_value_increment(f"{key}/readers", 1) == self._count - 1:
                self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLostError(f"the learner's process 0 can't be reached: {first_line(e)}") from e
        return got

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """See `Channel`; the leader deletes what it has read."""
        key, self._num_gathers = f"{self._prefix}/from/{self._num_gathers}", self._num_gathers + 1
        if self._index != 0:
            self._set(f"{key}/{self._index}", message)
            return []
        end_s = time.monotonic() + timeout_s
        others = [
            self._get(f"{key}/{i}", f"process {i}", timeout_s, wait_s=max(0.0, end_s - time.monotonic()))
            for i in range(1, self._count)
        ]
        self._client.key_value_delete(key)
        return [check_size(message), *others]

    def _set(self, key: str, message: bytes) -> None:
        check_size(message)
        value = _WHOLE + message
        pieces = range(0, len(message), _PIECE_BYTES)
        try:
            if len(message) > _SMALL_BYTES:
                for i, start in enumerate(pieces):
                    self._client.key_value_set_bytes(f"{key}/{i}", message[start : start + _PIECE_BYTES])
                value = _IN_PIECES + b"%d" % len(pieces)
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLostError(f"the learner's processes can't be reached: {first_line(e)}") from e

    def _get(self, key: str, whose: str, timeout_s: float, *, wait_s: float | None = None) -> bytes:
        """The message, once it is there; `timeout_s` is how long a piece may take, and what it waits if not told."""
        end_s = time.monotonic() + (timeout_s if wait_s is None else wait_s)
        value = None
        while value is None:
            left_s = end_s - time.monotonic()
            value = self._read(key, whose, min(left_s, _SLICE_S))
            if value is None and left_s <= _SLICE_S:
                raise ProcessLostError(f"the learner's {whose} said nothing for {timeout_s:.0f} s")
        if value[:1] == _WHOLE:
            return value[1:]
        return b"".join(self._piece(f"{key}/{i}", whose, min(timeout_s, _PIECE_S)) for i in range(int(value[1:])))

    def _piece(self, key: str, whose: str, timeout_s: float) -> bytes:
        piece = self._read(key, whose, timeout_s)
        if piece is None:
            raise ProcessLostError(f"the learner's {whose} said half of it, and no more for {timeout_s:.0f} s")
        return piece

    def _read(self, key: str, whose: str, wait_s: float) -> bytes | None:
        """What the key holds; None if it was not here in time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, round(max(0.001, wait_s) * 1000))
        except jax.errors.JaxRuntimeError as e:
            if _TIMED_OUT in str(e):
                return None
            raise ProcessLostError(f"the learner's {whose} can't be reached: {first_line(e)}") from e


_OVER = "over"


class BarrierBrokenError(RuntimeError):
    """Hosts came to different places: one of them failed on the way, and says why elsewhere."""


class Barrier:
    """A barrier of several places, which all come to in the same order; over for good once they don't.

    A host that fails skips a place, and comes to the next one, or ends the meeting: the others, who wait where it never
    comes to, hear of it then, not when their time is up. Used by one thread at a time in a process; `end` by any.
    """

    def __init__(self, hosts: Processes, channel: Channel, *, timeout_s: float) -> None:
        """Nobody came yet.

        Args:
          hosts: the learner's processes; each makes its own, at the same time.
          channel: of the meetings alone, one after the other.
          timeout_s: how long a host waits for the others.
        """
        self._is_leader, self._channel, self._timeout_s = hosts.is_leader, channel, timeout_s
        self._lock = threading.Lock()
        self._is_over = False

    def wait(self, place: str) -> None:
        """Returns when all hosts are at that place.

        Raises:
          BarrierBrokenError: a host is elsewhere, or was before.
          ProcessLostError: a host did not come.
        """
        with self._lock:
            if not self._is_over:
                self._is_over = not self._are_all_at(place)
            if self._is_over:
                raise BarrierBrokenError("another of the learner's processes failed")

    def end(self) -> None:
        """Nobody waits any more: all hosts call it once one has failed, whatever their other threads still do.

        Raises:
          ProcessLostError: a host did not come.
        """
        with self._lock:
            if not self._is_over:
                self._are_all_at(_OVER)
                self._is_over = True

    def _are_all_at(self, place: str) -> bool:
        places = self._channel.gather(place.encode(), timeout_s=self._timeout_s)
        said = b"%d" % (len(set(places)) == 1) if self._is_leader else None
        return self._channel.broadcast(said, timeout_s=self._timeout_s) == b"1"
