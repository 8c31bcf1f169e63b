"""The real actor's command with a simulated engine in vLLM's place.

SIMULATED_DIE_AT=PHASE:STEP python -m tests.integration.network.simulated.actor --store=... (the rest is launch.actor's)

Everything but the engine is `launch.actor`'s own: joining by the store, the run's card, fetching and verifying, the
loop and its duties, the verifiers. Told by the environment: where to die (`engine.die_at`), how far this process's
clock is off (SIMULATED_CLOCK_S, seconds), how long a token takes (SIMULATED_TOKEN_S).
"""

import os
import pathlib
import sys
import time
import types

import numpy as np

from bridge.snapshots import snapshot_format
from bridge.snapshots.remote import download
from bridge.snapshots.snapshot_format import TensorTable
from bridge.weight_types import FileEntry
from configs.schema import Config
from tests.integration.network.simulated.engine import DIE_AT, SimulatedEngine, die_at

CLOCK_S, TOKEN_S = "SIMULATED_CLOCK_S", "SIMULATED_TOKEN_S"
DEFAULT_TOKEN_S = 0.01
ENGINE_MODULE = "actor.vllm.engine"


class Engine:
    """Stands where `VllmEngine` does."""

    @staticmethod
    def start(
        path: pathlib.Path, config: Config, *, expected: TensorTable, base: TensorTable | None
    ) -> SimulatedEngine:
        """As `VllmEngine.start`, at once."""
        del path, base
        token_s = float(os.environ.get(TOKEN_S, DEFAULT_TOKEN_S))
        return SimulatedEngine(expected=expected, max_num_seqs=config.actor.max_num_seqs, token_s=token_s)


def shift_clock(offset_s: float) -> None:
    """From here on `time.time` of this process is so far ahead of the machine's."""
    real = time.time
    time.time = lambda: real() + offset_s


def watch_downloads() -> None:
    """Dies in the middle of a download, where it is told to: when a first part of it has arrived and is verified."""
    num_chunks = 0

    def is_chunk(chunk: np.ndarray, file: FileEntry, index: int) -> bool:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks % file.num_chunks:
            die_at("prefetch", num_chunks // file.num_chunks)
        return snapshot_format.is_chunk(chunk, file, index)

    download.is_chunk = is_chunk


def main() -> None:
    """Runs `launch.actor` as its command would."""
    if offset_s := float(os.environ.get(CLOCK_S, "0")):
        shift_clock(offset_s)
    if os.environ.get(DIE_AT, "").startswith("prefetch:"):
        watch_downloads()
    module = types.ModuleType(ENGINE_MODULE)
    module.__dict__["VllmEngine"] = Engine
    sys.modules[ENGINE_MODULE] = module
    from launch import actor, cli

    cli.run(actor.main)


if __name__ == "__main__":
    main()
