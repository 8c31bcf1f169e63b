"""A bell that coroutines wait for, and none of them misses: each says how often it had rung when it last looked."""

import asyncio
import contextlib


class Notifier:
    """Rung by whoever hears of a change; made anywhere, waited for in one event loop."""

    def __init__(self) -> None:
        """It has not rung yet."""
        self.count = 0
        """How often it has rung. Taken before looking at what may change, so that `after` misses nothing since."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wakes all who wait."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_past(self, count: int, *, timeout_s: float) -> None:
        """Returns once it has rung more than `count` times, at the latest after `timeout_s`."""
        if self.count > count:
            return
        # Not `wait_for`: Python 3.11's can swallow the cancellation that ends its caller.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
