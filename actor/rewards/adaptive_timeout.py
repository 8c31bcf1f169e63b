"""Adaptive timeout per test case (RollPacker, section 4.3), and its anchors from correct runs."""

import asyncio
import collections
import math
from collections.abc import Sequence

import blake3
import msgspec
from absl import logging

from bridge.rollout_types import Task
from bridge.store.sql.actor_side import ActorStore
from bridge.store.store_types import MAX_CASE_S, MAX_CASES
from configs.sections import RewardsConfig

MAX_KNOWN_CASES = 2**17
"""Maximum test cases, over all tasks, whose anchors an actor keeps in memory (a few megabytes)."""
TASKS_AT_ONCE = 256
_ROUNDING = 0.01
"""Relative increase over the longest known run above which a run is reported to the store."""
_ROUNDING_S = 0.001
"""Absolute increase required in addition, in seconds; the store's resolution is 1 ms."""


def timeout_s(anchor_s: float | None, *, factor: float, min_s: float, max_s: float) -> float:
    """Returns T = min(max(T_min, lambda T_anchor), T_max) (RollPacker, section 4.3), in seconds; `factor` is lambda.

    T_anchor is the longest correct run of the test case; None gives T_max. Raises ValueError if lambda < 1, which would
    reject the anchor itself, or not 0 < T_min <= T_max.
    """
    if not (1 <= factor < math.inf and 0 < min_s <= max_s < math.inf):
        raise ValueError(
            f"expected a finite factor >= 1 and 0 < min_s <= max_s, got factor={factor} min_s={min_s} max_s={max_s}"
        )
    if anchor_s is None:
        return max_s
    return min(max(min_s, factor * anchor_s), max_s)


def task_key(task: Task) -> str:
    """Returns the key of a task's anchors, a BLAKE3 hash of what identifies its test cases, equal in all runs.

    Weights and order of the verifiers do not affect test cases.
    """
    named = msgspec.msgpack.encode([sorted(part.name for part in task.rewards), task.answer, task.metadata])
    return blake3.blake3(named).hexdigest(length=16)


