"""Training on one machine: `python -m launch.local --config=tiny [--config.section.field=value]`.

Starts a learner and one actor per engine (`actor.num_engines`), monitors them, shows progress, and stops all processes
when the run ends.
"""

import contextlib
import sys

from launch import cli
from launch.finalize import finalize_run
from launch.live_view import StartupStatus
from launch.startup import prepare_run
from launch.supervision.supervisor import RunOutcome, Supervisor

CODES = {RunOutcome.DONE: 0, RunOutcome.INTERRUPTED: 130, RunOutcome.FAILED: 1, RunOutcome.UNUSABLE: cli.USAGE_ERROR}


def main() -> int:
    """Runs training; returns 0 if complete, 130 if interrupted, 1 if it failed, 2 if it cannot start."""
    with cli.usage_errors(), contextlib.closing(StartupStatus()) as at:
        prepared = prepare_run.prepare_run(("learner", "actor"), at)
        at("starting the learner and the actors")
        supervisor = Supervisor(prepared)
    ending = supervisor.run()
    finalize_run(prepared, ending)
    if ending in (RunOutcome.FAILED, RunOutcome.UNUSABLE):
        print(f"error: {supervisor.last_error}", file=sys.stderr)
    return CODES[ending]


if __name__ == "__main__":
    cli.run(main)
