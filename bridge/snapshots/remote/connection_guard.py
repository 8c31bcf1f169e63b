"""Admission of connections to a snapshot server: a bounded number, each with limited time to send the token."""

import asyncio
import collections
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable

MAX_CONNECTIONS = 1024
"""Concurrent connections per learner host for serving weights. A reader opens 4, spread over up to 4 learner hosts, or
one per host with up to 64 hosts. Each actor is a reader on Kubernetes, each actor host elsewhere."""
PROVE_S = 10.0
"""Seconds after which a connection without a valid token, or with an incomplete TLS handshake, is closed."""
_MAX_ADDRESSES = 1024
_NO_DESCRIPTORS_S = 0.1


class FailedTokens:
    """Rate limit on wrong tokens per address, in bounded memory.

    Allows a burst of ten failures and one per second after that. Tokens of an address beyond the limit are not
    compared, which bounds guessing. A misconfigured actor, whose retries become rarer, does not lock out its neighbors.
    """

    def __init__(self, *, burst: int = 10, per_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._failures: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()
        """Current number of failures per network, and the time since which it decays."""

    def is_limited(self, address: str) -> bool:
        """Returns True if tokens of this address are not compared now."""
        return self._count(_network(address)) > self._burst - 1

    def add(self, address: str) -> None:
        """Counts a failure."""
        network = _network(address)
        count = self._count(network)
        self._failures[network] = (count + 1.0, self._clock())
        self._failures.move_to_end(network)
        while len(self._failures) > _MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def __len__(self) -> int:
        return len(self._failures)

    def _count(self, network: str) -> float:
        count, since_s = self._failures.get(network, (0.0, 0.0))
        return max(0.0, count - (self._clock() - since_s) * self._per_s)


class ConnectionGuard:
    """Acceptor of connections on a listening socket, up to a maximum number.

    At the maximum, the oldest connection without a valid token is closed for a new one.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        max_connections: int = MAX_CONNECTIONS,
        prove_s: float = PROVE_S,
    ) -> None:
        """Stores the bound, listening socket; its creator must close it."""
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._max_connections, self._prove_s = max_connections, prove_s
        self._unproven: dict[asyncio.BaseTransport | asyncio.Task[None], None] = {}
        """Connections without a token and pending handshakes, oldest first."""
        self._proven: set[asyncio.BaseTransport] = set()

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._unproven) + len(self._proven)

    def prove(self, transport: asyncio.BaseTransport | None) -> None:
        """Records that a connection has sent a valid token."""
        if transport is not None and transport in self._unproven:
            del self._unproven[transport]
            self._proven.add(transport)

    async def run(self) -> None:
        """Accepts connections until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    taken, _ = await loop.sock_accept(self._listener)
                except OSError:  # no free file descriptor, or the peer disconnected
                    await asyncio.sleep(_NO_DESCRIPTORS_S)
                    continue
                if self._make_room():
                    task = loop.create_task(self._admit(taken))
                    self._unproven[task] = None
                else:
                    taken.close()
        finally:
            for connection in [*self._unproven, *self._proven]:
                self._drop(connection)

    async def _admit(self, taken: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        try:
            taken.setblocking(False)
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport, _ = await loop.connect_accepted_socket(
                self._protocol,
                taken,
                ssl=self._tls,
                ssl_handshake_timeout=self._prove_s if self._tls else None,
                ssl_shutdown_timeout=1.0 if self._tls else None,
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is an OSError
            taken.close()
            return
        finally:
            self._unproven.pop(task, None)
        self._unproven[transport] = None
        loop.call_later(self._prove_s, self._end_unproven, transport)

    def _end_unproven(self, transport: asyncio.BaseTransport) -> None:
        if transport in self._unproven:
            self._drop(transport)

    def _make_room(self) -> bool:
        if self.num_connections < self._max_connections:
            return True
        self._proven = {t for t in self._proven if not t.is_closing()}
        for connection in [c for c in self._unproven if isinstance(c, asyncio.BaseTransport) and c.is_closing()]:
            del self._unproven[connection]
        if self.num_connections < self._max_connections:
            return True
        oldest = next(iter(self._unproven), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, connection: "asyncio.BaseTransport | asyncio.Task[None]") -> None:
        self._unproven.pop(connection, None)
        if isinstance(connection, asyncio.Task):
            connection.cancel()
        else:
            self._proven.discard(connection)
            if isinstance(connection, asyncio.WriteTransport):
                connection.abort()


def _network(address: str) -> str:
    """Returns the key of an address: the IPv4 address, or the /64 network that one IPv6 host may own."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else str(parsed)
