"""Elastic engine control: engine size file, load per step, `ResizeRequest`.

The actor writes the file to request another size. An operator may write it while the actor runs: the actor hands its
groups over and restarts with the new size. `actor.elastic` has the rules (RollPacker's elastic tensor parallel size).
"""

import asyncio
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
from absl import logging

from actor.background import shut_down
from actor.elastic import ElasticPolicy, StepStats
from actor.engine_protocol import EngineStats
from actor.loop import Actor
from bridge.files import replace_file
from bridge.rollout_types import Version


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
        """Returns the engine size, with defaults for omitted fields. Raises ValueError if the file is invalid."""
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
        """Returns the engine size if the file changed since the last call; raises ValueError once per change."""
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
    """Raised once the actor has nothing in progress: its process exits to be restarted with another engine size."""


@dataclasses.dataclass(slots=True)
class StepLoad:
    """Engine load since the start of a step; `ElasticPolicy.is_whole` decides when the step is complete."""

    version: Version | None
    start_s: float
    start: EngineStats
    end: EngineStats
    kv_usage_peak: float = 0.0

    def add(self, stats: EngineStats) -> None:
        """Records the current load."""
        self.end = stats
        self.kv_usage_peak = max(self.kv_usage_peak, stats.kv_usage_peak)

    @property
    def num_finished(self) -> int:
        """Responses that finished during the step."""
        return self.end.num_finished - self.start.num_finished

    def stats(self, now_s: float) -> StepStats:
        """Returns the load of the step, which ends now."""
        return StepStats(
            seconds=now_s - self.start_s,
            kv_usage_peak=self.kv_usage_peak,
            num_preempted=self.end.num_preempted - self.start.num_preempted,
        )


async def elastic_control_loop(
    actor: Actor,
    *,
    file: EngineSizeFile,
    policy: ElasticPolicy | None,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Writes the size that `policy` decides; shuts down and raises ResizeRequest when the file has another size."""
    size = actor.engine.size
    current = EngineSizeOverride(max_num_seqs=size.max_num_seqs, tensor_parallel_size=size.tensor_parallel_size)
    step = StepLoad(actor.engine.version, clock(), actor.engine.stats, actor.engine.stats)
    while True:
        try:
            wanted = file.read_if_changed()
        except ValueError as e:
            logging.error("engine size file ignored: %s", e)
            wanted = None
        if wanted is not None and wanted != current:
            await shut_down(actor)
            raise ResizeRequest(f"{current} become {wanted}")
        if policy is not None:
            step = observe(actor, file, policy, step, clock())
        await asyncio.sleep(LIMITS_POLL_S)


def observe(actor: Actor, file: EngineSizeFile, policy: ElasticPolicy, step: StepLoad, now_s: float) -> StepLoad:
    """Records the load; at a step's end writes the size file if the policy decides on another size."""
    stats, version = actor.engine.stats, actor.engine.version
    if version != step.version:
        step.end = stats  # finished before the new weights, up to one polling interval
        if policy.is_whole(step.num_finished):
            size = policy.size
            tensor_parallel_size = policy.next_size(step.stats(now_s))
            if tensor_parallel_size != size.tensor_parallel_size:
                try:
                    file.write(
                        EngineSizeOverride(max_num_seqs=size.max_num_seqs, tensor_parallel_size=tensor_parallel_size)
                    )
                except OSError as e:
                    logging.error("the engine keeps its size: %s was not written: %s", file.path, e)
            step = StepLoad(version, now_s, stats, stats)
        elif policy.by_round:
            step = StepLoad(version, now_s, stats, stats)  # a round in which this engine served no response
    step.add(stats)
    return step
