"""HTTP(S) range server of one snapshot folder.

Plain HTTP is served on loopback only. Any other address requires TLS and a token at startup. Clients without the token
get only an error. Clients with the token can read only the files of the announced version and of versions in transfer.
"""

import asyncio
import functools
import logging as stdlib_logging
import os
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from absl import logging
from aiohttp import web

from bridge.credentials import CERTIFICATE, TOKEN, TOKEN_FILE, Tls, Token
from bridge.rollout_types import Version
from bridge.snapshots.remote.connection_guard import MAX_CONNECTIONS, PROVE_S, ConnectionGuard, FailedTokens
from bridge.snapshots.remote.slot_locks import GoneError, NoSuchFileError, OpenFile, SlotLocks
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.validation import is_loopback

STALL_S = 60.0
"""Seconds per block after which a slow reader is disconnected."""
_BLOCK_BYTES = 256 * 2**10
"""Bytes per block. Encrypted blocks are copied three times, best in cache: measured 64 KiB to 4 MiB. Per GB, this takes
0.66 s of CPU, and Python's TLS in threads from mapped memory 0.6 s. AES-128 instead of AES-256 saves a tenth."""
_KEEP_ALIVE_S = 30.0
_MAX_LINE_BYTES = 4096
_SWEEP_S = 0.1
_NAME = "sluice"
_NO_LOG = stdlib_logging.Logger("sluice.serve", stdlib_logging.CRITICAL + 1)


def listen(address: str, *, scheme: str, token: Token | None, tls: Tls) -> tuple[socket.socket, ssl.SSLContext | None]:
    """Returns a listening socket at host:port (port 0 takes a free port), and its TLS context for https.

    Raises ValueError if the address is reachable by others without token and TLS, the certificate is missing or
    invalid, or the address cannot be bound.
    """
    parts = urllib.parse.urlsplit(f"//{address}")
    host, port = parts.hostname, parts.port
    if not host or port is None or scheme not in ("http", "https"):
        raise ValueError(f"publish.serve: expected http or https at HOST:PORT, got {scheme!r} at {address!r}")
    if not is_loopback(host) and (scheme != "https" or token is None):
        raise ValueError(
            f"{address} is reachable from other machines: serve snapshots by https, and with a token "
            f"({TOKEN} or {TOKEN_FILE}); got {scheme} {'without a' if token is None else 'with a'} token"
        )
    context = _context(tls) if scheme == "https" else None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as e:
        raise ValueError(f"snapshots cannot be served at {address}: {e}") from e
    if is_loopback(host) and not is_loopback(listener.getsockname()[0]):
        listener.close()
        raise ValueError(f"{host} is not this machine's loopback address, but {listener.getsockname()[0]}")
    return listener, context


