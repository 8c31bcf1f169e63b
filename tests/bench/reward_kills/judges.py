"""What judges: a verifier for the worker pool, and an environment of a few turns. Each takes a moment, to be hit in."""

import time
from collections.abc import Mapping
from typing import Any

from actor.environments.protocol import Step
from bridge.rollout_types import Task
from bridge.text.chat_template import Message
from tests.bench.reward_kills.busy import begin, busy
from tests.bench.reward_kills.truth import NUM_TURNS, WORKER, earned, turn_earned

VERIFY_S, TURN_S = 0.03, 0.15
OBSERVATION = "\n+1="


def score(response_text: str, task: Task) -> float:
    """What a response of the source `worker` earns."""
    del task
    with busy():
        time.sleep(VERIFY_S)
        return earned(WORKER, response_text)


class Turns:
    """Each turn earns by its text; there are `NUM_TURNS`."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's question says all."""
        del row
        self._file, self._turn = begin(), 0
        return []

    def step(self, action: str) -> Step:
        """One turn."""
        time.sleep(TURN_S)
        reward = turn_earned(self._turn, action)
        self._turn += 1
        return Step(messages=[{"role": "user", "content": OBSERVATION}], reward=reward, done=self._turn == NUM_TURNS)

    def close(self) -> None:
        """Works no more."""
        self._file.unlink(missing_ok=True)
