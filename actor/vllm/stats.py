"""What vLLM's scheduler counts, kept for the actor. Duck-typed: vLLM itself isn't imported here."""

import collections
from typing import Any

import numpy as np
from jaxtyping import Int32

from actor.engine.protocol import EngineStats

NUM_RECENT = 1024
"""Finished requests whose lengths are remembered."""


class StatLogger:
    """A vLLM stat logger (by shape): counts since the start, and the load at the last engine step."""

    def __init__(self) -> None:
        """Nothing was counted yet."""
        self.num_tokens = 0
        self.num_preempted = 0
        self._num_finished = 0
        self._num_running = 0
        self._num_waiting = 0
        self._kv_usage = 0.0
        self._kv_usage_peak = 0.0
        self._num_to_forgive = 0
        self._recent: collections.deque[tuple[int, int]] = collections.deque(maxlen=NUM_RECENT)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Takes vLLM's SchedulerStats and IterationStats of one engine step; either may be None."""
        if iteration_stats is not None:
            self.num_tokens += iteration_stats.num_generation_tokens
            forgiven = min(self._num_to_forgive, iteration_stats.num_preempted_reqs)
            self._num_to_forgive -= forgiven
            self.num_preempted += iteration_stats.num_preempted_reqs - forgiven
            for request in iteration_stats.finished_requests:
                if str(request.finish_reason) != "abort":
                    self._num_finished += 1
                    self._recent.append((request.num_prompt_tokens, request.num_generation_tokens))
        if scheduler_stats is not None:
            self._num_running = scheduler_stats.num_running_reqs
            self._num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._kv_usage_peak = max(self._kv_usage_peak, self._kv_usage)

    def forgive_running(self) -> None:
        """Doesn't count the preemption of what runs now: an update asks for it, memory does not.

        vLLM books a preemption with the request's next token, so they are taken off the next ones that arrive.
        """
        self._num_to_forgive = self._num_running  # what was aborted since the last one leaves nothing behind

    def start_peak(self) -> None:
        """Begins a new peak of the KV usage."""
        self._kv_usage_peak = 0.0

    def stats(self, *, is_idle: bool) -> EngineStats:
        """The counts; an idle engine makes no more steps, so its last one says nothing about its load."""
        return EngineStats(
            num_running=0 if is_idle else self._num_running,
            num_waiting=0 if is_idle else self._num_waiting,
            kv_usage=0.0 if is_idle else self._kv_usage,
            kv_usage_peak=self._kv_usage_peak,
            num_preempted=self.num_preempted,
            num_finished=self._num_finished,
            num_sampled_tokens=self.num_tokens,
        )

    def recent_lengths(self) -> Int32[np.ndarray, "N 2"]:
        """Prompt and response tokens of the last requests that finished."""
        return np.array(self._recent, np.int32).reshape(-1, 2)

    def log_engine_initialized(self) -> None:
        """For vLLM to call; nothing to do."""

    def log(self) -> None:
        """For vLLM to call; nothing to do."""

    def record_sleep_state(self, *_: Any) -> None:
        """For vLLM to call; nothing to do."""
