"""Metrics of the update being filled: its groups, its times, and its row."""

import resource
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from bridge.store.sql.learner_side import LearnerStore
from configs.sections import LoraConfig
from learner.heartbeat import live_actors
from learner.metrics.flops import adapter_params, model_flops, peak_flops
from learner.metrics.metric_names import LAST_EPOCH, SHOWN_OF_LAST_EPOCH
from learner.model.architecture import Architecture
from learner.schedule import group_validation
from learner.schedule.rollout_stream import RolloutStream
from learner.update.packing import MicroBatch

_SHOWN_REASONS = ("stale", "below_min_version", "zero_variance", "overflow", *group_validation.REASONS)


NO_LORA = LoraConfig()


MAX_SKIPPED_IN_A_ROW = 5
"""Consecutive updates without an applied optimizer step that stop the run."""


class NotFiniteError(RuntimeError):
    """Raised if too many consecutive updates are skipped, since training does not recover by itself."""


class UpdateMetrics:
    """Collector of an update's micro-batches and epochs: its times, speed and optimizer steps."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        lora: LoraConfig = NO_LORA,
        critic: Architecture | None = None,
        num_skipped: int,
    ) -> None:
        """Starts an update; `num_skipped` counts the steps of the policy's and critic's optimizer skipped before."""
        self._architecture, self._lora, self._critic = architecture, lora, critic
        self._ticket_ids: list[str] = []
        self._of_passes: list[Mapping[str, Any]] = []
        """Metrics of the optimizer steps, one per epoch."""
        self._train_s = self._helper_s = 0.0
        self._sum_squared_lengths = 0.0
        self._num_skipped = num_skipped
        self._num_skipped_in_a_row = 0
        self._is_applied = False
        """True if an optimizer step of the update was applied."""
        self._peak_flops = peak_flops(jax.devices()[0].device_kind)
        self._last_end_s: float | None = None

    def add_batch(self, micro: MicroBatch, start_s: float, end_s: float) -> None:
        """Adds a micro-batch of the first epoch, trained from `start_s` to `end_s` (monotonic seconds)."""
        self.add_helped([micro], 0.0)
        self.computed(start_s, end_s)

    def add_helped(self, micros: Sequence[MicroBatch], helper_s: float) -> None:
        """Adds micro-batches that a helper trained; `helper_s` is its time in seconds of all devices of the learner."""
        for micro in micros:
            self._ticket_ids += micro.ticket_ids
            self._sum_squared_lengths += micro.sum_squared_lengths
        self._helper_s += helper_s

    def computed(self, start_s: float, end_s: float) -> None:
        """Adds the time of any other computation for the update, as in later epochs."""
        self._train_s += end_s - start_s

    def drop(self) -> None:
        """Forgets the groups of a discarded batch; its times are kept."""
        self._ticket_ids, self._sum_squared_lengths = [], 0.0

    def add_epoch(self, metrics: Mapping[str, Any], start_s: float, end_s: float) -> None:
        """Adds the optimizer step that ends an epoch, made from `start_s` to `end_s`."""
        self.computed(start_s, end_s)
        skipped = int(metrics["skipped_updates"]) + int(metrics.get("critic/skipped_updates", 0))
        self._is_applied |= skipped == self._num_skipped
        self._num_skipped = skipped
        self._of_passes.append(metrics)

    def row(self, end_s: float) -> tuple[dict[str, Any], list[str]]:
        """Returns the update's metrics and group ids, and resets the collector; its last epoch ended at `end_s`."""
        metrics, last = self._of_passes[0], self._of_passes[-1]
        self._num_skipped_in_a_row = 0 if self._is_applied else self._num_skipped_in_a_row + 1
        self._is_applied = False
        wait_s = self._take_wait_s()
        step_s = end_s - self._last_end_s if self._last_end_s is not None else self._train_s + wait_s
        shown = [name for name in SHOWN_OF_LAST_EPOCH if name in last]  # without a critic, not its metrics
        row = dict(metrics) | {
            **({LAST_EPOCH.format(n): last[n] for n in shown} if last is not metrics else {}),
            **{n: last[n] for n in ("skipped_updates", "critic/skipped_updates") if n in last},
            "skipped_in_a_row": self._num_skipped_in_a_row,
            **self._flops(metrics),
            **peak_memory(),
            "tokens_per_s": float(metrics["real_tokens"]) / max(step_s, 1e-9),
            "time/step_s": step_s,
            "time/train_s": self._train_s,
            "time/wait_s": wait_s,
        }
        ids, self._ticket_ids, self._of_passes = self._ticket_ids, [], []
        self._train_s = self._helper_s = self._sum_squared_lengths = 0.0
        self._last_end_s = end_s
        return row, ids

    def _take_wait_s(self) -> float:
        """Returns the seconds that the learner waited for the update's data."""
        return 0.0

    def check_skipped(self, step: int) -> None:
        """Raises NotFiniteError if no optimizer step of the last `MAX_SKIPPED_IN_A_ROW` updates was applied."""
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"the last {self._num_skipped_in_a_row} updates, up to step {step}, had a loss or gradient of the "
                "policy or the critic that was not finite; these steps were skipped. "
                "Usual causes: a learning rate or a ratio that grew too large (see loss, grad_norm and ratio/p99 of "
                "the last finite steps in metrics.jsonl), input that is not finite, and updates without trained "
                "tokens (response/truncated at 1 with prompts.truncated_responses=mask, or correction/rejected_tokens "
                "at 1)"
            )

    def _flops(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Returns model TFLOP/s over the computing time of learner and helper, and the share of the peak (MFU)."""
        tokens, squares = float(metrics["real_tokens"]), self._sum_squared_lengths
        flops = model_flops(
            self._architecture,
            num_tokens=tokens,
            num_scored_tokens=float(metrics["tokens"]),
            sum_squared_lengths=squares,
            num_adapter_params=adapter_params(self._architecture, self._lora),
        )
        if self._critic is not None:  # without an output head
            flops += model_flops(self._critic, num_tokens=tokens, num_scored_tokens=0, sum_squared_lengths=squares)
        flops *= len(self._of_passes)
        per_s = flops / max(self._train_s + self._helper_s, 1e-9)
        peak = self._peak_flops * jax.device_count() if self._peak_flops else float("nan")
        return {"model_tflops_per_s": per_s / 1e12, "mfu": per_s / peak}


class StepMetrics(UpdateMetrics):
    """Collector for a run on groups: adds the metrics of its stream, store and actors."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        lora: LoraConfig = NO_LORA,
        critic: Architecture | None = None,
        stream: RolloutStream,
        store: LearnerStore,
        num_skipped: int,
    ) -> None:
        super().__init__(architecture, lora=lora, critic=critic, num_skipped=num_skipped)
        self._stream, self._store = stream, store
        self._wait_s_before = stream.wait_s

    def computed(self, start_s: float, end_s: float) -> None:
        """Adds the time of any other computation for the update, and tells the stream."""
        super().computed(start_s, end_s)
        self._stream.trained(start_s, end_s)

    def row(self, end_s: float) -> tuple[dict[str, Any], list[str]]:
        """Returns the update's metrics and group ids, and resets the collector; its last epoch ended at `end_s`."""
        row, ids = super().row(end_s)
        dropped, blocked = self._stream.group_filter.dropped, self._stream.planner.num_blocked
        row |= {
            "groups/dropped": sum(dropped.values()),
            "groups/reissued": self._store.num_reissued(),
            "groups/unreadable": self._store.num_unreadable,
            **{f"groups/{reason}": dropped.get(reason, 0) for reason in _SHOWN_REASONS},
            **{f"window/blocked_by_{bound}": blocked.get(bound, 0) for bound in ("queue", "lag")},
            "ess_stops": self._stream.num_dropped_updates,
            **self._stream.prompts.metrics(),
            **self._stream.take_rewards(),
            **self._actor_metrics(),
        }
        return row, ids

    def _take_wait_s(self) -> float:
        wait_s, self._wait_s_before = self._stream.wait_s - self._wait_s_before, self._stream.wait_s
        return wait_s

    def _actor_metrics(self) -> dict[str, float]:
        """Returns the slowest actor's last weight update times, and sums of discards and failures over actors."""
        reports = [b.report for b in live_actors(self._store) if b.report is not None]
        times_s = {
            "actor/pause_s": [r.pause_s for r in reports if r.pause_s is not None],
            "actor/load_s": [r.load_s for r in reports if r.load_s is not None],
            "actor/prefetch_s": [r.prefetch_s for r in reports if r.prefetch_s is not None],
        }
        slowest = {name: max(values) for name, values in times_s.items() if values}
        sums = {
            "actor/discarded_tokens": sum(r.num_sampled_tokens - r.num_submitted_tokens for r in reports),
            "actor/verifier_failures": sum(r.num_verifier_failures for r in reports),
            "actor/episode_failures": sum(r.num_episode_failures for r in reports),
            "actor/dropped_groups": sum(r.num_dropped_groups for r in reports),
            "actor/judge_retries": sum(r.num_judge_retries for r in reports),
            "actor/judge_failures": sum(r.num_judge_failures for r in reports),
            "actor/episode_failures/deadline": sum(r.num_episode_deadlines for r in reports),
            "actor/episode_failures/crash": sum(r.num_episode_crashes for r in reports),
            "actor/episode_failures/exception": sum(r.num_episode_exceptions for r in reports),
            "actor/episode_failures/reply": sum(r.num_episode_bad_replies for r in reports),
            "actor/episode_failures/start": sum(r.num_episode_bad_starts for r in reports),
        }
        return slowest | {name: float(value) for name, value in sums.items()}


def peak_memory() -> dict[str, float]:
    """Returns the peak memory of this process so far, in GiB: host, and the fullest device if its backend reports it.

    On Linux `ru_maxrss` is in KiB. XLA's CPU backend has no memory statistics.
    """
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    of_devices = [peak for peak in peaks if peak is not None]
    host = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    return host | ({"memory/device_peak_gib": max(of_devices) / 2**30} if of_devices else {})
