"""Phases with the code that PYTHONPATH names: `python server.py WORK_FOLDER MODEL_FOLDER PHASE`, a kind a line.

What it imports is as old as `tests.bench.actor_overhead.__main__.BEFORE`: it runs on that tree, too.
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import safetensors.numpy

from actor.vllm.convert import to_params
from actor.vllm.engine import VllmEngine
from actor.weights.model_folder import ModelFolder, read_model_folder
from bridge.rollout_types import Sampling, Task, Ticket, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from configs.sections import PackingConfig, RoundsConfig
from tests.bench.rig.replay import ReplayEngine
from tests.bench.rig.serving import serve
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config

VERSION = Version(incarnation=0, step=0)
LOOK_S = 0.005


class Server:
    """One engine, and phases on it."""

    def __init__(self, work: pathlib.Path, model_folder: pathlib.Path, phase: dict[str, int]) -> None:
        self._work, self._phase, self._num_runs = work, phase, 0
        self._model: ModelFolder = read_model_folder(model_folder, dtype="float32")
        self._weights = safetensors.numpy.load_file(model_folder / "model.safetensors")
        self._engine = VllmEngine.start(model_folder, self._config(), expected=self._model.tensors)
        rng = np.random.default_rng(0)
        self._prompts = [rng.integers(3, 12, 12).astype(np.int32) for _ in range(phase["num_groups"])]

    async def run(self, kind: str) -> float:
        """Tokens a second of a phase."""
        phase = self._phase
        tokens = phase["num_groups"] * phase["num_samples"] * phase["num_tokens"]
        seconds = await (self._bare() if kind == "bare" else self._actor())
        return tokens / seconds

    async def _bare(self) -> float:
        """All requests at once, straight to AsyncLLM."""
        from vllm.inputs import tokens_input

        llm: Any = self._engine._llm
        self._num_runs += 1

        async def one(prompt: np.ndarray, name: str, priority: int) -> None:
            stream = llm.generate(
                tokens_input(prompt.tolist()), to_params(self._sampling), f"{self._num_runs}.{name}", priority=priority
            )
            async for output in stream:
                assert output.finished and len(output.outputs[0].token_ids) == self._phase["num_tokens"]

        start = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for order, prompt in enumerate(self._prompts):
                for index in range(self._phase["num_samples"]):
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
        writer.write(VERSION, self._weights, dtype="float32")
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

    async def _until(self, holds: Any, serving: "asyncio.Task[None]") -> None:
        while not await asyncio.to_thread(holds):
            if serving.done():
                serving.result()
            await asyncio.sleep(LOOK_S)

    def _ticket(self, order: int, prompt: np.ndarray) -> Ticket:
        return Ticket(
            id=f"{order:09d}",
            kind="train",
            round=0,
            order=order,
            prompt_tokens=prompt,
            task=_judged_by_exact("7"),
            num_samples=self._phase["num_samples"],
            num_requests=self._phase["num_samples"],
            sampling=self._sampling,
            min_version=VERSION,
        )

    @property
    def _sampling(self) -> Sampling:
        return Sampling(max_tokens=self._phase["num_tokens"], ignore_eos=True)

    def _config(self) -> Config:
        self._num_runs += 1
        config = make_config(
            "actor_overhead",
            num_updates=1,
            rounds=RoundsConfig(groups_per_round=1, groups_per_update=1, samples_per_group=self._phase["num_samples"]),
            max_response_tokens=self._phase["num_tokens"],
            max_num_seqs=self._phase["max_num_seqs"],
            packing=PackingConfig(rows=1, row_tokens=512),
        )
        keep = dataclasses.replace(config.prompts, truncated_responses="keep", verifier="exact")
        run = dataclasses.replace(config.run, dir=str(self._work / f"run-{self._num_runs}"), name=f"o{self._num_runs}")
        return dataclasses.replace(config, prompts=keep, run=run)


def _judged_by_exact(answer: str) -> Task:
    fields: dict[str, Any] = {"verifier": "exact", "answer": answer}
    return Task.judged_by(**fields) if hasattr(Task, "judged_by") else Task(**fields)


def main() -> None:
    work, model, phase = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the engine's own process is bound to core 0 (rig/setting)
    server = Server(pathlib.Path(work), pathlib.Path(model), json.loads(phase))
    with asyncio.Runner() as runner:
        answers.write("started\n")
        for line in sys.stdin:
            answers.write(f"{runner.run(server.run(line.strip()))}\n")
        runner.run(server._engine.close())


if __name__ == "__main__":
    main()
