"""Writer of samples.jsonl: asynchronous, bounded in size, and truncated to the checkpoint on resume."""

import functools
import json
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Sequence

from absl import logging

from bridge.files import replace_file
from bridge.rollout_types import Group, Task
from configs.sections import SamplesConfig
from learner.metrics.sample_record import Decode, Json, PickedGroup, evaluated_record, trained_record

MAX_WAITING = 64
"""Maximum number of queued updates and evaluations; further ones are dropped."""
EVAL_PROBLEMS = 16
"""Maximum number of problems kept per evaluation of a set."""
CLOSE_S = 10.0
"""Maximum seconds that closing waits for the queue, and then for the thread."""


class SampleLog:
    """Log of groups as text, written by its own thread so that neither decoding nor a slow disk blocks the learner.

    Groups that cannot be written, for example because the disk is full, are dropped, with one log line for the first.
    """

    def __init__(self, file: pathlib.Path, config: SamplesConfig, decode: Decode, *, restored_step: int) -> None:
        """Opens the file and removes records of steps after `restored_step`."""
        self._path, self._decode = file, decode
        self._max_bytes = int(config.max_mib * 2**20)
        self.num_lost = 0
        """Groups that were not written."""
        self._cut_back(restored_step)
        self._jobs: queue.Queue[list[Callable[[], Json]] | None] = queue.Queue(MAX_WAITING)
        """Queue of functions that create the records of groups; None stops the thread."""
        self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
        self._thread.start()

    def trained(self, step: int, groups: Sequence[PickedGroup]) -> None:
        """Queues groups that trained in the update to `step`; does not block."""
        record = functools.partial(trained_record, step=step, decode=self._decode)
        self._hand_over([functools.partial(record, group) for group in groups])

    def evaluated(self, step: int, set_name: str, groups: Sequence[tuple[Group, Task]]) -> None:
        """Queues the groups of an evaluation on the weights of `step`; does not block.

        Keeps the first `EVAL_PROBLEMS` groups. Groups come in the order of their problems, so the same problems
        are kept each time.
        """
        record = functools.partial(evaluated_record, set_name=set_name, step=step, decode=self._decode)
        self._hand_over([functools.partial(record, *group) for group in groups[:EVAL_PROBLEMS]])

    def close(self) -> None:
        """Writes the queued groups, within `CLOSE_S` for each wait."""
        try:
            self._jobs.put(None, timeout=CLOSE_S)
        except queue.Full:
            logging.error("sample log did not drain; queued samples dropped file=%s", self._path)
            return
        self._thread.join(CLOSE_S)

    def _hand_over(self, records: list[Callable[[], Json]]) -> None:
        if not records:
            return
        try:
            self._jobs.put_nowait(records)
        except queue.Full:
            self._lose(len(records), "the write queue is full")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            lines: list[bytes] = []
            for record in job:
                try:
                    lines.append(_line(record()))
                except Exception as e:  # a sample must not stop the run
                    self._lose(1, str(e))
            try:
                self._append(b"".join(lines))
            except Exception as e:
                self._lose(len(lines), str(e))

    def _append(self, data: bytes) -> None:
        """Writes all lines in one call, or none; raises OSError if the disk rejects them."""
        # Unbuffered: a buffer would keep data of a failed write and write it on close.
        with open(self._path, "ab", buffering=0) as file:
            end, num_bytes = file.seek(0, os.SEEK_END), 0
            try:
                num_bytes = file.write(data)
            finally:
                if num_bytes != len(data):
                    file.truncate(end)
        if num_bytes != len(data):
            raise OSError(f"the disk accepted {num_bytes} of {len(data)} bytes")
        if end + len(data) > self._max_bytes:
            self._thin()

    def _thin(self) -> None:
        """Shrinks the file to half of its limit, dropping mostly old records."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        replace_file(self._path, b"".join(thinned(lines, max_bytes=self._max_bytes // 2)))

    def _cut_back(self, step: int) -> None:
        if not self._path.is_file():
            return
        kept: list[bytes] = []
        num_lines = 0
        with open(self._path, "rb") as file:
            for line in file:
                num_lines += 1
                if _about(line)[0] <= step:
                    kept.append(line)
        if len(kept) < num_lines:
            replace_file(self._path, b"".join(kept))

    def _lose(self, num_groups: int, why: str) -> None:
        if not self.num_lost:
            logging.error("samples dropped file=%s reason=%s", self._path, why)
        self.num_lost += num_groups


def thinned(lines: list[bytes], *, max_bytes: int) -> list[bytes]:
    """Returns lines of at most `max_bytes`: repeatedly drops every second line of the older half.

    The newest lines are complete and older ones increasingly sparse. Each set's first evaluation, the baseline for
    comparisons, stays complete if it takes at most half of `max_bytes`. A single line larger than the limit is dropped.
    """
    first = _first_evaluations(lines)
    num_first_bytes = sum(len(lines[i]) for i in first)
    if num_first_bytes > max_bytes // 2:
        first, num_first_bytes = set[int](), 0
    others = [i for i in range(len(lines)) if i not in first]
    while others and sum(len(lines[i]) for i in others) > max_bytes - num_first_bytes:
        half = (len(others) + 1) // 2
        others = others[:half:2] + others[half:] if half > 2 else others[half:]
    return [lines[i] for i in sorted([*first, *others])]


def _first_evaluations(lines: list[bytes]) -> set[int]:
    of_sets: dict[str, tuple[float, set[int]]] = {}
    for i, line in enumerate(lines):
        step, name = _about(line)
        if name:
            first, found = of_sets.setdefault(name, (step, set()))
            if step == first:
                found.add(i)
    return {i for _, found in of_sets.values() for i in found}


def _line(record: Json) -> bytes:
    """Returns a UTF-8 line; unpaired surrogates, which a row's answer may contain, become question marks."""
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _about(line: bytes) -> tuple[float, str]:
    """Returns the step and set of a line; an incomplete line has an infinite step."""
    try:
        record = json.loads(line)
        return record["step"], str(record.get("set", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return float("inf"), ""
