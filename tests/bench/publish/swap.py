"""What putting new weights into a real engine takes: vLLM on this machine's CPU, a model of SmolLM2-135M's shape.

    python -m tests.bench.publish.swap

First idle, beside a memcpy of the served bytes, then with as many requests running as the engine takes. What a swap
costs of the tokens is what the engine would have sampled in the same time without one, less what it did.
"""

import asyncio
import collections
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from actor.engine_protocol import SwapTimings
from actor.vllm.engine import VllmEngine
from actor.weights.model_folder import ModelFolder, read_model_folder
from bridge.rollout_types import Sampling, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy
from bridge.weight_types import WeightManifest
from configs.schema import Config
from configs.sections import ActorConfig, ModelConfig, PackingConfig
from tests.bench.harness.parts import print_measured
from tests.bench.publish.timing import cpu_s
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support import models

NUM_IDLE, NUM_BUSY = 7, 4
NUM_COLD = 2
"""First rounds, whose memory is not warm yet."""
NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 32, 40, 48
WINDOW_S = 6.0
"""How long tokens are counted from a swap's start, and how long without one."""


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """A Qwen2 of SmolLM2-135M's shape, at random."""
    import transformers

    tokens = models.make_tokenizer(path)
    config = transformers.Qwen2Config(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokens["<eos>"],
        pad_token_id=tokens["<pad>"],
        bos_token_id=None,
    )
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(path)
    return path


class Bench:
    """An engine and its snapshots."""

    def __init__(self, engine: VllmEngine, folder: pathlib.Path, model: ModelFolder, at: pathlib.Path) -> None:
        """`at` is a folder in shared memory."""
        keys: dict[str, Any] = {"run": "bench", "tokenizer_hash": model.tokenizer_hash}
        self.engine, self._weights, self._file = engine, models.read_weights(folder), at / "copy"
        self._writer = SnapshotWriter(at / "weights", **keys)
        self._mirror = VerifiedCopy(at / "weights", self._file, expected=model.tensors, **keys)
        self._step = 0
        (worker,) = multiprocessing.active_children()
        self._worker = worker.pid

    async def fetched(self) -> WeightManifest:
        """The next version, in the engine's local copy."""
        self._step += 1
        # Other values, so that nothing passes for new that is not.
        name = f"model.layers.{self._step % 30}.mlp.down_proj.weight"
        self._weights = self._weights | {name: -self._weights[name]}
        version = Version(incarnation=0, step=self._step)
        manifest = await asyncio.to_thread(write_whole, self._writer, version, self._weights, dtype="float32")
        await asyncio.to_thread(self._mirror.fetch, manifest)
        return manifest

    async def swapped(self) -> tuple[SwapTimings, float]:
        """The timings of one swap, and the seconds of CPU that the engine's process took for it all in all."""
        manifest = await self.fetched()
        begin_s = cpu_s(self._worker)
        timings = await self.engine.swap_weights(self._file, manifest)
        return timings, cpu_s(self._worker) - begin_s

    async def empty_pause_s(self) -> float:
        """Seconds in which vLLM pauses and resumes with nothing between."""
        core = self.engine._llm.engine_core
        start = time.perf_counter()
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self.engine._llm.resume_generation()
        return time.perf_counter() - start

    def memcpy_s(self, into: list[np.ndarray]) -> float:
        """Seconds of one thread for the served bytes, into warm memory."""
        start = time.perf_counter()
        for new, old in zip(self._weights.values(), into, strict=True):
            np.copyto(old, new)
        return time.perf_counter() - start

    async def idle(self) -> dict[str, Any]:
        """Medians of what a swap takes while nothing is generated, beside memcpy."""
        warm = [np.array(x) for x in self._weights.values()]
        rows: list[dict[str, float]] = []
        for _ in range(NUM_IDLE):
            row = {"memcpy_s": self.memcpy_s(warm), "empty_pause_s": await self.empty_pause_s()}
            timings, row["staged_cpu_s"] = await self.swapped()
            row |= {"staged_pause_s": timings.pause_s, "staged_check_s": timings.check_s}
            row["staged_pause_over_memcpy"] = (timings.pause_s - row["empty_pause_s"]) / row["memcpy_s"]
            rows.append(row)
            print({name: round(value, 4) for name, value in row.items()}, file=sys.stderr, flush=True)
        kept = rows[NUM_COLD:]
        return {name: statistics.median(row[name] for row in kept) for name in kept[0]}

    async def busy(self) -> dict[str, Any]:
        """Medians of what a swap takes beside generation, and what it costs of the tokens."""
        running = [asyncio.create_task(self._requests(i)) for i in range(NUM_REQUESTS)]
        await asyncio.sleep(WINDOW_S)
        found: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(NUM_BUSY):
            alone, _ = await self._window(asyncio.sleep, 0)
            beside, (timings, _) = await self._window(self.swapped)
            values = {"pause_s": timings.pause_s, "check_s": timings.check_s, "load_s": timings.load_s}
            for name, value in (values | {"alone_tokens_per_s": alone, "beside_tokens_per_s": beside}).items():
                found[f"staged_{name}"].append(value)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        medians = {name: statistics.median(values) for name, values in found.items()}
        if (rate := sum(found["staged_alone_tokens_per_s"])) > 0:
            # Of all rounds together: on a machine that does much else a window may hold no token.
            medians["staged_tokens_lost_share"] = 1 - sum(found["staged_beside_tokens_per_s"]) / rate
        return {f"busy_{name}": value for name, value in medians.items()}

    async def _window(self, work: Callable[..., Awaitable[Any]], *arguments: Any) -> tuple[float, Any]:
        """Tokens a second from the start of some work for WINDOW_S, or until it ends if that is later."""
        before, start = self.engine.num_sampled_tokens, time.perf_counter()
        found = await work(*arguments)
        await asyncio.sleep(max(0.0, WINDOW_S - (time.perf_counter() - start)))
        return (self.engine.num_sampled_tokens - before) / (time.perf_counter() - start), found

    async def _requests(self, number: int) -> None:
        random = np.random.default_rng(number)
        sampling = Sampling(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True)
        for i in range(10**9):
            prompt = random.integers(0, 95, PROMPT_TOKENS).astype(np.int32)
            await self.engine.sample(prompt, sampling, request_id=f"{number}.{i}", priority=0)

    def close(self) -> None:
        """Removes the snapshots."""
        self._mirror.close()
        self._writer.remove()


async def _measure(bench: Bench) -> dict[str, Any]:
    try:
        return await bench.idle() | await bench.busy()
    finally:
        await bench.engine.close()


def measure() -> dict[str, Any]:
    """Seconds and ratios."""
    config = Config(
        preset="bench",
        model=ModelConfig(max_tokens=512, served_dtype="float32"),
        packing=PackingConfig(row_tokens=512),
        actor=ActorConfig(enforce_eager=True, max_num_seqs=NUM_REQUESTS, kv_cache_gib=1),
    )
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        folder = make_folder(pathlib.Path(root) / "model")
        model = read_model_folder(folder, dtype="float32")
        engine = VllmEngine.start(folder, config, expected=model.tensors)
        bench = Bench(engine, folder, model, pathlib.Path(shm))
        try:
            found = asyncio.run(_measure(bench))
        finally:
            bench.close()
    return {
        "swap_pause_over_memcpy": found["staged_pause_over_memcpy"],
        "swap_check_cpu_s": max(0.0, found["staged_cpu_s"] - found["staged_pause_s"]),
        **found,
    }


if __name__ == "__main__":
    print_measured(measure)
