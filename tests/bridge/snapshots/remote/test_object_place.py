import asyncio
import socket
import threading

import pytest

from bridge.object_store import open_source
from bridge.snapshots.remote.download import ObjectSource
from tests.bridge.snapshots.served import Request, ScriptedServer

DATA = bytes(range(256)) * 2**12
PART_BYTES = 2**17


@pytest.fixture
def halting():
    """A server that sends the first part of a range, and the rest when it is told to."""
    go_on = threading.Event()

    def script(request: Request, connection: socket.socket) -> None:
        head = f"206 P\r\nContent-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}\r\nContent-Length: {len(DATA)}\r\n\r\n"
        connection.sendall(f"HTTP/1.1 {head}".encode() + DATA[:PART_BYTES])
        go_on.wait(10)
        connection.sendall(DATA[PART_BYTES:])

    made = ScriptedServer(DATA, script)
    yield made, go_on
    go_on.set()
    made.close()


async def test_what_comes_slowly_is_seen_to_come(halting):
    """A megabyte may take longer than a reader waits for a sign of life."""
    server, go_on = halting
    into = bytearray(len(DATA))
    steps = ObjectSource(open_source(server.url, max_retries=0)).read("slot-0", 0, memoryview(into))
    assert await anext(steps) == 0
    async with asyncio.timeout(5):
        there = await anext(steps)
    assert 0 < there <= PART_BYTES and into[:there] == DATA[:there]
    go_on.set()
    async for num_bytes in steps:
        there += num_bytes
    assert there == len(DATA) and into == DATA
