"""The learner: `python -m launch.learner --config=configs/tiny.py` or `--run_dir=FOLDER`."""

import contextlib
import sqlite3
import sys
from typing import TYPE_CHECKING

from absl import logging

from bridge.pulse import Pulse
from launch import command_line
from launch.lifeline import die_with_parent

if TYPE_CHECKING:
    from learner.publish.outlet import Outlet


def main() -> int:
    """Trains the run to its end; 0 then, else one line says why not."""
    die_with_parent()
    pulse = Pulse.of_this_process()
    pulse.start()
    command_line.log_to_stderr()
    with command_line.usage_errors():
        prepared = command_line.prepare(("learner",))
    # jax is loaded only once the input is known to be good.
    from bridge.snapshots.layout import SnapshotBusyError, SnapshotError
    from bridge.store.protocol import SupersededLearnerError
    from learner.checkpoint import CheckpointError
    from learner.heart import Stopped
    from learner.loop import train
    from learner.start import open_run
    from learner.step_books import NotFiniteError

    parts = contextlib.ExitStack()
    try:
        with command_line.usage_errors():
            outlets = _outlets(prepared, parts)
            run = open_run(prepared.config, prepared.folder, prepared.model_folder, pulse=pulse, outlets=outlets)
        with contextlib.closing(run):
            train(run)
    except Stopped:
        logging.info("stopped step=%d; start again to go on from step %d", run.step, run.last_saved_step)
        return command_line.STOPPED
    except SupersededLearnerError as e:
        print(f"error: {command_line.one_line(e)}; this one's checkpoints stay in its folder", file=sys.stderr)
        return command_line.SUPERSEDED
    except NotFiniteError as e:
        return _failed(e, "the run's folder and its last checkpoint are kept")
    except (TimeoutError, SnapshotBusyError) as e:
        _failed(e, "start again to go on from the last checkpoint")
        return command_line.BUSY
    except (SnapshotError, CheckpointError, sqlite3.OperationalError, OSError) as e:
        return _failed(e, "make room, or mend what it names, and start again to go on from the last checkpoint")
    finally:
        parts.close()
    return 0


def _outlets(prepared: command_line.Prepared, parts: contextlib.ExitStack) -> "list[Outlet]":
    """How weights go to other machines from here; what serves them ends with `parts`."""
    if prepared.config.publish.serve == "none":
        return []
    from launch.snapshot_service import SnapshotService

    service = SnapshotService(prepared.config, prepared.folder)
    parts.callback(service.close)
    return [service.outlet]


def _failed(error: Exception, what_to_do: str) -> int:
    print(f"error: {command_line.one_line(error)}; {what_to_do}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    command_line.run(main)
