import asyncio
import concurrent.futures
import gc
import socket
import threading

import numpy as np
import pytest

from bridge.snapshots.remote.download import BrokenError, RefusedError
from bridge.snapshots.remote.plain_http import PlainPlace
from tests.bridge.snapshots.served import TOKEN, Request, ScriptedServer

DATA = np.random.default_rng(0).integers(0, 256, 3 * 2**20 + 11, np.uint8).tobytes()


@pytest.fixture
def served():
    """Makes servers that answer as they are told."""
    made: list[ScriptedServer] = []

    def make(script=None) -> ScriptedServer:
        made.append(ScriptedServer(DATA, script))
        return made[-1]

    yield make
    for server in made:
        server.close()


def read_once(server: ScriptedServer, start: int, end: int) -> bytes:
    async def body() -> bytes:
        place = PlainPlace(server.url + "/v1", token=TOKEN)
        try:
            into = bytearray(end - start)
            async for _ in place.read("slot-0", start, memoryview(into)):
                pass
            return bytes(into)
        finally:
            place.close()

    return asyncio.run(body())


def answer(head: str, body: bytes = b""):
    def script(_: Request, connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_RDWR)

    return script


def test_ranges_are_filled_in_order_over_one_connection(served):
    server, ends = served(), []

    def remember(request: Request, connection: socket.socket) -> bytes:
        ends.append(connection.getpeername())
        return DATA[request.start : request.end]

    server.script = remember

    async def body() -> None:
        place = PlainPlace(server.url + "/v1/", token=TOKEN)
        for start, end in [(0, len(DATA)), (5, 6), (2**20, 2**20 + 100)]:
            into = bytearray(end - start)
            there = 0
            async for num_bytes in place.read("slot-0", start, memoryview(into)):
                there += num_bytes
                assert bytes(into[:there]) == DATA[start : start + there]
            assert there == end - start
        place.close()

    asyncio.run(body())
    assert len(set(ends)) == 1
    assert {(r.path, r.authorization) for r in server.requests} == {("/v1/slot-0", TOKEN.header)}


def test_server_that_closes_after_each_answer_is_connected_to_again(served):
    def closing(request: Request, connection: socket.socket) -> None:
        body = DATA[request.start : request.end]
        head = f"206 Partial Content\r\nContent-Range: bytes {request.start}-{request.end - 1}/{len(DATA)}\r\n"
        # Once it says so, once it does not.
        head += f"Content-Length: {len(body)}" + ("\r\nConnection: close" if request.number % 2 else "")
        answer(head, body)(request, connection)

    server = served(closing)

    async def body() -> None:
        place = PlainPlace(server.url + "/v1", token=TOKEN)
        for start in range(0, 5000, 1000):
            into = bytearray(1000)
            async for _ in place.read("slot-0", start, memoryview(into)):
                pass
            assert bytes(into) == DATA[start : start + 1000]
        place.close()

    asyncio.run(body())


def test_what_has_come_is_handed_over_while_the_rest_of_its_block_is_on_its_way(served):
    has_half = threading.Event()

    def in_halves(request: Request, connection: socket.socket) -> None:
        head = f"HTTP/1.1 206 P\r\nContent-Range: bytes 0-{2**20 - 1}/{len(DATA)}\r\nContent-Length: {2**20}\r\n\r\n"
        connection.sendall(head.encode() + DATA[: 2**19])
        assert has_half.wait(30)
        connection.sendall(DATA[2**19 : 2**20])

    server = served(in_halves)

    async def body() -> None:
        place = PlainPlace(server.url + "/v1", token=TOKEN)
        into = bytearray(2**20)
        there = 0
        async with asyncio.timeout(20):
            async for num_bytes in place.read("slot-0", 0, memoryview(into)):
                there += num_bytes
                if there == 2**19:
                    has_half.set()
        assert bytes(into) == DATA[: 2**20]
        place.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("head", "error", "complaint"),
    [
        ("302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0", RefusedError, "redirects elsewhere"),
        ("200 OK\r\nContent-Length: 100", RefusedError, "does not serve ranges"),
        ("206 Partial Content\r\nContent-Length: 100", BrokenError, "another range"),
        ("206 P\r\nContent-Range: bytes 1-100/1000\r\nContent-Length: 100", BrokenError, "another range"),
        ("206 P\r\nContent-Range: bytes 0-99/1000\r\nContent-Length: 99", BrokenError, "does not have the 100 bytes"),
        ("206 P\r\nContent-Range: bytes 0-99/1000", BrokenError, "does not have the 100 bytes"),
        (
            "206 P\r\nContent-Range: bytes 0-99/1000\r\nTransfer-Encoding: chunked",
            BrokenError,
            "does not have the 100 bytes",
        ),
        ("429 Too Many\r\nContent-Length: 0", BrokenError, "status 429"),
        ("206 P\r\n" + "X: y\r\n" * 200 + "Z: z", BrokenError, "no HTTP: HTTPException"),
        ("206 P\r\nX: " + "y" * 70_000, BrokenError, "no HTTP: LineTooLong"),
    ],
    ids=[
        "redirect",
        "whole file",
        "no range",
        "another range",
        "too short",
        "no length",
        "chunked",
        "too many",
        "many headers",
        "long header",
    ],
)
def test_answer_that_is_not_the_range_is_refused(served, head, error, complaint):
    with pytest.raises(error, match=complaint):
        read_once(served(answer(head, DATA[:100])), 0, 100)


def test_server_that_repeats_the_token_does_not_get_it_into_an_error(served):
    def script(request: Request, connection: socket.socket) -> None:
        connection.sendall(f"{request.authorization}\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_RDWR)

    with pytest.raises(BrokenError) as caught:
        read_once(served(script), 0, 100)
    assert TOKEN.header.removeprefix("Bearer ") not in str(caught.value)


def test_step_that_is_cancelled_has_ended_writes_nothing_more_and_is_not_logged(served, caplog):
    def half(request: Request, connection: socket.socket) -> None:
        head = f"206 P\r\nContent-Range: bytes 0-{2**20 - 1}/{len(DATA)}\r\nContent-Length: {2**20}"
        connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode() + DATA[: 2**19])
        connection.recv(1)  # until it is cut

    server = served(half)

    works = []

    class Keeping(concurrent.futures.ThreadPoolExecutor):
        """Its threads keep their work for longer than any other would."""

        def submit(self, work, /, *args, **kwargs):
            works.append(work)
            return super().submit(work, *args, **kwargs)

    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(Keeping())
        place = PlainPlace(server.url + "/v1", token=TOKEN)
        into = bytearray(2**20)
        steps = place.read("slot-0", 0, memoryview(into))
        assert await anext(steps) == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                async for _ in steps:
                    pass
        into.clear()  # refused while somebody still holds it

    async def unanswered() -> None:
        place = PlainPlace(served(lambda _, connection: connection.recv(1) and None).url, token=TOKEN)
        steps = place.read("slot-0", 0, memoryview(bytearray(10)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(steps)

    asyncio.run(body())
    asyncio.run(unanswered())
    gc.collect()  # what nobody asked a future is said when it goes
    assert not caplog.records
