"""Change event that coroutines wait for by count, so that no change is missed."""

import asyncio
import contextlib


class Notifier:
    """Counting change event; create it anywhere, notify and wait in one event loop."""

    def __init__(self) -> None:
        self.count = 0
        """Number of notifications. Read it before reading the state, so that `wait_past` misses no later change."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiters."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_past(self, count: int, *, timeout_s: float) -> None:
        """Waits until there were more than `count` notifications, or until `timeout_s` expires."""
        if self.count > count:
            return
        # Not `wait_for`: in Python 3.11 it can swallow its caller's cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
