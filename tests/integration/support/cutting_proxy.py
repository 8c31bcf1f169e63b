"""A proxy before a PostgreSQL server that ends a connection after a given message, in either direction."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Literal

Direction = Literal["to_server", "to_client"]


class Cut:
    """One armed cut: of the connection that next sends anything to the server."""

    def __init__(self, direction: Direction, num_messages: int, act: Callable[[], None] | None = None) -> None:
        self.direction, self.num_messages, self.act = direction, num_messages, act
        self.seen: dict[Direction, list[str]] = {"to_server": [], "to_client": []}
        """The types of messages that went through, and of the one that didn't."""
        self.happened = threading.Event()
        self.connection: object = None


class CuttingProxy:
    """Speaks just enough of the protocol to tell one message from the next; without TLS."""

    def __init__(self, backend: tuple[str, int]) -> None:
        self._backend = backend
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._cut: Cut | None = None
        self._over: set[object] = set()
        """Connections that were cut: what one thread still holds of theirs must not be taken for the next one's."""
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, direction: Direction, num_messages: int, act: Callable[[], None] | None = None) -> Cut:
        """Cuts once `num_messages` more have gone that way: both ends are closed, after `act` if there is one."""
        cut = Cut(direction, num_messages, act)
        with self._lock:
            self._cut = cut
        return cut

    def disarm(self) -> None:
        with self._lock:
            self._cut = None

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._backend)
                except OSError:
                    client.close()
                    continue
                pair = (client, server)
                for one in pair:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for direction in ("to_server", "to_client"):
                    threading.Thread(target=self._pump, args=(pair, direction), daemon=True).start()

    def _pump(self, pair: tuple[socket.socket, socket.socket], direction: Direction) -> None:
        source, to = pair if direction == "to_server" else pair[::-1]
        is_startup = direction == "to_server"
        data = b""
        with contextlib.suppress(OSError):
            while more := source.recv(2**16):
                data += more
                while (size := _message_bytes(data, is_startup=is_startup)) is not None:
                    message, data = data[:size], data[size:]
                    if not is_startup and self._ends_here(pair, direction, message):
                        return
                    is_startup = False
                    to.sendall(message)
        _end(pair)

    def _ends_here(self, pair: object, direction: Direction, message: bytes) -> bool:
        with self._lock:
            if pair in self._over:
                return True
            cut = self._cut
            # A Terminate is of a connection that was closed before the cut was armed.
            if cut is not None and cut.connection is None and direction == "to_server" and message[:1] != b"X":
                cut.connection = pair
            if cut is None or cut.connection is not pair:
                return False
            seen = cut.seen[direction]
            seen.append(chr(message[0]))
            if cut.direction != direction or len(seen) <= cut.num_messages:
                return False
            self._cut = None
            self._over.add(pair)
        if cut.act is not None:
            cut.act()
        _end(pair)  # type: ignore[arg-type]
        cut.happened.set()
        return True


def _message_bytes(data: bytes, *, is_startup: bool) -> int | None:
    """Size of the first message, its type byte included; None while it is not all there."""
    head = 0 if is_startup else 1
    if len(data) < head + 4:
        return None
    size = head + struct.unpack_from(">I", data, head)[0]
    return size if len(data) >= size else None


def _end(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # what was sent arrives, then the end
        one.close()
