"""Broadcast, gather and barrier between learner processes, over JAX's coordination service.

Process 0 leads: it alone reads the store and decides. Its decisions reach the others over an ordered channel. Packed
batches are too large for a channel and use `learner.distributed.sharding`, once every process has received the
announcement. Channels do not use devices, so no process waits in a collective for a decision.

Only this module calls the service's client, which JAX does not export (`initialize` takes it). A message is a key,
and its last reader deletes it, so the leader's memory holds only messages in transit.

A read that times out restarts from the first byte. Large messages are therefore stored in pieces before their key, and
each piece has its own full timeout.
"""

import threading
import time
from typing import Any

import jax

from bridge.files import first_line

MAX_MESSAGE_BYTES = 1 << 26
"""Maximum size of a message. Most are commands of a few hundred bytes; hashes of a snapshot or checkpoint are a few
MiB."""


class ProcessLostError(TimeoutError):
    """Another learner process exited, hangs or is unreachable: all exit and restart from a checkpoint."""


def _check_size(message: bytes) -> None:
    """Raises ValueError if the message is too large for a channel."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message between hosts: expected at most {MAX_MESSAGE_BYTES} bytes, got {len(message)}")


_PREFIX = "sluice"
_SLICE_S = 1.0
"""Maximum length of one blocking wait, so that a process reacts to a stop request within that time."""
_SMALL_BYTES = 1 << 16
"""Maximum size of a message that its key holds directly; a busy machine still reads it within a slice."""
_PIECE_BYTES = 1 << 20
_PIECE_S = 600.0
"""Maximum timeout of one piece, in seconds."""
_WHOLE, _IN_PIECES = b"w", b"p"
"""First byte of a value: the message follows, or the number of its pieces."""
_TIMED_OUT = "DEADLINE_EXCEEDED"
_NOT_FOUND = "NOT_FOUND"


class Processes:
    """Learner processes, as seen from one of them: all of `jax.distributed`, or without its client this one alone."""

    def __init__(self, client: Any, *, index: int, count: int) -> None:
        if client is None and count > 1:
            raise RuntimeError("jax.distributed is not initialised; see learner.distributed.initialize")
        self._client, self.index, self.count = client, index, count
        self.is_leader = index == 0
        self._stop_requested = False

    def channel(self, name: str) -> "Channel":
        """Returns a new channel; a second one of the same name would mix their messages."""
        return Channel(self._client, name, index=self.index, count=self.count)

    def request_stop(self) -> None:
        """Notifies the leader that this process received a stop request; does not block, and may be repeated.

        Raises ProcessLostError if the leader is unreachable.
        """
        if self._client is None:
            self._stop_requested = True
            return
        try:
            self._client.key_value_set(f"{_PREFIX}/stop", str(self.index), allow_overwrite=True)
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLostError(f"the learner's process 0 is unreachable: {first_line(e)}") from e

    @property
    def stop_requested(self) -> bool:
        """True if any process received a stop request; read by the leader, which then notifies all."""
        if self._client is None:
            return self._stop_requested
        try:
            self._client.key_value_try_get(f"{_PREFIX}/stop")
        except jax.errors.JaxRuntimeError as e:
            if _NOT_FOUND in str(e):
                return False
            raise ProcessLostError(f"the learner's processes are unreachable: {first_line(e)}") from e
        return True


class SingleProcess(Processes):
    """Learner of a single process, which leads itself."""

    def __init__(self) -> None:
        super().__init__(None, index=0, count=1)


class Channel:
    """Ordered messages, independent of other channels; one thread per process uses it at a time.

    All processes make the same calls in the same order.
    """

    def __init__(self, client: Any, name: str, *, index: int, count: int) -> None:
        self._client, self._index, self._count = client, index, count
        self._prefix = f"{_PREFIX}/channel/{name}"
        self._num_broadcasts = self._num_gathers = 0

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        """Returns the leader's message in every process; others pass None, and the leader does not wait.

        `timeout_s` limits the message, and each MiB of a large one. Raises ProcessLostError if it did not arrive in
        time, and ValueError if it is larger than MAX_MESSAGE_BYTES.
        """
        key, self._num_broadcasts = f"{self._prefix}/to/{self._num_broadcasts}", self._num_broadcasts + 1
        if self._index == 0:
            if message is None:
                raise ValueError("the leader must broadcast a message, got None")
            _check_size(message)
            if self._count > 1:
                self._set(f"{key}/message", message)
            return message
        got = self._get(f"{key}/message", "process 0", timeout_s)
        try:
            if self._client.key_value_increment(f"{key}/readers", 1) == self._count - 1:
                self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLostError(f"the learner's process 0 is unreachable: {first_line(e)}") from e
        return got

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Returns all processes' messages by index at the leader; returns [] immediately elsewhere.

        `timeout_s` limits the last message, and each MiB of a large one. Raises ProcessLostError, which names the
        process, if a message did not arrive in time, and ValueError if one is larger than MAX_MESSAGE_BYTES.
        """
        key, self._num_gathers = f"{self._prefix}/from/{self._num_gathers}", self._num_gathers + 1
        _check_size(message)
        if self._index != 0:
            self._set(f"{key}/{self._index}", message)
            return []
        end_s = time.monotonic() + timeout_s
        others = [
            self._get(f"{key}/{i}", f"process {i}", timeout_s, wait_s=max(0.0, end_s - time.monotonic()))
            for i in range(1, self._count)
        ]
        if others:
            self._client.key_value_delete(key)
        return [message, *others]

    def _set(self, key: str, message: bytes) -> None:
        value = _WHOLE + message
        pieces = range(0, len(message), _PIECE_BYTES)
        try:
            if len(message) > _SMALL_BYTES:
                for i, start in enumerate(pieces):
                    self._client.key_value_set_bytes(f"{key}/{i}", message[start : start + _PIECE_BYTES])
                value = _IN_PIECES + b"%d" % len(pieces)
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLostError(f"the learner's processes are unreachable: {first_line(e)}") from e

    def _get(self, key: str, whose: str, timeout_s: float, *, wait_s: float | None = None) -> bytes:
        """Waits for a message: `wait_s` (default `timeout_s`) for its key, `timeout_s` for each piece."""
        end_s = time.monotonic() + (timeout_s if wait_s is None else wait_s)
        value = None
        while value is None:
            left_s = end_s - time.monotonic()
            value = self._read(key, whose, min(left_s, _SLICE_S))
            if value is None and left_s <= _SLICE_S:
                raise ProcessLostError(f"the learner's {whose} sent no message for {timeout_s:.0f} s")
        if value[:1] == _WHOLE:
            return value[1:]
        return b"".join(self._piece(f"{key}/{i}", whose, min(timeout_s, _PIECE_S)) for i in range(int(value[1:])))

    def _piece(self, key: str, whose: str, timeout_s: float) -> bytes:
        piece = self._read(key, whose, timeout_s)
        if piece is None:
            raise ProcessLostError(f"the learner's {whose} sent part of a message, then nothing for {timeout_s:.0f} s")
        return piece

    def _read(self, key: str, whose: str, wait_s: float) -> bytes | None:
        try:
            return self._client.blocking_key_value_get_bytes(key, round(max(0.001, wait_s) * 1000))
        except jax.errors.JaxRuntimeError as e:
            if _TIMED_OUT in str(e):
                return None
            raise ProcessLostError(f"the learner's {whose} is unreachable: {first_line(e)}") from e


