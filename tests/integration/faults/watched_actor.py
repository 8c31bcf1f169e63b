"""The real actor's command, with gates in its phases, and with the small engine where it is told so.

FAULTS_ENGINE=numpy python -m tests.integration.faults.watched_actor --store=... (the rest is launch.actor's)

What is wrapped only stands still where the bench wants it to (`gates`); what it does is `launch.actor`'s own.
"""

import asyncio
import functools
import os
import pathlib
import sys
import types
from typing import Any

import numpy as np

from actor.weights.source import RemoteSource
from bridge.snapshots import snapshot_format
from bridge.snapshots.remote import download
from bridge.snapshots.snapshot_format import TensorTable
from bridge.store.open import SqlStore
from bridge.weight_types import FileEntry, WeightManifest
from configs.schema import Config
from tests.integration.faults.engine import NumpyEngine
from tests.integration.faults.gates import reach

ENGINE, TOKEN_S = "FAULTS_ENGINE", 0.02
_POLL_S = 0.01


def watch_store() -> None:
    """`emitting`: a group is about to be handed in, or the store has it and the actor was not told; `handing over`: the
    same of a ticket's progress."""
    put = SqlStore.put_group

    @functools.wraps(put)
    def watched(self: SqlStore, group: Any) -> bool:
        reach("emitting", "begin")
        is_new = put(self, group)
        reach("emitting", "end")
        return is_new

    SqlStore.put_group = watched
    hand_over = SqlStore.hand_over

    @functools.wraps(hand_over)
    def handing_over(self: SqlStore, actor: str, progress: Any) -> None:
        reach("handing over", "begin")
        hand_over(self, actor, progress)
        reach("handing over", "end")

    SqlStore.hand_over = handing_over


def watch_source() -> None:
    """`prefetching`: a version was announced, a chunk of it is there, all of it is. A chunk may be told to be bad."""
    fetch = RemoteSource.fetch

    @functools.wraps(fetch)
    async def watched(self: RemoteSource, manifest: WeightManifest) -> pathlib.Path:
        reach("prefetching", "begin")
        path = await fetch(self, manifest)
        reach("prefetching", "end")
        return path

    def is_chunk(chunk: np.ndarray, file: FileEntry, index: int) -> bool:
        if reach("prefetching", "middle") == "corrupt":
            chunk = chunk.copy()
            chunk[chunk.size // 2] ^= 1
        return snapshot_format.is_chunk(chunk, file, index)

    RemoteSource.fetch = watched
    download.is_chunk = is_chunk


def use_numpy_engine() -> None:
    """Puts the small engine in vLLM's place."""

    def start(path: pathlib.Path, config: Config, *, expected: TensorTable, base: TensorTable | None) -> NumpyEngine:
        del base
        limit = config.actor.max_num_seqs
        return NumpyEngine(path, expected=expected, max_num_seqs=limit, token_s=TOKEN_S, reach=reach)

    module = types.ModuleType("actor.vllm.engine")
    module.__dict__["VllmEngine"] = types.SimpleNamespace(start=start)
    sys.modules["actor.vllm.engine"] = module


def watch_vllm() -> None:
    """`generating`: requests are in the engine; `swapping`: before the pause, in it, after it."""
    from actor.vllm.engine import VllmEngine
    from actor.vllm.updates import WeightUpdates

    load, swap = WeightUpdates._load, VllmEngine.swap_weights
    looking: list[asyncio.Task[None]] = []

    async def look(engine: VllmEngine) -> None:
        while True:
            if engine._active:
                reach("generating", "middle")
            await asyncio.sleep(_POLL_S)

    async def loaded(self: WeightUpdates, path: pathlib.Path, manifest: WeightManifest, *, last_request: int) -> float:
        begin = self._llm.start_weight_update

        async def paused() -> None:
            reach("swapping", "middle")
            await begin()

        self._llm.start_weight_update = paused
        try:
            return await load(self, path, manifest, last_request=last_request)
        finally:
            self._llm.start_weight_update = begin

    @functools.wraps(swap)
    async def swapped(self: VllmEngine, path: pathlib.Path, manifest: WeightManifest) -> Any:
        if not looking:
            looking.append(asyncio.create_task(look(self)))
        reach("swapping", "begin")
        timings = await swap(self, path, manifest)
        reach("swapping", "end")
        return timings

    WeightUpdates._load, VllmEngine.swap_weights = loaded, swapped


def main() -> None:
    """Runs `launch.actor` as its command would."""
    watch_store()
    watch_source()
    if os.environ.get(ENGINE) == "numpy":
        use_numpy_engine()
    else:
        watch_vllm()
    from launch import actor, cli

    cli.run(actor.main)


if __name__ == "__main__":
    main()