def url_of(listener: socket.socket, scheme: str) -> str:
    """Returns the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class SnapshotServer:
    """Server of one snapshot folder on one listening socket."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        listener: socket.socket,
        *,
        token: Token | None,
        tls: ssl.SSLContext | None,
        reader_grace_s: float,
        slow_reader_grace_s: float = 0.0,
        stall_s: float = STALL_S,
        prove_s: float = PROVE_S,
        max_connections: int = MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stores the settings, with grace periods as in `SlotLocks`. The folder may be created later."""
        self.slots = SlotLocks(
            folder, reader_grace_s=reader_grace_s, slow_reader_grace_s=slow_reader_grace_s, clock=clock
        )
        self.failed_tokens = FailedTokens(clock=clock)
        self._listener, self._token, self._tls = listener, token, tls
        self._stall_s, self._prove_s, self._max_connections = stall_s, prove_s, max_connections
        self.door: ConnectionGuard | None = None

    async def run(self) -> None:
        """Serves until cancelled, aborts all transfers, and releases all slots."""
        app = web.Application(middlewares=[self._only_with_token], client_max_size=1)
        app.router.add_get("/v1/{run}/{version}/{file}", self._get, allow_head=False)
        app.on_response_prepare.append(_say_little)
        runner = web.AppRunner(app)
        await runner.setup()
        assert runner.server is not None
        protocol = functools.partial(
            _QuietHandler,
            runner.server,
            loop=asyncio.get_running_loop(),
            access_log=_NO_LOG,
            keepalive_timeout=_KEEP_ALIVE_S,
            lingering_time=0.0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=32,
        )
        self.door = ConnectionGuard(
            self._listener,
            protocol,
            tls=self._tls,
            max_connections=self._max_connections,
            prove_s=self._prove_s,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.door.run())
                tasks.create_task(self._sweep())
        finally:
            self.slots.close()
            self._listener.close()
            await runner.cleanup()

    async def _sweep(self) -> None:
        while True:
            try:
                self.slots.sweep()
            except SnapshotError as e:  # corrupt manifest: the learner's next one fixes it
                logging.error("snapshots not served: %s", e)
            await asyncio.sleep(_SWEEP_S)

    @web.middleware
    async def _only_with_token(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if self._token is not None:
            address = request.remote or "0.0.0.0"
            if self.failed_tokens.is_limited(address):
                return _refuse(429, {"Retry-After": "1"})
            if not self._token.is_shown_by(request.headers.get("Authorization", "")):
                self.failed_tokens.add(address)
                logging.warning("token refused address=%s", address)
                return _refuse(401)
        assert self.door is not None
        self.door.prove(request.transport)
        if request.can_read_body:
            return _refuse(400)
        return await handler(request)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        task, transport = asyncio.current_task(), request.transport
        if task is None or transport is None:
            raise ConnectionResetError

        def abort() -> None:  # only the task reads the file, so no read follows
            task.cancel()
            transport.abort()

        where = request.match_info
        try:
            version = Version.parse(where["version"])
            with self.slots.reading(where["run"], version, where["file"], abort=abort) as file:
                return await self._send(request, transport, file)
        except (NoSuchFileError, ValueError):
            return _refuse(404)
        except GoneError:
            return _refuse(410)
        except SnapshotError:
            return _refuse(503)

    async def _send(self, request: web.Request, transport: asyncio.Transport, file: OpenFile) -> web.StreamResponse:
        try:
            asked = request.http_range
            start, end, _ = asked.indices(file.num_bytes)
        except ValueError:
            return _refuse(416)
        is_part = (asked.start, asked.stop) != (None, None)
        if is_part and start >= end:
            return _refuse(416, {"Content-Range": f"bytes */{file.num_bytes}"})
        response = web.StreamResponse(status=206 if is_part else 200)
        response.content_type = "application/octet-stream"
        response.content_length = end - start
        response.headers["Accept-Ranges"] = "bytes"
        if is_part:
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.num_bytes}"
        try:
            await response.prepare(request)
            while start < end:
                block = os.pread(file.fd, min(_BLOCK_BYTES, end - start), start)
                if not block:
                    raise ConnectionResetError("the slot is shorter than it was announced")
                async with asyncio.timeout(self._stall_s):
                    await response.write(block)
                start += len(block)
            await response.write_eof()
        except OSError:  # the reader stalled or disconnected, or the file became shorter
            transport.abort()
        return response


class _QuietHandler(web.RequestHandler):
    """Connection handler that answers malformed requests with a status only and does not echo their content."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Logs the error type without the request's content, which may contain a token."""
        is_fault = exc is not None and status >= 500
        logging.warning("request refused status=%d error=%s", status, type(exc).__name__, exc_info=is_fault and exc)
        response = web.Response(status=status, headers={"Server": _NAME})
        response.force_close()
        return response


def _context(tls: Tls) -> ssl.SSLContext:
    if tls.certificate is None or tls.key is None:
        raise ValueError(f"https needs a certificate and its key: {CERTIFICATE} and SLUICE_TLS_KEY name PEM files")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as e:
        raise ValueError(f"{CERTIFICATE}={tls.certificate} and its key cannot be used: {e}") from e
    return context


def _refuse(status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, headers={"Connection": "close", **(headers or {})})


async def _say_little(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = _NAME
