"""Training on one machine: `python -m launch.local --config=tiny [--config.section.field=value]`.

Starts a learner and one actor per engine (`actor.num_engines`), monitors them, shows progress, and stops all processes
when the run ends.
"""

import contextlib
import sys
from collections.abc import Sequence

from launch import cli
from launch.finalize import finalize_run
from launch.live_view import StartupStatus
from launch.startup import prepare_run
from launch.supervision.supervisor import RunOutcome, Supervisor

CODES = {RunOutcome.DONE: 0, RunOutcome.INTERRUPTED: 130, RunOutcome.FAILED: 1, RunOutcome.UNUSABLE: cli.USAGE_ERROR}


def main() -> int:
    """Runs training; returns 0 if complete, 130 if interrupted, 1 if it failed, 2 if it cannot start."""
    return train(("learner", "actor"))


def train(roles: Sequence[str], *, is_supervised: bool = False) -> int:
    """Runs training with processes of these roles, for a run with or without actors; returns as `main`."""
    with cli.usage_errors(), contextlib.closing(StartupStatus()) as at:
        prepared = prepare_run.prepare_run(roles, at, is_supervised=is_supervised)
        at("starting the learner" + " and the actors" * ("actor" in roles))
        supervisor = Supervisor(prepared)
    ending = supervisor.run()
    finalize_run(prepared, ending)
    if ending in (RunOutcome.FAILED, RunOutcome.UNUSABLE):
        print(f"error: {supervisor.last_error}", file=sys.stderr)
    return CODES[ending]


if __name__ == "__main__":
    cli.run(main)
