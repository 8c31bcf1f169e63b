"""One machine, one command: `python -m launch.local --config=configs/tiny.py [--config.section.field=value]`.

Starts a learner and an actor, watches them, shows how the run goes, and stops both whatever ends it.
"""

import sys

from launch import command_line
from launch.summary import finish
from launch.supervisor import Ending, Supervisor


def main() -> int:
    """Runs to the end; 0 when the run is complete, 130 when it was interrupted, 1 when it failed."""
    with command_line.usage_errors():
        prepared = command_line.prepare(("learner", "actor"))
        supervisor = Supervisor(prepared)
    ending = supervisor.run()
    finish(prepared, ending)
    if ending is Ending.FAILED:
        print(f"error: {supervisor.last_error}", file=sys.stderr)
    return {Ending.DONE: 0, Ending.INTERRUPTED: 130, Ending.FAILED: 1}[ending]


if __name__ == "__main__":
    command_line.run(main)
