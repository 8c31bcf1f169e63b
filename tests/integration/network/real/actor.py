"""The real actor's command with real vLLM, told where to die or what to do to its engine's weights.

REAL_DIE_AT=PHASE REAL_NOTE=FILE python -m tests.integration.network.real.actor --store=... (the rest is launch.actor's)

It dies at a later update than its first, so while requests run. What is wrapped here only looks at where the actor is;
what it does is `launch.actor`'s own. See `worker` for what goes on in the engine's processes.
"""

import functools
import os
import pathlib
from typing import Any

import numpy as np

from actor.vllm.engine import VllmEngine
from actor.vllm.engine_setup import set_environment
from actor.vllm.updates import WeightUpdates
from actor.vllm.worker_channel import WorkerChannel
from actor.weights.source import RemoteSource
from bridge.snapshots import snapshot_format
from bridge.snapshots.remote import download
from bridge.snapshots.snapshot_format import TensorTable
from bridge.weight_types import FileEntry, WeightManifest
from configs.schema import Config
from launch import actor, cli
from tests.integration.network.real import doom
from tests.integration.network.real.doom import die_at

CORRUPT = "REAL_CORRUPT"
"""Environment variable `N` or `N-`: after its N-th update, or each from there on, the engine's weights are changed."""
EXTENSION = "tests.integration.network.real.worker.Worker"


def watch_source() -> None:
    """The phases of a download. Actors of a host share one, so some updates come without."""
    fetch, num_fetches, num_chunks = RemoteSource.fetch, 0, 0

    @functools.wraps(fetch)
    async def watched(self: RemoteSource, manifest: WeightManifest) -> pathlib.Path:
        nonlocal num_fetches, num_chunks
        num_fetches, num_chunks = num_fetches + 1, 0
        die_at("announced", num_fetches, manifest.version)
        path = await fetch(self, manifest)
        die_at("mirrored", num_fetches, manifest.version)
        return path

    def is_chunk(chunk: np.ndarray, file: FileEntry, index: int) -> bool:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == file.num_chunks:
            die_at("verify", num_fetches)
        elif num_chunks > 1:
            die_at("download", num_fetches)
        return snapshot_format.is_chunk(chunk, file, index)

    RemoteSource.fetch = watched
    download.is_chunk = is_chunk


def watch_engine() -> None:
    """The phases of an update in the engine; and what is done to its weights after one."""
    start = VllmEngine.start.__func__  # pyright: ignore[reportFunctionMemberAccess]
    prepare, load, swap = WeightUpdates._prepare, WeightUpdates._load, VllmEngine.swap_weights
    num_swaps = 0

    def started(
        cls: type[VllmEngine], path: pathlib.Path, config: Config, *, expected: TensorTable, base: TensorTable | None
    ) -> VllmEngine:
        set_environment(config)
        import vllm

        arguments: Any = vllm.AsyncEngineArgs
        vllm.AsyncEngineArgs = lambda **given: arguments(**(given | {"worker_extension_cls": EXTENSION}))
        doom.engine = start(cls, path, config, expected=expected, base=base)
        return doom.engine

    async def prepared(
        self: WeightUpdates, control: WorkerChannel, path: pathlib.Path, manifest: WeightManifest
    ) -> None:
        await prepare(self, control, path, manifest)
        die_at("checked", 1 + num_swaps, manifest.version)

    async def loaded(self: WeightUpdates, path: pathlib.Path, manifest: WeightManifest, *, last_request: int) -> float:
        begin = self._llm.start_weight_update

        async def paused() -> None:
            die_at("paused", 1 + num_swaps, manifest.version)
            await begin()

        self._llm.start_weight_update = paused
        try:
            return await load(self, path, manifest, last_request=last_request)
        finally:
            self._llm.start_weight_update = begin

    async def swapped(self: VllmEngine, path: pathlib.Path, manifest: WeightManifest):
        nonlocal num_swaps
        timings = await swap(self, path, manifest)
        num_swaps += 1
        die_at("resumed", num_swaps, manifest.version)
        first, dash, _ = os.environ.get(CORRUPT, "").partition("-")
        if first and (num_swaps == int(first) or (dash and num_swaps > int(first))):
            await self._llm.collective_rpc("corrupt")
            print(f"CORRUPTED update={num_swaps} version={manifest.version}", flush=True)
        return timings

    VllmEngine.start = classmethod(started)  # pyright: ignore[reportAttributeAccessIssue]
    WeightUpdates._prepare, WeightUpdates._load, VllmEngine.swap_weights = prepared, loaded, swapped


def main() -> None:
    """Runs `launch.actor` as its command would."""
    doom.mark_actor()
    watch_source()
    watch_engine()
    cli.run(actor.main)


if __name__ == "__main__":
    main()
