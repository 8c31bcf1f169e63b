"""An environment that takes its time and does nothing else; how long, its row says."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from actor.environments.protocol import Step
from bridge.text.chat_template import Message

NAME = f"{__name__}:Sleeping"


class Sleeping:
    """Sleeps the row's next latency at each step; done after the last."""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Starts at once."""
        self._left = list(row["latencies_s"])
        return []

    async def step(self, action: str) -> Step:
        """Answers late, whatever it is told."""
        del action
        await asyncio.sleep(self._left.pop(0))
        return Step(messages=[{"role": "user", "content": "+"}], done=not self._left)

    def close(self) -> None:
        """Nothing is open."""
