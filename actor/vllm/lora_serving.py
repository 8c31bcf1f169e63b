"""Low-rank adapters in vLLM (publish.lora=adapter): one per version, on the base that the engine started with.

A request uses one adapter for all its tokens, so their version is the adapter's; vLLM's own weight versions are those
of the base. A new adapter is loaded and verified while requests run; only the load itself pauses generation. Running
requests keep their adapter, up to `MAX_ADAPTERS` adapters. Beyond that, requests of the oldest are aborted and
continue from their tokens with the newest. With at_publish=abort_and_resume all requests do.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from absl import logging

from actor.engine_protocol import EngineDeadError, SwapTimings, WeightLoadError
from bridge import codec
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError, TensorTable, check_table
from bridge.weight_types import WeightManifest
from configs.schema import Config
from configs.sections import LoraConfig

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates (`vllm.config.lora.MaxLoRARanks`)."""
MAX_ADAPTERS = 4
"""Adapters that an engine serves. If requests use all of them at a publish, requests of the oldest adapter are aborted
and resume under the new one."""
_ABORT_AGAIN_S = 0.05
"""Retry interval of aborts, in seconds: a request still on its way to the engine cannot be aborted."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Loaded adapter of one version."""

    number: int
    """Load number from 1; each load of a version gets a new one."""
    version: Version


def engine_arguments(config: Config) -> dict[str, Any]:
    """Returns the LoRA arguments that vLLM starts with."""
    room = MAX_ADAPTERS + 1  # one more while the next is loaded
    return dict(
        enable_lora=True,
        max_loras=room,
        max_cpu_loras=room,
        max_lora_rank=next(rank for rank in _RANKS if rank >= config.lora.rank),
        lora_target_modules=list(config.lora.modules),
        load_format="safetensors",
    )


def peft_settings(config: LoraConfig) -> dict[str, Any]:
    """Returns adapter settings in the form of PEFT's adapter_config.json, as vLLM requires."""
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": list(config.modules),
    }


class Adapters:
    """Adapters that an engine holds, with their requests. All methods run in one event loop."""

    def __init__(
        self, llm: "AsyncLLM", config: Config, *, expected: TensorTable, base: TensorTable, folder: pathlib.Path
    ) -> None:
        """`expected`: tensors that every adapter snapshot must hold. `base`: tensors of the base model in `folder`."""
        self._llm, self._expected, self._base, self._folder = llm, expected, base, folder
        self._settings = peft_settings(config.lora)
        self._limit = 1 if config.publish.at_publish == "abort_and_resume" else MAX_ADAPTERS
        self._users: dict[Adapter, set[str]] = {}
        """Requests that use each adapter the engine holds."""
        self._current: Adapter | None = None
        self._moving: set[str] = set()
        """Requests aborted in order to continue with another adapter."""
        self._removals: set[asyncio.Task[None]] = set()
        self._has_left = asyncio.Event()
        self._num_loaded = 0
        self._is_base_proved = False

    @property
    def version(self) -> Version | None:
        """Version that new requests use; None before the first."""
        return None if self._current is None else self._current.version

    @contextlib.contextmanager
    def used_by(self, request_id: str) -> Any:
        """Yields the newest adapter, which stays loaded while the context lasts."""
        adapter = self._current
        assert adapter is not None, "no version is served yet"
        self._users[adapter].add(request_id)
        try:
            yield adapter
        finally:
            self._users[adapter].discard(request_id)
            self._has_left.set()
            self._remove_unused()

    def request_of(self, adapter: Adapter) -> "LoRARequest":
        """Returns the adapter as vLLM's request type; its path does not exist, because the adapter is in memory."""
        from vllm.lora.request import LoRARequest

        name = f"{adapter.version}.{adapter.number}"
        return LoRARequest(lora_name=name, lora_int_id=adapter.number, lora_path=f"memory/{name}")

    def moves(self, request_id: str) -> bool:
        """Returns True once if an aborted request is to continue with a newer adapter."""
        moves = request_id in self._moving
        self._moving.discard(request_id)
        return moves

    async def swap(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Loads and verifies a version's adapter, which all new requests then use; raises as `Engine.swap_weights`."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        start = time.perf_counter()
        await asyncio.gather(*self._removals, return_exceptions=True)
        number = self._num_loaded = self._num_loaded + 1
        adapter = Adapter(number, manifest.version)
        try:
            check_table(manifest, self._expected)
            await self._prove_base()
            checked = time.perf_counter()
            await self._call("load_adapter", number, str(path), codec.encode(manifest), self._settings)
        except VllmDeadError as e:
            raise EngineDeadError(f"the engine died while version {manifest.version} was loaded") from e
        except BaseException as e:
            self._start(self._unload(number))  # it may be partly loaded
            if isinstance(e, SnapshotError):
                raise WeightLoadError(str(e)) from e
            if not isinstance(e, Exception):
                raise
            raise WeightLoadError(f"version {manifest.version} was refused: {e}") from e
        loaded = time.perf_counter()
        self._users[adapter], self._current = set(), adapter
        await self._end_oldest()
        return SwapTimings(check_s=checked - start, pause_s=loaded - checked, load_s=loaded - checked)

    async def _end_oldest(self) -> None:
        """Unloads the oldest adapters beyond the limit; their requests continue with the newest."""
        for adapter in sorted(self._users, key=lambda a: a.number)[: -self._limit]:
            while users := self._users.get(adapter):
                self._moving |= users
                self._has_left.clear()
                await self._llm.abort(sorted(users))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_left.wait(), _ABORT_AGAIN_S)
        self._remove_unused()
        await asyncio.gather(*self._removals, return_exceptions=True)

    async def _prove_base(self) -> None:
        if not self._is_base_proved:
            table = {name: [dtype, list(shape)] for name, (dtype, shape) in self._base.items()}
            await self._call("prove_base", str(self._folder), table)
            self._is_base_proved = True

    def _remove_unused(self) -> None:
        for adapter in [a for a, users in self._users.items() if a != self._current and not users]:
            del self._users[adapter]
            self._start(self._unload(adapter.number))

    async def _unload(self, number: int) -> None:
        try:
            await self._llm.remove_lora(number)
        except Exception as e:  # requests and later calls report a dead engine
            logging.warning("adapter %d stays in the engine: %s", number, e)

    def _start(self, removal: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _call(self, method: str, *arguments: Any) -> None:
        await self._llm.collective_rpc(method, args=arguments)

    def for_run(self, config: Config) -> "Adapters":
        """Returns the engine's adapters for another run; those of the previous run end at its first version."""
        next_ = Adapters(self._llm, config, expected=self._expected, base=self._base, folder=self._folder)
        next_._num_loaded, next_._is_base_proved = self._num_loaded, self._is_base_proved
        next_._users = {adapter: set() for adapter in self._users}
        return next_
