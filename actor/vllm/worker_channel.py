"""A way from the front end to the engine's processes that does not wait for a step.

vLLM hands a call to its workers between two steps, which take seconds where long prompts are under way: what needs no
standstill must not go that way. So each worker has one thread that reads requests from a Unix socket (in a folder of
this user's alone, gone as soon as all have connected; no port is opened) and answers each when it is done.

    request: number, lengths (>QII), path, manifest        answer: number, length (>QI), why it was refused; empty: done
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
"""What a worker does of a request: its number, the snapshot's path, its `WeightManifest`, encoded."""


class WorkerChannelLostError(RuntimeError):
    """A worker has ended, or does not listen any more."""


class WorkerChannel:
    """The front end's side; its calls block."""

    def __init__(self) -> None:
        """Listens at `address`."""
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
        self.address = str(self._folder / "control")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen()
        self._workers: list[_WorkerConnection] = []
        self.last_request = 0
        """The number of the last one, from 1; those whose answers were not waited for may still be on their way."""
        self._asking = threading.Lock()

    def connect(self, num_workers: int) -> None:
        """Waits until all workers are there.

        Raises:
          WorkerChannelLostError: they did not come.
        """
        self._listening.settimeout(_CONNECT_S)
        try:
            while len(self._workers) < num_workers:
                self._workers.append(_WorkerConnection(self._listening.accept()[0]))
        except TimeoutError as e:
            raise WorkerChannelLostError(
                f"{len(self._workers)} of {num_workers} workers came within {_CONNECT_S} s"
            ) from e
        finally:
            self._stop_listening()

    def ask(self, path: str, manifest: bytes, *, timeout_s: float) -> list[str]:
        """What each worker answers.

        Args:
          path: of the snapshot.
          manifest: its `WeightManifest`, encoded.
          timeout_s: for all of them together; with 0 only what is there already is an answer in time.

        Raises:
          TimeoutError: one has not read the request or not answered in time; what it still says is not taken for
            another answer, and what it has not read yet it reads first.
          WorkerChannelLostError: one has ended.
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
                raise WorkerChannelLostError(f"a worker is gone: {e}") from e

    def close(self) -> None:
        """Ends the workers' threads, and whoever waits for an answer."""
        self._stop_listening()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)
        with self._asking:  # whoever asks has been woken
            for worker in self._workers:
                worker.connection.close()

    def _stop_listening(self) -> None:
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _WorkerConnection:
    """The connection to a worker; a message that a deadline has cut, either way, goes on where it ended."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unsent = memoryview(b"")
        self._unread = bytearray()

    def send(self, message: bytes, deadline: float) -> None:
        """Sends a message, after the rest of the one before; if that takes too long, nothing of this one is ever sent.

        Raises:
          TimeoutError, BlockingIOError: it is not sent yet.
        """
        self._finish(deadline)
        self._unsent = memoryview(message)
        self._finish(deadline)

    def _finish(self, deadline: float) -> None:
        while self._unsent:
            _limit(self.connection, deadline)
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def answer(self, number: int, deadline: float) -> str:
        """The answer to a request; those to earlier ones are passed over.

        Raises:
          TimeoutError, BlockingIOError: it is not there yet.
        """
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
    """A worker's side: a thread of its own passes each request on, until the front end or the socket is closed.

    What `handle` raises is the answer. Returns the socket.

    Raises:
      OSError: nobody listens at `address`.
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
    """Reads on until so many bytes were found; what was is kept where it takes too long."""
    while len(found) < length:
        _limit(connection, deadline)
        some = connection.recv(min(length - len(found), 2**20))
        if not some:
            raise ConnectionResetError("the other side has closed")
        found += some


def _limit(connection: socket.socket, deadline: float | None) -> None:
    """Bounds the next call; past the deadline it takes what is there and does not wait."""
    connection.settimeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
