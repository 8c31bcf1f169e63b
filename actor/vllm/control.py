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
from collections.abc import Callable

_REQUEST, _ANSWER = struct.Struct(">QII"), struct.Struct(">QI")
_CONNECT_S = 60.0


class ControlLostError(RuntimeError):
    """A worker has ended, or does not listen any more."""


class Control:
    """The front end's side; its calls block."""

    def __init__(self) -> None:
        """Listens at `address`."""
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
        self.address = str(self._folder / "control")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen()
        self._workers: list[socket.socket] = []
        self._number = 0
        self._asking = threading.Lock()

    def connect(self, num_workers: int) -> None:
        """Waits until all workers are there.

        Raises:
          ControlLostError: they did not come.
        """
        self._listening.settimeout(_CONNECT_S)
        try:
            while len(self._workers) < num_workers:
                self._workers.append(self._listening.accept()[0])
        except TimeoutError as e:
            raise ControlLostError(f"{len(self._workers)} of {num_workers} workers came within {_CONNECT_S} s") from e
        finally:
            self._stop_listening()

    def ask(self, path: str, manifest: bytes, *, timeout_s: float) -> list[str]:
        """What each worker answers.

        Raises:
          TimeoutError: one has not answered in time; what it still says is not taken for another answer.
          ControlLostError: one has ended.
        """
        where = path.encode()
        with self._asking:
            self._number += 1
            message = _REQUEST.pack(self._number, len(where), len(manifest)) + where + manifest
            try:
                for worker in self._workers:
                    worker.settimeout(timeout_s)
                    worker.sendall(message)
                return [self._answer(worker) for worker in self._workers]
            except TimeoutError:
                raise
            except OSError as e:
                raise ControlLostError(f"a worker is gone: {e}") from e

    def _answer(self, worker: socket.socket) -> str:
        while True:
            number, length = _ANSWER.unpack(_read(worker, _ANSWER.size))
            said = _read(worker, length).decode()
            if number == self._number:
                return said

    def close(self) -> None:
        """Ends the workers' threads, and whoever waits for an answer."""
        self._stop_listening()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.shutdown(socket.SHUT_RDWR)
        with self._asking:  # whoever asks has been woken
            for worker in self._workers:
                worker.close()

    def _stop_listening(self) -> None:
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def listen(address: str, handle: Callable[[str, bytes], None]) -> socket.socket:
    """A worker's side: a thread of its own passes each request on, until the front end or the socket is closed.

    What `handle` raises is the answer. Returns the socket.

    Raises:
      OSError: nobody listens at `address`.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    threading.Thread(target=_serve, args=(connection, handle), name="control", daemon=True).start()
    return connection


def _serve(connection: socket.socket, handle: Callable[[str, bytes], None]) -> None:
    with contextlib.suppress(OSError), connection:
        while True:
            number, *lengths = _REQUEST.unpack(_read(connection, _REQUEST.size))
            path, manifest = (_read(connection, length) for length in lengths)
            try:
                handle(path.decode(), manifest)
                said = b""
            except Exception as e:
                said = (str(e) or type(e).__name__).encode()
            connection.sendall(_ANSWER.pack(number, len(said)) + said)


def _read(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        some = connection.recv(min(length - len(found), 2**20))
        if not some:
            raise ConnectionResetError("the other side has closed")
        found += some
    return bytes(found)
