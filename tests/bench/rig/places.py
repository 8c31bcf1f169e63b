"""An engine smaller than the one that runs: the rest of its places stays empty."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncGenerator


class Places:
    """So many requests in service at once; the others wait here, the lowest priority first, as in vLLM's own queue."""

    def __init__(self, num: int) -> None:
        """All `num` are free."""
        self._num_free = num
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._entries = itertools.count()

    @contextlib.asynccontextmanager
    async def take(self, priority: int) -> AsyncGenerator[None]:
        """One of them, as long as the block takes."""
        await self._wait(priority)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, priority: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._entries), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at this very moment
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
