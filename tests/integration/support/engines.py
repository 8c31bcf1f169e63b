"""A real vLLM engine on a tiny model, fed through real snapshots."""

import asyncio
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

from actor.engine_protocol import Sample
from actor.vllm import lora_serving
from actor.vllm.engine import VllmEngine
from actor.vllm.engine_setup import set_environment
from actor.weights.client import WeightClient
from actor.weights.model_folder import ModelFolder, for_adapters, read_model_folder
from actor.weights.source import LocalSource
from bridge.rollout_types import Sampling, Version
from bridge.snapshots.snapshot_format import latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.timeline import Timeline
from bridge.weight_types import WeightManifest
from configs.schema import Config
from configs.sections import ActorConfig, LoraConfig, ModelConfig, PackingConfig, PublishConfig, SamplingConfig
from launch.supervision.placement import spread_cores
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support import models

T = TypeVar("T")
DEADLINE_S = 300.0
MAX_NUM_SEQS = 8
LORA = LoraConfig(rank=3, alpha=6.0, targets="q,v,o,gate,down")  # of k and up vLLM's layers have nothing
TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What tests choose of an engine; equal ones are one engine (pytest compares parameters by value)."""

    family: models.Family = "qwen3"
    tied: bool = True
    kv_cache: Literal["keep", "recompute"] = "keep"
    at_publish: Literal["keep", "drain", "abort_and_resume"] = "keep"
    prefix_caching: bool = False
    num_kv_blocks: int | None = None
    """Makes a small KV cache."""
    tensor_parallel_size: int = 1
    max_adapters: int = 0
    """Value of `lora_serving.MAX_ADAPTERS`. 0: whole weights are published."""
    routing_replay: bool = False
    """The engine returns routed experts."""
    served_dtype: Literal["float32", "bfloat16"] = "float32"
    colocated: bool = False
    """On a GPU: its memory is free while the engine sleeps."""

    def __str__(self) -> str:
        told = ["prefix_caching"] * self.prefix_caching + [f"{self.num_kv_blocks}_blocks"] * bool(self.num_kv_blocks)
        told += [f"tp{self.tensor_parallel_size}"] * (self.tensor_parallel_size > 1)
        told += [f"{self.max_adapters}_adapters"] * bool(self.max_adapters) + ["colocated"] * self.colocated
        told += ["routing"] * self.routing_replay + [self.served_dtype] * (self.served_dtype != "float32")
        return "-".join([self.family, "tied" if self.tied else "untied", self.kv_cache, self.at_publish, *told])


def for_engines(kinds: Sequence[Any]) -> pytest.MarkDecorator:
    """Runs a test once an engine."""
    return pytest.mark.parametrize("bench", kinds, indirect=True, ids=str)


# Both families, tied and not, and the ways in which a publish treats running requests.
ENGINES = [
    EngineKind(prefix_caching=True),
    EngineKind(family="qwen2", tied=False, kv_cache="recompute"),
    EngineKind(tied=False, at_publish="abort_and_resume"),
]


@dataclasses.dataclass
class Bench:
    """An engine, a learner's place (the writer) and the weight client between them, in one event loop."""

    folder: Path
    model: ModelFolder
    config: Config
    engine: VllmEngine
    writer: SnapshotWriter
    client: WeightClient
    runner: asyncio.Runner
    events: Path
    weights: dict[Version, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    """What was published, by version."""
    num_requests: int = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(coroutine, DEADLINE_S)

        return self.runner.run(bounded())

    def next_version(self) -> Version:
        """What follows the announced one, which may be a test's own."""
        announced = latest(self.folder.parent / "snapshots")
        if announced is None:
            return Version(incarnation=0, step=0)
        return dataclasses.replace(announced.version, step=announced.version.step + 1)

    def write(
        self,
        version: Version | None = None,
        *,
        seed: int | None = None,
        change: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = lambda weights: weights,
    ) -> WeightManifest:
        """Publishes random weights, the folder's plus noise (a version's own if no seed), as the next version.

        `change`: made to them before, unless adapters are published.
        """
        version = version or self.next_version()
        seed = 1000 * version.incarnation + version.step if seed is None else seed
        weights = base = models.read_weights(self.folder)
        if self.config.publishes_adapters:
            published = models.random_adapters(self.model.tensors, seed=seed)
            weights = models.merged(base, published, scale=LORA.alpha / LORA.rank)
        else:
            published = weights = change(models.perturbed(base, seed=seed))
        manifest = write_whole(self.writer, version, published, dtype=self.config.model.served_dtype)
        self.weights[version] = weights
        return manifest

    async def update(self, version: Version | None = None, **weights: Any) -> Version:
        """Publishes and serves random weights (`write`)."""
        manifest = self.write(version, **weights)
        prefetched = await self.client.prefetch()
        assert prefetched is not None and prefetched == manifest
        assert await self.client.swap(prefetched)
        assert self.engine.version == manifest.version
        return manifest.version

    async def sample(self, prompt: np.ndarray, *, priority: int = 0, request_id: str = "", **sampling) -> Sample:
        self.num_requests += 1
        return await self.engine.sample(
            prompt,
            Sampling(**({"max_tokens": 24, "ignore_eos": True, "temperature": TEMPERATURE} | sampling)),
            request_id=request_id or f"r{self.num_requests}",
            priority=priority,
        )

    def reference(
        self, version: Version, prompt: np.ndarray, sample: Sample, *, temperature: float = TEMPERATURE
    ) -> np.ndarray:
        """What transformers gives the sampled tokens under a version's weights."""
        tokens = np.concatenate([prompt, sample.tokens])
        logprobs = models.reference_logprobs(self.folder, self.weights[version], tokens, temperature=temperature)
        return logprobs[len(prompt) - 1 :]

    def close(self) -> None:
        self.run(self.engine.close())
        self.runner.close()
        self.client.close()
        self.writer.remove()


def _cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def start_bench(root: Path, kind: EngineKind, *, folder: Path | None = None) -> Bench:
    """Makes the model, unless there is one in `folder`, and starts the engine; takes about a minute."""
    folder = folder or models.make_folder(root / "model", family=kind.family, tied=kind.tied)
    config = Config(
        preset="test",
        model=ModelConfig(max_tokens=512, served_dtype=kind.served_dtype, routing_replay=kind.routing_replay),
        packing=PackingConfig(row_tokens=512),
        sampling=SamplingConfig(temperature=TEMPERATURE),
        publish=PublishConfig(
            kv_cache=kind.kv_cache,
            at_publish=kind.at_publish,
            lora="adapter" if kind.max_adapters else "merged",
        ),
        lora=LORA if kind.max_adapters else LoraConfig(),
        actor=ActorConfig(
            enforce_eager=True,
            max_num_seqs=MAX_NUM_SEQS,
            prefix_caching=kind.prefix_caching,
            colocated=kind.colocated,
            tensor_parallel_size=kind.tensor_parallel_size,
            cpu_cores=spread_cores(_cores(), kind.tensor_parallel_size) if kind.tensor_parallel_size > 1 else "",
        ),
    )
    model = for_adapters(read_model_folder(folder, dtype=config.model.served_dtype), config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_serving, "MAX_ADAPTERS", kind.max_adapters)
        if kind.num_kv_blocks is not None:
            set_environment(config)
            import vllm

            small = functools.partial(vllm.AsyncEngineArgs, num_gpu_blocks_override=kind.num_kv_blocks)
            patch.setattr(vllm, "AsyncEngineArgs", small)
        engine = VllmEngine.start(folder, config, expected=model.tensors, base=model.base)
    writer = SnapshotWriter(root / "snapshots", run="r", tokenizer_hash=model.tokenizer_hash)
    client = WeightClient(
        LocalSource(
            root / "snapshots",
            root / "copy" / "weights",
            run="r",
            tokenizer_hash=model.tokenizer_hash,
            expected=model.tensors,
        ),
        engine,
        timeline=Timeline(root / "events", "actor-0"),
    )
    return Bench(folder, model, config, engine, writer, client, asyncio.Runner(), root / "events")


def spans(sample: Sample) -> list[tuple[Version, int, int]]:
    """Version, first and last + 1 position."""
    found, at = [], 0
    for version, run in itertools.groupby(sample.token_versions):
        end = at + len(list(run))
        found.append((version, at, end))
        at = end
    return found
