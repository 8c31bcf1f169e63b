"""The real learner's command, which besides writes down what it trains on and whom it fences.

REAL_TRACE=FILE python -m tests.integration.network.real.learner --config=... (the rest is launch.learner's)

One line of JSON an event, in their order: `accumulate` with the groups whose gradients are added, `fence`, `unfence`.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.rollout_types import Group
from configs.schema import Config
from launch import cli, learner
from learner.run import Run
from learner.schedule import rollout_stream
from learner.schedule.rollout_stream import RolloutStream
from learner.update.packing import MicroBatch
from learner.update_metrics import StepMetrics

TRACE = "REAL_TRACE"


def note(event: str, **fields: Any) -> None:
    """Adds a line; it is there when this returns."""
    with open(os.environ[TRACE], "a") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


def watch() -> None:
    """Wraps what is written down."""
    from learner import train

    consume, accumulate = rollout_stream.consume, train.accumulate
    fence, unfence = RolloutStream.fence, RolloutStream.unfence
    made_by: dict[str, list[Any]] = {}

    def consumed(
        config: Config, planner: Any, tally: Any, shape: Any, groups: Sequence[Group], *rest: Any
    ) -> Iterator[MicroBatch]:
        for group in groups:
            made_by[group.ticket_id] = [group.ticket_id, sorted(group.actors), group.min_step, group.max_step]
        yield from consume(config, planner, tally, shape, list(groups), *rest)

    def accumulated(run: Run, micro: MicroBatch, books: StepMetrics) -> None:
        note("accumulate", step=run.step, groups=[made_by[id_] for id_ in micro.ticket_ids])
        accumulate(run, micro, books)

    @functools.wraps(fence)
    def fenced(self: RolloutStream, actor: str, reason: str, off_nats: float | None = None) -> None:
        fence(self, actor, reason, off_nats)
        note("fence", actor=actor, step=self.step, reason=reason, off=off_nats)

    @functools.wraps(unfence)
    def unfenced(self: RolloutStream, actor: str) -> None:
        unfence(self, actor)
        note("unfence", actor=actor, step=self.step)

    rollout_stream.consume, train.accumulate = consumed, accumulated
    RolloutStream.fence, RolloutStream.unfence = fenced, unfenced


def main() -> int:
    """Runs `launch.learner`; jax is loaded a little sooner than there."""
    watch()
    return learner.main()


if __name__ == "__main__":
    cli.run(main)
