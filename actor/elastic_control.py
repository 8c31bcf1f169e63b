"""Elastic engine control: engine size file, load observation per step, `ResizeRequest`.

The actor writes the file to request another size. An operator may write it while the actor runs: the actor finishes its
groups and restarts with the new size. `actor.elastic` has the rules (RollPacker's elastic tensor parallel size).
"""

import asyncio
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import NoReturn

import msgspec
from absl import logging

from actor.background import shut_down
from actor.elastic import ElasticPolicy, StepStats
from actor.engine_protocol import EngineStats
from actor.loop import Actor
from bridge.files import replace_file
from bridge.rollout_types import Ticket, Version


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizeOverride:
    """Engine size, fixed while the engine runs (timeouts: `actor.loop.ActorLimits`)."""

    max_num_seqs: int
    tensor_parallel_size: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    max_num_seqs: int | None = None
    tensor_parallel_size: int | None = None


class EngineSizeFile:
    """Reader and writer of `limits/<actor>.json`."""

    def __init__(self, path: pathlib.Path, *, default: EngineSizeOverride, max_tensor_parallel_size: int) -> None:
        self.path = path
        self.refused_path = path.with_suffix(".refused.json")
        self._default = default
        self._max_tensor_parallel_size = max_tensor_parallel_size
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> EngineSizeOverride:
        """Returns the engine size; the default if there is no file, and for fields that the file omits.

        Raises:
          ValueError: the file is invalid; the message is one line.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return self._default
        try:
            given = msgspec.json.decode(data, type=_File)
        except msgspec.DecodeError as e:  # covers ValidationError
            raise ValueError(
                f'{self.path}: {e}; expected {{"max_num_seqs": {self._default.max_num_seqs}, '
                f'"tensor_parallel_size": {self._default.tensor_parallel_size}}}'
            ) from e
        named = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
        limits = dataclasses.replace(self._default, **named)
        if limits.max_num_seqs < 1:
            raise ValueError(f"{self.path}: max_num_seqs must be >= 1, got {limits.max_num_seqs}")
        if not 1 <= limits.tensor_parallel_size <= self._max_tensor_parallel_size:
            raise ValueError(
                f"{self.path}: tensor_parallel_size must be between 1 and {self._max_tensor_parallel_size} "
                f"(actor.max_tensor_parallel_size), got {limits.tensor_parallel_size}"
            )
        return limits

    def read_if_changed(self) -> EngineSizeOverride | None:
        """Returns the engine size if the file exists and changed since the last call.

        Raises:
          ValueError: see `read`; raised once per change.
        """
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen == self._seen:
            return None
        self._seen = seen
        return self.read()

    def write(self, limits: EngineSizeOverride) -> None:
        """Replaces the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, msgspec.json.encode(dataclasses.asdict(limits)))

    def refuse(self) -> bool:
        """Renames a file that no engine starts with to `refused_path`; returns False if there is no file."""
        try:
            os.replace(self.path, self.refused_path)
        except FileNotFoundError:
            return False
        return True


LIMITS_POLL_S = 0.1
"""Polling interval of the size file and the engine load, in seconds."""


class ResizeRequest(Exception):  # noqa: N818  # nothing went wrong
    """Raised once the actor has drained: its process exits to be restarted with another engine size."""


@dataclasses.dataclass(slots=True)
class StepLoad:
    """Engine load since the start of a step; `ElasticPolicy.is_whole` decides when the step is complete."""

    version: Version | None
    start: EngineStats
    end: EngineStats
    kv_usage_peak: float = 0.0
    is_full: bool = False
    num_races: int = 0
    """Observations with a race in service minus observations of tickets without one. A majority decides, because losers
    of the previous round may remain at a round's start, and evaluations, which never race, may outlast it."""

    def add(self, stats: EngineStats, tickets: Sequence[Ticket], *, is_full: bool) -> None:
        """Records the current load and the tickets in service."""
        if tickets:
            self.num_races += 1 if any(t.num_requests > t.num_samples for t in tickets) else -1
        self.end = stats
        self.kv_usage_peak = max(self.kv_usage_peak, stats.kv_usage_peak)
        self.is_full |= is_full

    @property
    def num_finished(self) -> int:
        """Responses that finished during the step."""
        return self.end.num_finished - self.start.num_finished

    @property
    def num_preempted(self) -> int:
        """Preemptions during the step."""
        return self.end.num_preempted - self.start.num_preempted


async def elastic_control_loop(actor: Actor, *, file: EngineSizeFile, share: ElasticPolicy | None) -> NoReturn:
    """Adapts concurrent sequences (if `share` is given) and stops the actor when the size file changes.

    Raises:
      ResizeRequest: the file requests another size, and the actor has drained.
    """
    size = actor.engine.size
    current = EngineSizeOverride(max_num_seqs=size.max_num_seqs, tensor_parallel_size=size.tensor_parallel_size)
    step = StepLoad(actor.engine.version, actor.engine.stats, actor.engine.stats)
    while True:
        try:
            wanted = file.read_if_changed()
        except ValueError as e:
            logging.error("engine size file ignored: %s", e)
            wanted = None
        if wanted is not None and wanted != current:
            await shut_down(actor)
            raise ResizeRequest(f"{current} become {wanted}")
        if share is not None:
            step = observe(actor, file, share, step)
        await asyncio.sleep(LIMITS_POLL_S)


def observe(actor: Actor, file: EngineSizeFile, share: ElasticPolicy, step: StepLoad) -> StepLoad:
    """Records the load; at a step's end adapts concurrent sequences and writes the size file."""
    stats, version = actor.engine.stats, actor.engine.version
    if version != step.version:
        step.end = stats  # finished before the new weights, up to one polling interval
    if version != step.version and share.is_whole(step.num_finished):
        size_before, sequences_before = share.tensor_parallel_size, share.max_sequences
        decision = share.observe(
            StepStats(
                num_preempted=step.num_preempted,
                num_finished=step.num_finished,
                kv_usage_peak=step.kv_usage_peak,
                is_full=step.is_full,
                lengths=actor.engine.recent_lengths,
                is_race=step.num_races > 0,
            )
        )
        if decision.max_sequences != sequences_before:
            actor.set_max_sequences(decision.max_sequences)
            actor.timeline.instant("max_sequences", value=decision.max_sequences, preempted=step.num_preempted)
        if decision.tensor_parallel_size != size_before:
            file.write(
                EngineSizeOverride(
                    max_num_seqs=actor.engine.size.max_num_seqs,
                    tensor_parallel_size=decision.tensor_parallel_size,
                )
            )
        step = StepLoad(version, stats, stats)
    elif version != step.version and share.by_round:
        step = StepLoad(version, stats, stats)  # a round in which this engine served no response
    is_full = actor.admission.num_sequences >= share.max_sequences
    step.add(stats, actor.admission.in_service, is_full=is_full)
    return step
