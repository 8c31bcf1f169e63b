"""Scheduler and worker of a CPU engine that returns routed experts.

vLLM captures them in Model Runner V2, which needs Triton and so a GPU, and rejects its option elsewhere. These classes
drive the same capture, block store and per-request rows (`vllm.distributed.aux_output_connector`) around the steps of
the runner that CPUs have.
"""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutingScheduler(Scheduler):
    """Scheduler whose request outputs hold their routing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class RoutingCpuWorker(CPUWorker):
    """Worker whose step outputs hold the routing of their tokens."""

    _pending: PendingAuxOutput | None = None

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the cache, and attaches the capture to the routers of the loaded model."""
        super().initialize_from_config(kv_cache_config)
        self._routing = get_aux_output_connector(self.model_runner.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Runs the forward pass, and takes the routing of its rows."""
        self._routing.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            runner: Any = self.model_runner
            rows, num_requests = runner.input_batch, runner.input_batch.num_reqs
            batch = SimpleNamespace(
                req_ids=list(rows.req_ids),
                num_computed_tokens_np=rows.num_computed_tokens_cpu[:num_requests].copy(),
                query_start_loc_np=runner.query_start_loc.np[: num_requests + 1].copy(),
            )
            self._pending = self._routing.prepare_output(cast(Any, batch))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples, and adds the routing to the step's output."""
        output: Any = super().sample_tokens(grammar_output)
        if (pending := self._pending) is not None:
            self._pending = None
            num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def shutdown(self) -> None:
        """Stops the worker, and the store's thread."""
        if hasattr(self, "_routing"):
            self._routing.close()
        super().shutdown()