class AdaptiveTimeouts:
    """T_anchor of an actor's tasks, shared with all actors through the store.

    Use it in one event loop. Store calls run concurrently, one at a time, and only `close` waits for them. An
    unreachable store delays nothing: timeouts use known anchors, and unwritten anchors are written later.
    """

    def __init__(
        self, store: ActorStore, *, factor: float, min_s: float, max_s: float, max_known_cases: int = MAX_KNOWN_CASES
    ) -> None:
        """`factor`, `min_s` and `max_s`: see `timeout_s`, whose ValueError it raises."""
        timeout_s(None, factor=factor, min_s=min_s, max_s=max_s)
        self._store, self._factor, self._min_s, self._max_s = store, factor, min_s, max_s
        self._max_known_cases = max_known_cases
        self._known: collections.OrderedDict[str, tuple[float, ...]] = collections.OrderedDict()
        """Anchors per task, least recently used first."""
        self._num_known_cases = 0
        self._asked: dict[str, None] = {}
        """Tasks to query in the store, in FIFO order."""
        self._raises: dict[str, tuple[float, ...]] = {}
        self._calls: asyncio.Task[None] | None = None

    @classmethod
    def of_config(cls, store: ActorStore, settings: RewardsConfig) -> "AdaptiveTimeouts":
        """Returns the timeouts of a run's test cases."""
        return cls(store, factor=settings.timeout_factor, min_s=settings.min_timeout_s, max_s=settings.max_timeout_s)

    def begin(self, key: str) -> None:
        """Queries other actors' anchors for a task whose group begins. Call it only for tasks with timed test cases.

        It raises the failure of an earlier store call, other than a timeout.
        """
        self._asked[key] = None
        while len(self._asked) > self._max_known_cases:
            del self._asked[next(iter(self._asked))]
        self._call_on()

    def timeouts_s(self, key: str) -> tuple[float, ...]:
        """Returns the timeouts in seconds of the task's test cases with known anchors; all later ones have T_max."""
        if key in self._known:
            self._known.move_to_end(key)
        return tuple(
            timeout_s(anchor_s, factor=self._factor, min_s=self._min_s, max_s=self._max_s)
            for anchor_s in self._known.get(key, ())
        )

    def allows(self, key: str, case_s: Sequence[float]) -> bool:
        """Returns True if the last of these test cases took less time than its current timeout."""
        index, timeouts_s = len(case_s) - 1, self.timeouts_s(key)
        return index >= 0 and case_s[index] < (timeouts_s[index] if index < len(timeouts_s) else self._max_s)

    def passed(self, key: str, case_s: Sequence[float]) -> None:
        """Records the seconds per test case of a correct response; only correct responses may raise an anchor.

        Raises ValueError if a time is negative or not finite, and errors as `begin` does.
        """
        if any(not 0 <= s < math.inf for s in case_s):
            raise ValueError(f"task {key}: times of test cases must be finite and >= 0, got {list(case_s)[:20]}")
        run = tuple(min(s, MAX_CASE_S) for s in case_s[:MAX_CASES])
        if not _raises(self._known.get(key, ()), run):
            return
        self._learn(key, run)
        self._raises[key] = _maximum(self._raises.get(key, ()), run)
        self._call_on()

    async def close(self) -> None:
        """Waits until all anchors are written to the store. Raises TimeoutError if it was unreachable."""
        self._asked.clear()
        try:
            self._call_on()
            while self._calls is not None:
                await asyncio.shield(self._calls)  # continues if the caller is cancelled, so that anchors are written
                self._calls = None
                self._call_on()
        except Exception as e:
            logging.error("anchors not written num_tasks=%d: %s", len(self._raises), e)
            raise

    def _call_on(self) -> None:
        """Starts the store calls; raises the failure of an earlier call unless it was a timeout."""
        if self._calls is not None:
            if not self._calls.done():
                return
            calls, self._calls = self._calls, None
            error = None if calls.cancelled() else calls.exception()
            if error is not None and not isinstance(error, TimeoutError):
                raise error
        if self._asked or self._raises:
            self._calls = asyncio.get_running_loop().create_task(self._ask_and_tell())

    async def _ask_and_tell(self) -> None:
        try:
            while self._asked or self._raises:
                if self._raises:
                    await self._tell()
                if self._asked:
                    await self._ask()
        except TimeoutError as e:
            logging.log_every_n_seconds(logging.WARNING, "store unreachable, anchors not written yet: %s", 60, e)
            raise

    async def _tell(self) -> None:
        told = {key: self._raises[key] for key in list(self._raises)[:TASKS_AT_ONCE]}
        for key in told:
            del self._raises[key]
        try:
            await asyncio.to_thread(self._store.raise_anchors, told)
        except BaseException:
            for key, run in told.items():
                self._raises[key] = _maximum(self._raises.get(key, ()), run)
            raise

    async def _ask(self) -> None:
        keys = list(self._asked)[:TASKS_AT_ONCE]
        for key in keys:
            del self._asked[key]  # delete before the call: a group that begins meanwhile queries again
        try:
            found = await asyncio.to_thread(self._store.anchors, keys)
        except BaseException:
            self._asked = dict.fromkeys(keys) | self._asked
            raise
        for key, anchors_s in found.items():
            self._learn(key, anchors_s)

    def _learn(self, key: str, run: tuple[float, ...]) -> None:
        known = self._known.pop(key, ())
        self._known[key] = _maximum(known, run)
        self._num_known_cases += len(self._known[key]) - len(known)
        while self._num_known_cases > self._max_known_cases and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._num_known_cases -= len(forgotten)


def _raises(known: Sequence[float], run: Sequence[float]) -> bool:
    """Returns True if a run exceeds the known times by more than noise in some test case."""
    return len(run) > len(known) or any(
        s > (1 + _ROUNDING) * anchor_s + _ROUNDING_S for s, anchor_s in zip(run, known, strict=False)
    )


def _maximum(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the maximum per test case; the longer tuple's extra cases are kept."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return (*(max(pair) for pair in zip(longer, shorter, strict=False)), *longer[len(shorter) :])
