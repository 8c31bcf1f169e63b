"""The actor's command with vLLM, which changes the weights that its engine serves, as a defect would.

REAL_CORRUPT=N python -m tests.integration.network.real.actor --store=... (the rest is launch.actor's)
"""

import os
import pathlib
from typing import Any

from actor.vllm.engine import VllmEngine
from actor.vllm.engine_setup import set_environment
from bridge.snapshots.snapshot_format import TensorTable
from bridge.weight_types import WeightManifest
from configs.schema import Config
from launch import actor, cli

CORRUPT = "REAL_CORRUPT"
"""Environment variable `N` or `N-`: after its N-th update, or each from there on, the engine's weights are changed."""
EXTENSION = "tests.integration.network.real.worker.Worker"


def corrupt_after_updates() -> None:
    """Names the worker extension that can corrupt, and has it done after the updates that `CORRUPT` says."""
    start, swap = VllmEngine.start.__func__, VllmEngine.swap_weights  # pyright: ignore[reportFunctionMemberAccess]
    num_swaps = 0

    def started(
        cls: type[VllmEngine], path: pathlib.Path, config: Config, *, expected: TensorTable, base: TensorTable | None
    ) -> VllmEngine:
        set_environment(config)
        import vllm

        arguments: Any = vllm.AsyncEngineArgs
        vllm.AsyncEngineArgs = lambda **given: arguments(**(given | {"worker_extension_cls": EXTENSION}))
        return start(cls, path, config, expected=expected, base=base)

    async def swapped(self: VllmEngine, path: pathlib.Path, manifest: WeightManifest):
        nonlocal num_swaps
        timings = await swap(self, path, manifest)
        num_swaps += 1
        first, dash, _ = os.environ.get(CORRUPT, "").partition("-")
        if first and (num_swaps == int(first) or (dash and num_swaps > int(first))):
            await self._llm.collective_rpc("corrupt")
            print(f"CORRUPTED update={num_swaps} version={manifest.version}", flush=True)
        return timings

    VllmEngine.start = classmethod(started)  # pyright: ignore[reportAttributeAccessIssue]
    VllmEngine.swap_weights = swapped


def main() -> None:
    """Runs `launch.actor` as its command would."""
    corrupt_after_updates()
    cli.run(actor.main)


if __name__ == "__main__":
    main()
