"""A real endpoint on loopback that behaves as a test says: one behaviour a request, the last for all after it."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]
SCORE_7 = '{"reason": "it is", "score": 7}'


@dataclasses.dataclass
class Served:
    """An endpoint, and what it was sent."""

    url: str = ""
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    headers: list[dict[str, str]] = dataclasses.field(default_factory=list)
    num_running: int = 0
    max_running: int = 0
    """Requests at once."""

    @property
    def num_requests(self) -> int:
        return len(self.bodies)


@asynccontextmanager
async def serving(*behaviours: Behaviour) -> AsyncIterator[Served]:
    served = Served()

    async def handle(request: web.Request) -> web.StreamResponse:
        served.bodies.append(await request.json())
        served.headers.append(dict(request.headers))
        behaviour = behaviours[min(served.num_requests, len(behaviours)) - 1]
        served.num_running += 1
        served.max_running = max(served.max_running, served.num_running)
        try:
            return await behaviour(request)
        finally:
            served.num_running -= 1

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    app.router.add_post("/elsewhere", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    served.url = f"http://{host}:{port}/v1"
    try:
        yield served
    finally:
        await runner.cleanup()


def says(content: Any, finish: str = "stop") -> Behaviour:
    """A whole chat completion."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": finish}]})

    return answer


def status(number: int, text: str = "", **headers: str) -> Behaviour:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=number, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def body(text: str) -> Behaviour:
    """Status 200 and whatever text."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    """The connection is cut instead of a reply."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


async def cut_in_the_middle(request: web.Request) -> web.StreamResponse:
    """Half of a reply, and then the connection is cut."""
    reply = web.StreamResponse(headers={"Content-Length": "1000"})
    await reply.prepare(request)
    await reply.write(b'{"choices": [{"mess')
    return await reset(request)


async def huge(request: web.Request) -> web.StreamResponse:
    """A body without an end."""
    reply = web.StreamResponse()
    await reply.prepare(request)
    while True:
        await reply.write(b" " * 2**16)


def after(event: asyncio.Event, then: Behaviour) -> Behaviour:
    """As `then`, once the event is set."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await event.wait()
        return await then(request)

    return answer


def score(value: Any) -> Behaviour:
    return says(json.dumps({"reason": "so it is", "score": value}))
