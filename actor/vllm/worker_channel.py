"""Channel from the front end to the engine's workers that does not wait for a step.

vLLM passes calls to its workers between two steps, which take seconds with long prompts. Work that needs no pause must
not wait for them. So one thread per worker reads requests from a Unix socket and answers each when done. The socket is
in a folder private to this user, removed once all workers are connected; no port is opened.

    request: number, lengths (>QII), path, manifest        answer: number, length (>QI), rejection reason; empty: done
"""

import contextlib
import pathlib
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable

_REQUEST, _ANSWER = struct.Struct(">QII"), struct.Struct(">QI")
_CONNECT_S = 60.0
Handler = Callable[[int, str, bytes], None]
"""Worker's request handler: request number, snapshot path, encoded `WeightManifest`."""


class WorkerChannelLostError(RuntimeError):
    """A worker has exited or closed its connection."""


class WorkerChannel:
    """Front-end side; its calls block."""

    def __init__(self) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
        self.address = str(self._folder / "control")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen()
        self._workers: list[_WorkerConnection] = []
        self.last_request = 0
        """Number of the last request, from 1. Answers to earlier requests that timed out may still arrive."""
        self._asking = threading.Lock()

    def connect(self, num_workers: int) -> None:
        """Waits until all workers are connected; raises WorkerChannelLostError after _CONNECT_S."""
        self._listening.settimeout(_CONNECT_S)
        try:
            while len(self._workers) < num_workers:
                self._workers.append(_WorkerConnection(self._listening.accept()[0]))
        except TimeoutError as e:
            raise WorkerChannelLostError(
                f"{len(self._workers)} of {num_workers} workers connected within {_CONNECT_S} s"
            ) from e
        finally:
            self._stop_listening()

    def ask(self, path: str, manifest: bytes, *, timeout_s: float) -> list[str]:
        """Sends a request (snapshot, encoded `WeightManifest`) to all workers and returns their answers.

        `timeout_s` is for all workers together; 0 accepts only answers that have arrived. Raises TimeoutError if a
        worker did not read the request or answer in time: its late answer is never taken for another, and it reads an
        unsent request first. Raises WorkerChannelLostError if a worker has exited.
        """
        where = path.encode()
        deadline = time.monotonic() + timeout_s
        with self._asking:
            self.last_request += 1
            message = _REQUEST.pack(self.last_request, len(where), len(manifest)) + where + manifest
            try:
                for worker in self._workers:
                    worker.send(message, deadline)
                return [worker.answer(self.last_request, deadline) for worker in self._workers]
            except (TimeoutError, BlockingIOError) as e:
                raise TimeoutError(f"a worker has not answered within {timeout_s} s") from e
            except OSError as e:
                raise WorkerChannelLostError(f"a worker exited: {e}") from e

    def close(self) -> None:
        """Stops the workers' threads and wakes pending callers."""
        self._stop_listening()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)
        with self._asking:  # pending callers have been woken
            for worker in self._workers:
                worker.connection.close()

    def _stop_listening(self) -> None:
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _WorkerConnection:
    """Connection to a worker; a message that a timeout interrupted, in either direction, continues later."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unsent = memoryview(b"")
        self._unread = bytearray()

    def send(self, message: bytes, deadline: float) -> None:
        """Sends a message after the rest of the previous one; if the rest times out, this message is never sent."""
        self._finish(deadline)
        self._unsent = memoryview(message)
        self._finish(deadline)

    def _finish(self, deadline: float) -> None:
        while self._unsent:
            _limit(self.connection, deadline)
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def answer(self, number: int, deadline: float) -> str:
        """Returns the answer to a request; skips answers to earlier ones."""
        while True:
            _fill(self._unread, _ANSWER.size, self.connection, deadline)
            found, length = _ANSWER.unpack_from(self._unread)
            end = _ANSWER.size + length
            _fill(self._unread, end, self.connection, deadline)
            said = self._unread[_ANSWER.size : end].decode()
            del self._unread[:end]
            if found == number:
                return said


def listen(address: str, handle: Handler) -> socket.socket:
    """Starts the worker's thread, which passes each request to `handle` until either side closes; returns the socket.

    An exception of `handle` is the answer. Raises OSError if the front end does not listen at `address`.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    threading.Thread(target=_serve, args=(connection, handle), name="control", daemon=True).start()
    return connection


def _serve(connection: socket.socket, handle: Handler) -> None:
    with contextlib.suppress(OSError), connection:
        while True:
            number, *lengths = _REQUEST.unpack(_read(connection, _REQUEST.size))
            path, manifest = (_read(connection, length) for length in lengths)
            try:
                handle(number, path.decode(), manifest)
                said = b""
            except Exception as e:
                said = (str(e) or type(e).__name__).encode()
            connection.sendall(_ANSWER.pack(number, len(said)) + said)


def _read(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    _fill(found, length, connection)
    return bytes(found)


def _fill(found: bytearray, length: int, connection: socket.socket, deadline: float | None = None) -> None:
    """Reads until `found` has `length` bytes; on timeout keeps what it read."""
    while len(found) < length:
        _limit(connection, deadline)
        some = connection.recv(min(length - len(found), 2**20))
        if not some:
            raise ConnectionResetError("the other side has closed")
        found += some


def _limit(connection: socket.socket, deadline: float | None) -> None:
    """Sets the timeout of the next call; after the deadline the call does not block."""
    connection.settimeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
