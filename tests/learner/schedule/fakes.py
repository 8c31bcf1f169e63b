"""Stand-ins at the schedule's edges: problems that are numbers, a timeline that remembers its marks, a store in which
nobody waits."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Task
from bridge.store.open import SqliteStore
from bridge.store.store_types import Mark, Topic
from learner.data.problem import Problem


class RestlessStore(SqliteStore):
    """The test's actors act whenever the learner looks, so there is nothing to wait for."""

    def wait(self, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        del mark, topics, timeout_s


class Beats:
    """A store of heartbeats whose clock stands at 1000."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.num_reads = 0

    def now_s(self) -> float:
        return 1000.0

    def heartbeats(self) -> list[Heartbeat]:
        self.num_reads += 1
        return self.beats


class Problems:
    """Problem n has the prompt [n, ...]; where the stream stands is a number."""

    def __init__(self, num_prompt_tokens: int = 1) -> None:
        self.next = 0
        self._num_prompt_tokens = num_prompt_tokens
        self.observed: list[tuple[str, float]] = []

    def __call__(self) -> Problem:
        self.next += 1
        number = str(self.next - 1)
        tokens = np.full(self._num_prompt_tokens, self.next - 1, np.int32)
        return Problem(number, tokens, Task.judged_by("exact", answer=number))

    def __next__(self) -> Problem:
        return self()

    def observe(self, source: str, reward: float) -> None:
        self.observed.append((source, reward))

    def metrics(self) -> dict[str, float]:
        return {}

    def get_state(self) -> dict[str, Any]:
        return {"next": self.next}

    def set_state(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Sourced(Problems):
    """Problem n is of source `s{n}`."""

    def __call__(self) -> Problem:
        problem = super().__call__()
        return dataclasses.replace(problem, source=f"s{problem.question}")


class Marks:
    """A timeline that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        """Its instants."""
        self.spans: list[tuple[str, float, float]] = []

    def took(self, name: str, start_s: float, end_s: float) -> None:
        self.spans.append((name, start_s, end_s))

    def instant(self, name: str, **fields: Any) -> None:
        self.seen.append((name, fields))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The fields of each mark of that name."""
        return [fields for seen, fields in self.seen if seen == name]
