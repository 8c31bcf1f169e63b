"""Low-rank adapters in vLLM (publish.lora=adapter): one for each version, beside the base that the engine started with.

A request runs under one adapter from its first token to its last, so its tokens' version is that adapter's; vLLM's own
weight versions stay those of the base. A new version is loaded and proved while requests run: nothing stands still but
for the load itself. What runs goes on under the adapter that it began with, unless more than `publish.max_adapters`
would stay: then the requests of the oldest end, and go on from their tokens under the new one. With
at_publish=abort_and_resume all of them do.
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
"""What vLLM makes room for (`vllm.config.lora.MaxLoRARanks`)."""
_ABORT_AGAIN_S = 0.05
"""A request that is on its way to the engine is not found there yet."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One version's, in the engine."""

    number: int
    """From 1, one for each time that a version is loaded."""
    version: Version


def engine_arguments(config: Config) -> dict[str, Any]:
    """What vLLM is started with."""
    room = config.publish.max_adapters + 1  # for the next, while it is loaded
    return dict(
        enable_lora=True,
        max_loras=room,
        max_cpu_loras=room,
        max_lora_rank=next(rank for rank in _RANKS if rank >= config.lora.rank),
        lora_target_modules=list(config.lora.modules),
        load_format="safetensors",
    )


def peft_settings(config: LoraConfig) -> dict[str, Any]:
    """What vLLM wants to know of adapters, as PEFT's adapter_config.json says it."""
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": list(config.modules),
    }


class Adapters:
    """The adapters that an engine holds, and who uses them. Everything runs in one event loop."""

    def __init__(
        self, llm: "AsyncLLM", config: Config, *, expected: TensorTable, base: TensorTable, folder: pathlib.Path
    ) -> None:
        """Nothing is served yet.

        Args:
          llm: started with `engine_arguments`.
          config: the run's.
          expected: the adapters' tensors, which every snapshot must hold.
          base: the model's own, as `folder` has them.
          folder: what the engine was started from.
        """
        self._llm, self._expected, self._base, self._folder = llm, expected, base, folder
        self._settings = peft_settings(config.lora)
        self._limit = 1 if config.publish.at_publish == "abort_and_resume" else config.publish.max_adapters
        self._users: dict[Adapter, set[str]] = {}
        """Of every adapter that the engine holds: the requests that run under it."""
        self._current: Adapter | None = None
        self._moving: set[str] = set()
        """Requests that were ended, to go on under another adapter."""
        self._removals: set[asyncio.Task[None]] = set()
        self._has_left = asyncio.Event()
        self._num_loaded = 0
        self._is_base_proved = False

    @property
    def version(self) -> Version | None:
        """What requests run under that begin now; None before the first version."""
        return None if self._current is None else self._current.version

    @contextlib.contextmanager
    def used_by(self, request_id: str) -> Any:
        """The newest adapter, kept for as long as the request runs under it."""
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
        """As vLLM wants it said; there is nothing at its path, for the adapter is in memory."""
        from vllm.lora.request import LoRARequest

        name = f"{adapter.version}.{adapter.number}"
        return LoRARequest(lora_name=name, lora_int_id=adapter.number, lora_path=f"memory/{name}")

    def moves(self, request_id: str) -> bool:
        """Whether a request that ended early is to go on, under a newer adapter; said once."""
        moves = request_id in self._moving
        self._moving.discard(request_id)
        return moves

    async def swap(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Loads and proves a version's adapter, which all requests from then on run under.

        Raises:
          WeightLoadError: the engine did not take it, and serves what it served before.
          EngineDeadError: the engine is gone.
        """
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
            self._start(self._unload(number))  # part of it may be there
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
        """Leaves as many adapters as may stay; requests of the others go on under the newest."""
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
        except Exception as e:  # whoever waits for the engine hears of its end
            logging.warning("adapter %d stays in the engine: %s", number, e)

    def _start(self, removal: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _call(self, method: str, *arguments: Any) -> None:
        await self._llm.collective_rpc(method, args=arguments)

    def for_run(self, config: Config) -> "Adapters":
        """The same engine's, for another run; what the one before left goes with its first version."""
        next_ = Adapters(self._llm, config, expected=self._expected, base=self._base, folder=self._folder)
        next_._num_loaded, next_._is_base_proved = self._num_loaded, self._is_base_proved
        next_._users = {adapter: set() for adapter in self._users}
        return next_
