import asyncio
import contextlib
import socket

import pytest

from bridge.snapshots.remote.connection_guard import ConnectionGuard, FailedTokens
from tests.bridge.snapshots.served import Clock


def test_failed_tokens_ten_at_once_then_one_a_second():
    clock = Clock()
    failed = FailedTokens(clock=clock)
    for _ in range(10):
        assert not failed.is_limited("10.0.0.1")
        failed.add("10.0.0.1")
    assert failed.is_limited("10.0.0.1") and not failed.is_limited("10.0.0.2")
    allowed = 0
    for _ in range(100):
        clock.now_s += 0.1
        if not failed.is_limited("10.0.0.1"):
            failed.add("10.0.0.1")
            allowed += 1
    assert allowed == 10
    clock.now_s += 100.0
    assert not failed.is_limited("10.0.0.1")


def test_failed_tokens_of_many_addresses_take_bounded_memory_and_one_ipv6_host_is_one():
    failed = FailedTokens(clock=Clock())
    for i in range(5000):
        failed.add(f"10.0.{i // 250}.{i % 250}")
    assert len(failed) == 1024
    for i in range(20):
        failed.add(f"2001:db8::{i:x}")
    assert failed.is_limited("2001:db8::ffff%eth0") and not failed.is_limited("2001:db8:0:1::1")
    assert len(failed) == 1024


class Echo(asyncio.Protocol):
    def __init__(self, door: list[ConnectionGuard]) -> None:
        self.door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data == b"token":
            self.door[0].prove(self.transport)
        self.transport.write(data)


async def connect(address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address)


async def say(pair: tuple[asyncio.StreamReader, asyncio.StreamWriter], word: bytes) -> bytes:
    reader, writer = pair
    writer.write(word)
    return await reader.read(100)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


@contextlib.asynccontextmanager
async def opened(**kwargs):
    """The address and the guard of a server that is closed at the end."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    door: list[ConnectionGuard] = []
    door.append(ConnectionGuard(listener, lambda: Echo(door), tls=None, **kwargs))
    task = asyncio.create_task(door[0].run())
    try:
        async with asyncio.timeout(30):
            yield listener.getsockname(), door[0]
    finally:
        task.cancel()
        await asyncio.wait({task})
        listener.close()


async def test_connections_beyond_the_bound_push_out_the_oldest_that_showed_nothing():
    async with opened(max_connections=4) as (address, door):
        known = await connect(address)
        assert await say(known, b"token") == b"token"
        idle = []
        for _ in range(6):
            idle.append(await connect(address))
            assert await say(idle[-1], b"x") == b"x"
        assert door.num_connections == 4
        for reader, _ in idle[:3]:
            assert await is_closed(reader)
        for pair in (known, *idle[3:]):
            assert await say(pair, b"y") == b"y"


async def test_connection_that_shows_no_token_in_time_is_closed_and_one_that_did_stays():
    async with opened(prove_s=0.2) as (address, door):
        known, idle = await connect(address), await connect(address)
        assert await say(known, b"token") == b"token"
        assert await is_closed(idle[0])
        assert await say(known, b"y") == b"y"


async def test_full_of_known_connections_the_next_is_refused_until_one_leaves():
    async with opened(max_connections=3) as (address, door):
        known = [await connect(address) for _ in range(3)]
        for pair in known:
            assert await say(pair, b"token") == b"token"
        late, _ = await connect(address)
        assert await is_closed(late)
        known[0][1].close()
        assert await say(known[1], b"y") == b"y"
        while True:  # until the server has noticed
            reader, writer = await connect(address)
            try:
                if await say((reader, writer), b"x") == b"x":
                    break
            except ConnectionResetError:
                continue


@pytest.mark.parametrize("num", [1000])
async def test_a_thousand_idle_connections_leave_a_known_one_and_a_new_one_served(num):
    async with opened(max_connections=256) as (address, door):
        known = await connect(address)
        assert await say(known, b"token") == b"token"
        idle = [socket.create_connection(address) for _ in range(num)]
        new = await connect(address)
        assert await say(known, b"y") == b"y"
        assert await say(new, b"z") == b"z"
        assert door.num_connections <= 256
        for one in idle:
            one.close()
