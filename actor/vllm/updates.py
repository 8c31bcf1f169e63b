"""In-flight updates of all weights, front-end side (`actor.vllm.worker`): check and stage, then pause and load."""

import asyncio
import pathlib
import time
from typing import TYPE_CHECKING

from absl import logging

from actor.engine_protocol import EngineDeadError, SwapTimings, WeightLoadError
from actor.vllm.convert import StatLogger
from actor.vllm.worker_channel import WorkerChannel, WorkerChannelLostError
from bridge import codec
from bridge.snapshots.snapshot_format import SnapshotError, TensorTable, check_table
from bridge.weight_types import WeightManifest
from configs.schema import Config

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class WeightUpdates:
    """Weight updates of one engine in one run; one update at a time."""

    def __init__(self, llm: "AsyncLLM", config: Config, *, expected: TensorTable, counter: StatLogger) -> None:
        self._llm, self._expected, self._counter = llm, expected, counter
        self._num_workers = config.actor.tensor_parallel_size
        self._recomputes = config.publish.kv_cache == "recompute"
        self._resumes = config.publish.at_publish == "abort_and_resume"
        self._stage_s = config.supervision.engine_timeout_s / 2
        """Timeout for checking and staging a version, in seconds. The rest of the update's timeout is for the load."""
        self._control: WorkerChannel | None = None
        """Channel to the workers that does not wait for engine steps; set at the first update."""
        self.is_open = asyncio.Event()
        """Cleared during the pause: a request that starts then would use the prompt cache of the old weights."""
        self.is_open.set()
        self.failure: EngineDeadError | None = None
        """Failure of an update; nothing may be sampled after it."""

    async def swap(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Checks and stages while generating, then pauses, loads, verifies and resumes (`Engine.swap_weights`)."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        start = time.perf_counter()
        try:
            check_table(manifest, self._expected)
            control = await self._connected()
            await self._prepare(control, path, manifest)
        except (VllmDeadError, WorkerChannelLostError) as e:
            raise EngineDeadError(f"the engine died before a weight update: {e}") from e
        except SnapshotError as e:
            raise WeightLoadError(str(e)) from e
        except Exception as e:  # vLLM raises a worker's error as a plain Exception
            raise WeightLoadError(f"version {manifest.version} was refused: {e}") from e
        paused = time.perf_counter()
        try:
            load_s = await self._load(path, manifest, last_request=control.last_request)
        except BaseException as e:  # after any failure the served weights are unknown
            self.failure = EngineDeadError(f"version {manifest.version} failed while loading: {e}")
            if not isinstance(e, Exception):
                raise
            raise self.failure from e
        finally:
            self.is_open.set()
        return SwapTimings(check_s=paused - start, pause_s=time.perf_counter() - paused, load_s=load_s)

    async def _connected(self) -> WorkerChannel:
        """Returns the worker channel; connects at the first update."""
        if self._control is not None:
            return self._control
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        expected = {name: [dtype, list(shape)] for name, (dtype, shape) in self._expected.items()}
        control = WorkerChannel()
        try:
            info = {"expected": expected, "control": control.address}
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            await asyncio.to_thread(control.connect, self._num_workers)
        except BaseException:
            control.close()
            raise
        self._control = control
        return control

    async def _prepare(self, control: WorkerChannel, path: pathlib.Path, manifest: WeightManifest) -> None:
        """Checks and stages the snapshot in all workers before the pause; on timeout it is loaded in the pause.

        Raises SnapshotError if a worker rejects it.
        """
        try:
            said = await asyncio.to_thread(control.ask, str(path), codec.encode(manifest), timeout_s=self._stage_s)
        except TimeoutError:  # loaded in the pause
            logging.warning("version %s was not staged within %.0f s", manifest.version, self._stage_s)
            return
        if refusals := [refusal for refusal in said if refusal]:
            await self._llm.collective_rpc("drop_snapshot")  # other workers may hold the file
            raise SnapshotError(f"version {manifest.version} was refused: {refusals[0]}")

    async def _load(self, path: pathlib.Path, manifest: WeightManifest, *, last_request: int) -> float:
        """Pauses, loads, verifies and resumes; returns the load time in seconds.

        With abort_and_resume all requests are aborted; `VllmEngine.sample` keeps their tokens and restarts them on the
        new weights. No request remains, so the prompt cache can be dropped.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.is_open.clear()
        # `AsyncLLM.pause_generation` would add 20 ms of sleep, only to let late outputs arrive first.
        if self._resumes:
            await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
        else:
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        start = time.perf_counter()
        await self._llm.start_weight_update()
        info = {"path": str(path), "manifest": codec.encode(manifest), "last_request": last_request}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        load_s = time.perf_counter() - start
        await self._llm.finish_weight_update(str(manifest.version))
        if self._recomputes:
            self._counter.forgive_running()
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        self._counter.skip_interval()
        await self._llm.resume_generation()
        return load_s

    def close(self) -> None:
        """Stops staging and closes the worker channel; the engine keeps running."""
        if self._control is not None:
            self._control.close()