_OVER = "over"


class BarrierBrokenError(RuntimeError):
    """Processes reached different barriers: one of them failed and reports the cause elsewhere."""


class Barrier:
    """Sequence of named barriers that all processes reach in the same order; broken permanently once they do not.

    A process that fails skips a barrier and reaches the next one, or calls `end`. Processes that wait at the skipped
    barrier then fail immediately instead of timing out. `wait` is for one thread per process; any thread may call
    `end`.
    """

    def __init__(self, hosts: Processes, channel: Channel, *, timeout_s: float) -> None:
        """Creates a barrier; all processes do so at the same point. Only the barrier uses `channel`."""
        self._is_leader, self._channel, self._timeout_s = hosts.is_leader, channel, timeout_s
        self._lock = threading.Lock()
        self._is_over = False

    def wait(self, place: str) -> None:
        """Returns when all processes are at that place.

        Raises BarrierBrokenError if a process is, or was, at another place, and ProcessLostError if one did not arrive
        in time.
        """
        with self._lock:
            if not self._is_over:
                self._is_over = not self._are_all_at(place)
            if self._is_over:
                raise BarrierBrokenError("another of the learner's processes failed")

    def end(self) -> None:
        """Breaks the barrier permanently, or raises ProcessLostError. All processes call it after a failure."""
        with self._lock:
            if not self._is_over:
                self._are_all_at(_OVER)
                self._is_over = True

    def _are_all_at(self, place: str) -> bool:
        places = self._channel.gather(place.encode(), timeout_s=self._timeout_s)
        said = b"%d" % (len(set(places)) == 1) if self._is_leader else None
        return self._channel.broadcast(said, timeout_s=self._timeout_s) == b"1"
