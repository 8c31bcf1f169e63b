"""Hosts over the coordination service of `jax.distributed`: its key-value store, at process 0, carries the messages.

The one place that reaches for the service's client, which JAX uses itself but does not export. A message is a key that
is deleted by the last one who read it, so the leader's memory holds what is on its way alone.

A read that does not end within its wait begins anew, whatever part of the message had come. So a message that is not
small lies there in pieces before its key says how many, and each piece has the whole of the time that silence has.
"""

import time
from typing import Any

import jax
from jax._src import distributed

from bridge.files import first_line
from learner.hosts.hosts import HostLostError, check_size

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


class JaxHosts:
    """All processes of `jax.distributed`; it is initialised already."""

    def __init__(self) -> None:
        """Knows who it is.

        Raises:
          RuntimeError: `jax.distributed` is not initialised.
        """
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError("jax.distributed is not initialised; see learner.hosts.connect")
        self._client = client
        self.index, self.count = jax.process_index(), jax.process_count()
        self.is_leader = self.index == 0

    def channel(self, name: str) -> "ServiceChannel":
        """The channel of that name; a second one of the same name would mix their messages."""
        return ServiceChannel(self._client, name, index=self.index, count=self.count)

    def ask_to_stop(self) -> None:
        """Leaves a note at the leader; one that is gone needs none."""
        try:
            self._client.key_value_set(f"{_PREFIX}/stop", str(self.index), allow_overwrite=True)
        except jax.errors.JaxRuntimeError as e:
            raise HostLostError(f"the learner's process 0 can't be reached: {first_line(e)}") from e

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether there is such a note."""
        try:
            self._client.key_value_try_get(f"{_PREFIX}/stop")
        except jax.errors.JaxRuntimeError as e:
            if _NOT_FOUND in str(e):
                return False
            raise HostLostError(f"the learner's processes can't be reached: {first_line(e)}") from e
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
            raise HostLostError(f"the learner's process 0 can't be reached: {first_line(e)}") from e
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
            raise HostLostError(f"the learner's processes can't be reached: {first_line(e)}") from e

    def _get(self, key: str, whose: str, timeout_s: float, *, wait_s: float | None = None) -> bytes:
        """The message, once it is there; `timeout_s` is how long a piece may take, and what it waits if not told."""
        end_s = time.monotonic() + (timeout_s if wait_s is None else wait_s)
        value = None
        while value is None:
            left_s = end_s - time.monotonic()
            value = self._read(key, whose, min(left_s, _SLICE_S))
            if value is None and left_s <= _SLICE_S:
                raise HostLostError(f"the learner's {whose} said nothing for {timeout_s:.0f} s")
        if value[:1] == _WHOLE:
            return value[1:]
        return b"".join(self._piece(f"{key}/{i}", whose, min(timeout_s, _PIECE_S)) for i in range(int(value[1:])))

    def _piece(self, key: str, whose: str, timeout_s: float) -> bytes:
        piece = self._read(key, whose, timeout_s)
        if piece is None:
            raise HostLostError(f"the learner's {whose} said half of it, and no more for {timeout_s:.0f} s")
        return piece

    def _read(self, key: str, whose: str, wait_s: float) -> bytes | None:
        """What the key holds; None if it was not here in time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, round(max(0.001, wait_s) * 1000))
        except jax.errors.JaxRuntimeError as e:
            if _TIMED_OUT in str(e):
                return None
            raise HostLostError(f"the learner's {whose} can't be reached: {first_line(e)}") from e
