"""The actor's tokens a second against those of bare AsyncLLM.

    python -m tests.bench.actor_overhead [--small]

The same requests (prompts of the tiny task, responses of one length, all sampled) on the same engine, vLLM with the
tiny model on one core: first straight to AsyncLLM, all of them at once, then as tickets through the whole actor, which
claims them from a store, samples, decodes, has each response judged by `exact` in a worker process, puts groups
together and stores them. Time is from the first request, or ticket, until the last response, or stored group. The
phases alternate, so that whatever else the machine does meets both; ratios are of the pairs of one repeat.
"""

import asyncio
import dataclasses
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy
from absl import app

from actor.vllm.convert import to_params
from actor.vllm.engine import VllmEngine
from actor.weights.model_folder import ModelFolder, read_model_folder
from bridge.rollout_types import Sampling, Task, Ticket, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from configs.sections import PackingConfig, RoundsConfig
from tests.bench.harness import result
from tests.bench.rig.replay import ReplayEngine
from tests.bench.rig.serving import serve
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config, tiny_model
from tests.bridge.factories import make_ticket
from tests.bridge.snapshots.whole import write_whole

VERSION = Version(incarnation=0, step=0)
LOOK_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """So many groups at once."""

    num_groups: int = 48
    num_samples: int = 8
    num_tokens: int = 256
    """Of each response."""
    max_num_seqs: int = 64

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.num_tokens, ignore_eos=True)


class Phases:
    """One engine, and phases on it."""

    def __init__(self, work: pathlib.Path, model_folder: pathlib.Path, phase: Phase) -> None:
        self._work, self._phase, self._num_runs = work, phase, 0
        self._model: ModelFolder = read_model_folder(model_folder, dtype="float32")
        self._weights = safetensors.numpy.load_file(model_folder / "model.safetensors")
        self._engine = VllmEngine.start(model_folder, self._config(), expected=self._model.tensors)
        rng = np.random.default_rng(0)
        self._prompts = [rng.integers(3, 12, 12).astype(np.int32) for _ in range(phase.num_groups)]

    async def measure(self, repeats: int) -> dict[str, list[float]]:
        """Returns tokens a second of each kind of phase, after one of each that warms up."""
        num_tokens = self._phase.num_groups * self._phase.num_samples * self._phase.num_tokens
        kinds = {"actor": self._actor, "bare": self._bare}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(1 + repeats):
            # Each follows each: what a phase leaves behind (frequency, caches) is nobody's alone.
            for kind in sorted(kinds, reverse=bool(repeat % 2)):
                tokens_per_s = num_tokens / await kinds[kind]()
                if repeat:
                    rates[kind].append(tokens_per_s)
                    print(f"{kind}: {tokens_per_s:.0f} tokens/s", flush=True)
        await self._engine.close()
        return rates

    async def _bare(self) -> float:
        """All requests at once, straight to AsyncLLM."""
        from vllm.inputs import tokens_input

        llm: Any = self._engine._llm
        self._num_runs += 1

        async def one(prompt: np.ndarray, name: str, priority: int) -> None:
            stream = llm.generate(
                tokens_input(prompt.tolist()),
                to_params(self._phase.sampling),
                f"{self._num_runs}.{name}",
                priority=priority,
            )
            async for output in stream:
                assert output.finished and len(output.outputs[0].token_ids) == self._phase.num_tokens

        start = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for order, prompt in enumerate(self._prompts):
                for index in range(self._phase.num_samples):
                    requests.create_task(one(prompt, f"{order}.{index}", order))
        return time.perf_counter() - start

    async def _actor(self) -> float:
        """The same as tickets, through the actor."""
        config = self._config()
        session = Session(config=config, rewards="task")
        session.prepare(self._model.path)
        writer = SnapshotWriter(
            snapshot_folder(config), run=run_id(session.folder), tokenizer_hash=self._model.tokenizer_hash
        )
        write_whole(writer, VERSION, self._weights, dtype="float32")
        store = SqliteStore(RunFolder(session.folder).store)
        self._engine = self._engine.for_run(config)
        serving = asyncio.create_task(serve("actor-0", session, ReplayEngine(self._engine, None), self._model, None))
        try:
            await self._until(lambda: self._engine.version == VERSION, serving)
            start = time.perf_counter()
            store.put_tickets(self._ticket(order, prompt) for order, prompt in enumerate(self._prompts))
            await self._until(lambda: store.counts()["done"] == len(self._prompts), serving)
            return time.perf_counter() - start
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            store.close()
            writer.remove()

    async def _until(self, holds: Callable[[], bool], serving: "asyncio.Task[None]") -> None:
        while not await asyncio.to_thread(holds):
            if serving.done():
                serving.result()
            await asyncio.sleep(LOOK_S)

    def _ticket(self, order: int, prompt: np.ndarray) -> Ticket:
        return make_ticket(
            f"{order:09d}",
            order=order,
            prompt_tokens=prompt,
            task=Task.judged_by("exact", answer="7"),
            num_samples=self._phase.num_samples,
            sampling=self._phase.sampling,
        )

    def _config(self) -> Config:
        self._num_runs += 1
        config = make_config(
            "actor_overhead",
            num_updates=1,
            rounds=RoundsConfig(groups_per_round=1, groups_per_update=1, samples_per_group=self._phase.num_samples),
            max_response_tokens=self._phase.num_tokens,
            max_num_seqs=self._phase.max_num_seqs,
            packing=PackingConfig(rows=1, row_tokens=512),
        )
        keep = dataclasses.replace(config.prompts, truncated_responses="keep", verifier="exact")
        run = dataclasses.replace(config.run, dir=str(self._work / f"run-{self._num_runs}"), name=f"o{self._num_runs}")
        return dataclasses.replace(config, prompts=keep, run=run)


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = result.SMALL.value
    phase = Phase(num_groups=4, num_samples=2, num_tokens=16, max_num_seqs=8) if small else Phase()
    model = tiny_model()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the engine's own process is bound to core 0 (rig/setting)
    with tempfile.TemporaryDirectory(prefix="sluice-overhead-") as folder:
        rates = asyncio.run(Phases(pathlib.Path(folder), model, phase).measure(1 if small else 7))
    over_bare = [a / b for a, b in zip(rates["actor"], rates["bare"], strict=True)]
    result.finish(
        "actor_overhead",
        __doc__,
        values={
            "actor_over_bare": statistics.median(over_bare),
            **{f"{name}_tokens_per_s": statistics.median(of) for name, of in rates.items()},
        },
        aims={"actor_over_bare": result.at_least(0.97, "ours")},
        rows=[
            {"name": name, "median": statistics.median(of), "least": min(of), "most": max(of), "tokens_per_s": of}
            for name, of in rates.items()
        ],
        columns={"": "{name}", "tokens/s, median": "{median:.0f}", "least": "{least:.0f}", "most": "{most:.0f}"},
        notes=[f"Actor over bare: {min(over_bare):.3f} to {max(over_bare):.3f}. {phase}"],
        beside="vLLM on one core, the actor on another",
    )


if __name__ == "__main__":
    app.run(main)
