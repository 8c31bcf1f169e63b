"""Conversion of sampling parameters, outputs, logprobs and stats between vLLM's types and the actor's."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from msgspec import UNSET

from actor.engine_protocol import EngineDeadError, EngineStats, PartialSample
from bridge.heartbeat_types import MAX_SPEEDS, DecodeSpeed
from bridge.rollout_types import Sampling, Version
from bridge.snapshots.snapshot_format import TensorTable

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput


WARM_UP_STEPS = 8
"""First steps of each range of running sequences that are not timed, because they may compile."""


class StatLogger:
    """vLLM stat logger (by shape): cumulative counts, and the load at the last engine step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts without counts; `clock` is monotonic, in seconds."""
        self._clock = clock
        self._last_step_s: float | None = None
        """End of the last engine step; None if the next step does not follow it immediately."""
        self._decode_speeds = [DecodeSpeed()] * MAX_SPEEDS
        self._num_warm = [0] * MAX_SPEEDS
        """Steps seen, by running sequences as in `_decode_speeds`."""
        self.num_tokens = 0
        self.num_preempted = 0
        self._num_finished = 0
        self._num_running = 0
        self._num_waiting = 0
        self._kv_usage = 0.0
        self._kv_usage_peak = 0.0
        self._num_to_forgive = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Adds vLLM's SchedulerStats and IterationStats of one engine step; either may be None."""
        if scheduler_stats is not None:
            self._time_step(scheduler_stats.num_running_reqs, iteration_stats)
        if iteration_stats is not None:
            self.num_tokens += iteration_stats.num_generation_tokens
            forgiven = min(self._num_to_forgive, iteration_stats.num_preempted_reqs)
            self._num_to_forgive -= forgiven
            self.num_preempted += iteration_stats.num_preempted_reqs - forgiven
            for request in iteration_stats.finished_requests:
                if str(request.finish_reason) != "abort":
                    self._num_finished += 1
        if scheduler_stats is not None:
            self._num_running = scheduler_stats.num_running_reqs
            self._num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._kv_usage_peak = max(self._kv_usage_peak, self._kv_usage)

    def _time_step(self, num_left: int, iteration_stats: Any) -> None:
        """Adds a step without prompts to the decode speeds; `num_left` requests run after it."""
        now_s, last_s = self._clock(), self._last_step_s
        self._last_step_s = now_s if num_left else None
        if last_s is None or iteration_stats is None or iteration_stats.num_prompt_tokens:
            return
        if not (num_tokens := iteration_stats.num_generation_tokens):
            return
        i = min(num_tokens.bit_length(), MAX_SPEEDS) - 1
        self._num_warm[i] += 1
        if self._num_warm[i] > WARM_UP_STEPS:
            self._decode_speeds[i] += DecodeSpeed(num_steps=1, num_tokens=num_tokens, seconds=now_s - last_s)

    def skip_interval(self) -> None:
        """Excludes the time until the next engine step from the decode speeds, because the engine is paused."""
        self._last_step_s = None

    def forgive_running(self) -> None:
        """Excludes preemptions by a weight update, which vLLM counts with the requests' next tokens, from the count."""
        self._num_to_forgive = self._num_running  # requests aborted since the last update leave nothing to exclude

    def start_peak(self) -> None:
        """Restarts the KV usage peak."""
        self._kv_usage_peak = 0.0

    def stats(self, *, is_idle: bool) -> EngineStats:
        """Returns the counts; the load of an idle engine is 0, because its last step is outdated."""
        return EngineStats(
            num_running=0 if is_idle else self._num_running,
            num_waiting=0 if is_idle else self._num_waiting,
            kv_usage=0.0 if is_idle else self._kv_usage,
            kv_usage_peak=self._kv_usage_peak,
            num_preempted=self.num_preempted,
            num_finished=self._num_finished,
            num_sampled_tokens=self.num_tokens,
            decode_speeds=self._speeds(),
        )

    def _speeds(self) -> tuple[DecodeSpeed, ...]:
        num_rows = max((i + 1 for i, speed in enumerate(self._decode_speeds) if speed.num_steps), default=0)
        return tuple(self._decode_speeds[:num_rows])

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM calls it."""

    def log(self) -> None:
        """Does nothing; vLLM calls it."""

    def record_sleep_state(self, *_: Any) -> None:
        """Does nothing; vLLM calls it."""


_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def seed_of(seed: int | None, request_id: str) -> int | None:
    """Returns a request's seed in [0, 2^31), a function of `seed` and id; None without a seed."""
    if seed is None:
        return None
    return int.from_bytes(blake3(f"{seed}:{request_id}".encode()).digest(4), "little") >> 1


def to_params(sampling: Sampling, *, seed: int | None = None) -> "SamplingParams":
    """Returns vLLM's parameters for one response; with a `seed` the request has its own random state."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed if sampling.temperature else None,  # greedy sampling draws nothing
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_partial_sample(completion: "CompletionOutput", version: Version | None = None) -> PartialSample:
    """Returns the tokens of one request, finished or not, with logprobs and versions.

    With a `version` (that of the request's adapter) all tokens carry it. Raises EngineDeadError if logprobs or versions
    do not match the tokens.
    """
    routing = completion.routed_experts
    num_tokens = len(completion.token_ids)
    if not num_tokens:
        return PartialSample(tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), token_versions=())
    return PartialSample(
        tokens=np.asarray(completion.token_ids, np.int32),
        logprobs=_sampled_logprobs(completion),
        token_versions=_token_versions(completion) if version is None else (version,) * num_tokens,
        routed_experts=UNSET if routing is None else routing,
    )


def kv_sizes(config: "VllmConfig", weights: TensorTable) -> dict[str, int]:
    """Returns `kv_tokens` and `weights_kv_tokens` of an `EngineSize`, for a decoder with a KV cache in each layer."""
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_bytes_of_rank = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * _ITEM_BYTES[dtype]
    kv_bytes = kv_bytes_of_rank * model.get_num_layers(parallel) * parallel.tensor_parallel_size
    weights_bytes = sum(math.prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in weights.values())
    return {
        "kv_tokens": config.cache_config.kv_cache_size_tokens or 0,
        "weights_kv_tokens": math.ceil(weights_bytes / kv_bytes),
    }


def _sampled_logprobs(completion: "CompletionOutput") -> np.ndarray:
    flat: Any = completion.logprobs  # FlatLogprobs: the sampled token comes first in each position
    starts = np.asarray(flat.start_indices)
    if not np.array_equal(np.asarray(flat.token_ids)[starts], completion.token_ids):
        raise EngineDeadError("the engine's logprobs do not belong to its tokens")
    return np.asarray(flat.logprobs, np.float32)[starts]


def _token_versions(completion: "CompletionOutput") -> tuple[Version, ...]:
    versions: list[Version] = []
    for span in completion.weight_versions or ():
        versions += [Version.parse(span.version)] * (span.end - span.start)
    if len(versions) != len(completion.token_ids):
        raise EngineDeadError(f"{len(versions)} token versions for {len(completion.token_ids)} tokens")
    return tuple(versions)
