"""The adaptive timeout of a test case (RollPacker, section 4.3), and the correct runs that it is made of."""

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

MAX_KNOWN_CASES = 2**17
"""Test cases whose anchors an actor keeps in memory, of all tasks; a few megabytes."""
TASKS_AT_ONCE = 256
"""Tasks that the store is asked about, or told of, in one call."""
_ROUNDING = 0.01
"""By what part a run must be longer than the longest known before the store is told."""
_ROUNDING_S = 0.001
"""And by how much: the store has milliseconds."""


def timeout_s(anchor_s: float | None, *, factor: float, min_s: float, max_s: float) -> float:
    """T = min(max(T_min, lambda T_anchor), T_max) (RollPacker, section 4.3), in seconds; T_max without an anchor.

    Args:
      anchor_s: the longest correct run of the test case so far; None if there was none.
      factor: lambda.
      min_s: T_min.
      max_s: T_max.

    Raises:
      ValueError: lambda is below 1, which would refuse the anchor itself, or not 0 < T_min <= T_max.
    """
    if not (1 <= factor < math.inf and 0 < min_s <= max_s < math.inf):
        raise ValueError(
            f"want a finite factor >= 1 and 0 < min_s <= max_s, got factor={factor} min_s={min_s} max_s={max_s}"
        )
    if anchor_s is None:
        return max_s
    return min(max(min_s, factor * anchor_s), max_s)


def task_key(task: Task) -> str:
    """What a task's anchors are kept by: 32 hex digits of what makes its test cases what they are.

    The same in every process and every run: a BLAKE3 hash of the names of its verifiers, its answer and its metadata.
    What the verifiers' scores count, and their order, changes no test case.
    """
    named = msgspec.msgpack.encode([sorted(part.name for part in task.rewards), task.answer, task.metadata])
    return blake3.blake3(named).hexdigest(length=16)


class AdaptiveTimeouts:
    """T_anchor of the tasks that an actor serves: what all actors know, as far as this one has heard.

    One event loop's. The store is asked and told beside it, one call at a time; nobody waits for it but `close`. A
    store that is away delays nothing: timeouts are made of what is known, and what was to be written is written later.
    """

    def __init__(
        self, store: ActorStore, *, factor: float, min_s: float, max_s: float, max_known_cases: int = MAX_KNOWN_CASES
    ) -> None:
        """Knows nothing yet; `factor`, `min_s` and `max_s` are those of `timeout_s`.

        Raises:
          ValueError: as `timeout_s`.
        """
        timeout_s(None, factor=factor, min_s=min_s, max_s=max_s)
        self._store, self._factor, self._min_s, self._max_s = store, factor, min_s, max_s
        self._max_known_cases = max_known_cases
        self._known: collections.OrderedDict[str, tuple[float, ...]] = collections.OrderedDict()
        """By task, what was used last at the end."""
        self._num_known_cases = 0
        self._asked: dict[str, None] = {}
        """Tasks that the store is to be asked about, in order."""
        self._raises: dict[str, tuple[float, ...]] = {}
        """What the store is to be told."""
        self._calls: asyncio.Task[None] | None = None
        """Asks and tells, as long as there is something."""

    def begin(self, key: str) -> None:
        """A group of this task begins: the store is asked what other actors found, for the runs that come.

        Only of a task whose verifier times test cases: then a run without such pays nothing.

        Raises:
          Exception: what the store refused an earlier call with, if it was more than being away.
        """
        self._asked[key] = None
        while len(self._asked) > self._max_known_cases:
            del self._asked[next(iter(self._asked))]
        self._call_on()

    def timeouts_s(self, key: str) -> tuple[float, ...]:
        """Seconds by test case of a task, as far as an anchor is known; all others have T_max."""
        if key in self._known:
            self._known.move_to_end(key)
        return tuple(
            timeout_s(anchor_s, factor=self._factor, min_s=self._min_s, max_s=self._max_s)
            for anchor_s in self._known.get(key, ())
        )

    def passed(self, key: str, case_s: Sequence[float]) -> None:
        """A correct response's run took so long, in seconds by test case: those of no other may raise an anchor.

        Raises:
          ValueError: a time that is none.
          Exception: as `begin`.
        """
        if any(not 0 <= s < math.inf for s in case_s):
            raise ValueError(f"task {key}: the times of test cases are finite and >= 0, got {list(case_s)[:20]}")
        run = tuple(min(s, MAX_CASE_S) for s in case_s[:MAX_CASES])
        if not _raises(self._known.get(key, ()), run):
            return
        self._learn(key, run)
        self._raises[key] = _maximum(self._raises.get(key, ()), run)
        self._call_on()

    async def close(self) -> None:
        """Returns when the store has been told everything.

        Raises:
          TimeoutError: it could not be reached; how many tasks it was not told of is in the log.
          Exception: as `begin`.
        """
        self._asked.clear()
        try:
            self._call_on()
            while self._calls is not None:
                await asyncio.shield(self._calls)  # given up by our caller, it goes on: what it has is written
                self._calls = None
                self._call_on()
        except Exception as e:
            logging.error("anchors not written num_tasks=%d: %s", len(self._raises), e)
            raise

    def _call_on(self) -> None:
        """Has the store asked and told; what an earlier call failed with is raised, unless the store was only away."""
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
            logging.log_every_n_seconds(logging.WARNING, "anchors wait for the store: %s", 60, e)
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
            del self._asked[key]  # now: a group that begins while the store answers asks again
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
    """Whether a run is longer than what is known by more than noise, in some test case."""
    return len(run) > len(known) or any(
        s > (1 + _ROUNDING) * anchor_s + _ROUNDING_S for s, anchor_s in zip(run, known, strict=False)
    )


def _maximum(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    """By test case; the longer one's last cases stay as they are."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return (*(max(pair) for pair in zip(longer, shorter, strict=False)), *longer[len(shorter) :])
