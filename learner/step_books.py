"""What the host knows of the update being filled: its groups, its times, and the row they make."""

import json
from collections.abc import Mapping
from typing import Any

from learner.heart import is_fresh
from learner.packing import MicroBatch
from learner.run import Run


class StepBooks:
    """Collects an update's micro-batches and writes its row of metrics."""

    def __init__(self, run: Run) -> None:
        """Starts at the run's first wait."""
        self._run = run
        self._ticket_ids: list[str] = []
        self._train_s = 0.0
        self._wait_s_before = run.queue.wait_s
        self._last_end_s: float | None = None

    def add(self, micro: MicroBatch, start_s: float, end_s: float) -> None:
        """Books one micro-batch's training, from `start_s` to `end_s` (Unix time)."""
        self._ticket_ids += micro.ticket_ids
        self._train_s += end_s - start_s
        self._run.clock.trained(start_s, end_s)
        self._run.timeline.span("train", start_s, end_s, step=self._run.step, groups=",".join(micro.ticket_ids))

    def write(self, metrics: Mapping[str, Any], start_s: float, end_s: float) -> None:
        """Writes the row of the step just made, whose optimizer step took from `start_s` to `end_s`."""
        run = self._run
        self._train_s += end_s - start_s
        run.clock.trained(start_s, end_s)
        run.timeline.span("apply", start_s, end_s, step=run.step)
        wait_s = run.queue.wait_s - self._wait_s_before
        step_s = end_s - self._last_end_s if self._last_end_s is not None else self._train_s + wait_s
        row = dict(metrics) | {
            "num_compilations": run.steps.num_compilations,
            "tokens_per_s": float(metrics["real_tokens"]) / max(step_s, 1e-9),
            "groups/dropped": run.queue.dropped.total(),
            "groups/reissued": run.store.counts()["reissued"],
            "time/step_s": step_s,
            "time/train_s": self._train_s,
            "time/wait_s": wait_s,
            "time/publish_s": run.publisher.last_publish_s,
        }
        run.metrics.write("step", run.step, row | self._actor_metrics(), groups=self._ticket_ids)
        self._ticket_ids, self._train_s = [], 0.0
        self._wait_s_before, self._last_end_s = run.queue.wait_s, end_s

    def _actor_metrics(self) -> dict[str, float]:
        """The slowest actor's last weight update."""
        details = [
            json.loads(b.detail) for b in self._run.store.heartbeats() if b.role == "actor" and b.detail and is_fresh(b)
        ]
        names = ("pause_s", "load_s", "prefetch_s")
        return {f"actor/{n}": max(d[n] for d in details if n in d) for n in names if any(n in d for d in details)}
