"""The learner: `python -m launch.learner --config=configs/tiny.py` or `--run_dir=FOLDER`.

Over several hosts it is started on each, with the same arguments and a run folder that all see. Cloud TPU, Slurm and
Open MPI tell each which one it is; elsewhere --coordinator, --num_processes and --process_id do.
"""

import contextlib
import os
import sqlite3
import sys
from typing import TYPE_CHECKING

from absl import flags, logging

from bridge.phases import say_phase
from bridge.pulse import Pulse
from launch import command_line
from launch.gpu_memory import reserve
from launch.processes.lifeline import die_with_parent

if TYPE_CHECKING:
    from learner.hosts.hosts import Hosts
    from learner.lead import Lead
    from learner.publish.outlet import Outlet

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of the learner's process 0, where it listens for the others; if there are several."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "How many processes the learner is; 1 takes no notice of what started this one."
)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this one is, from 0.")
_START = "start"
"""The channel on which the leader says the code that setting the run's folder up ended with; 0: it is set up."""


def main() -> int:
    """Trains the run to its end; 0 then, else one line says why not."""
    die_with_parent()
    pulse = Pulse.of_this_process()
    pulse.start()
    command_line.log_to_stderr()
    say_phase("looking at the run")
    with command_line.start_errors():
        prepared, hosts = _join()
    os.environ.update(reserve(prepared.config))  # before JAX is loaded
    if not hosts.is_leader:
        return _follow(prepared, hosts, pulse)
    from learner.commands import End
    from learner.hosts.connect import disconnect
    from learner.lead import Lead

    lead = Lead(hosts)
    code = 1
    try:
        code = _lead(prepared, lead, pulse)
    except SystemExit as e:  # of what can't be used: its line is said
        code = e.code if isinstance(e.code, int) else code
        raise
    finally:
        if hosts.count > 1:
            with contextlib.suppress(TimeoutError):
                lead.tell(End(code))
            disconnect(hosts)
    return code


def _join() -> "tuple[command_line.Prepared, Hosts]":
    """The run, set up by the first process of the learner, and all of them.

    Raises:
      ValueError, OSError: one line says what is wrong.
      SystemExit: the first process could not set it up.
      TimeoutError: not all came in time.
    """
    from learner.hosts.hosts import OneHost
    from learner.hosts.identity import ALONE, identify

    config = command_line.given_config()
    identity = identify(
        coordinator=_COORDINATOR.value,
        num_processes=_NUM_PROCESSES.value,
        process_id=_PROCESS_ID.value,
        join_s=config.learner.join_s,
    )
    if identity == ALONE:
        return command_line.prepare(("learner",), num_hosts=1), OneHost()
    from learner.hosts.connect import connect, disconnect

    # First: reading the prompts may take longer than a process waits for the others to come.
    hosts = connect(identity, join_s=config.learner.join_s, silence_s=config.learner.silence_s)
    try:
        return _set_up(hosts, start_s=config.supervision.start_s), hosts
    except BaseException:
        disconnect(hosts)
        raise


def _set_up(hosts: "Hosts", *, start_s: float) -> command_line.Prepared:
    """The run, by the leader, and then as the others find it.

    Raises:
      ValueError, OSError: here it can't be used; one line says why.
      SystemExit: the leader could not, and this process ends with its code.
      HostLostError: the leader said nothing.
    """
    start = hosts.channel(_START)
    if not hosts.is_leader:
        if code := int(start.broadcast(None, timeout_s=start_s)):
            command_line.end("the learner's process 0 could not set the run up; it says why", code)
        return command_line.prepare(("learner",), num_hosts=hosts.count)
    try:
        prepared = command_line.prepare(("learner",), num_hosts=hosts.count)
    except BaseException as e:
        start.broadcast(b"%d" % command_line.start_code(e), timeout_s=start_s)
        raise
    start.broadcast(b"0", timeout_s=start_s)
    return prepared


def _lead(prepared: command_line.Prepared, lead: "Lead", pulse: Pulse) -> int:
    """The first process's part; the exit code that all are to have."""
    say_phase("importing JAX")
    import jax

    from bridge.snapshots.layout import SnapshotBusyError, SnapshotError
    from bridge.store.protocol import SupersededLearnerError
    from launch.tracker_service import TrackerService
    from learner.checkpoint import CheckpointError
    from learner.heart import Stopped
    from learner.loop import train
    from learner.start import open_run
    from learner.step_books import NotFiniteError
    from learner.trackers.shelf import KINDS

    parts = contextlib.ExitStack()
    try:
        with command_line.start_errors():
            outlets = _outlets(prepared, parts, lead.hosts)
            run = open_run(
                prepared.config, prepared.folder, prepared.model_folder, pulse=pulse, outlets=outlets, lead=lead
            )
            if any(name in KINDS for name in prepared.config.run.tracker_names):
                # After the record is cut back to where it goes on from.
                parts.callback(TrackerService(prepared.config, prepared.folder).close)
        with contextlib.closing(run):
            train(run)
    except Stopped:
        logging.info("stopped step=%d; start again to go on from step %d", run.step, run.checkpoints.latest or 0)
        return command_line.STOPPED
    except SupersededLearnerError as e:
        print(f"error: {command_line.one_line(e)}; this one's checkpoints stay in its folder", file=sys.stderr)
        return command_line.SUPERSEDED
    except NotFiniteError as e:
        return _failed(e, "the run's folder and its last checkpoint are kept")
    except (TimeoutError, SnapshotBusyError) as e:
        _failed(e, _GO_ON)
        return command_line.BUSY
    except (SnapshotError, CheckpointError, sqlite3.OperationalError, OSError) as e:
        return _failed(e, _MEND)
    except jax.errors.JaxRuntimeError as e:
        if lead.hosts.count == 1:
            raise
        _failed(TimeoutError(f"the learner's hosts lost each other: {str(e).splitlines()[0][:300]}"), _GO_ON)
        return command_line.BUSY
    finally:
        parts.close()
    return 0


def _follow(prepared: command_line.Prepared, hosts: "Hosts", pulse: Pulse) -> int:
    """The part of any other process; the exit code that the first one says."""
    say_phase("importing JAX")
    import jax

    from learner.checkpoint import CheckpointError
    from learner.hosts.connect import disconnect
    from learner.join import join_run

    parts = contextlib.ExitStack()
    try:
        with command_line.start_errors():
            outlets = _outlets(prepared, parts, hosts)
            follower = join_run(
                prepared.config, prepared.folder, prepared.model_folder, hosts=hosts, pulse=pulse, outlets=outlets
            )
        with contextlib.closing(follower):
            code = follower.follow()
        disconnect(hosts)
        return code
    except (TimeoutError, jax.errors.JaxRuntimeError) as e:
        _failed(e if isinstance(e, TimeoutError) else TimeoutError(str(e).splitlines()[0][:300]), _GO_ON)
        return command_line.BUSY
    except CheckpointError as e:  # of all of them; the leader ends as well
        code = _failed(e, _MEND)
        disconnect(hosts)
        return code
    finally:
        parts.close()


def _outlets(prepared: command_line.Prepared, parts: contextlib.ExitStack, hosts: "Hosts") -> "list[Outlet]":
    """How this process's weights go to other machines from here; what serves them ends with `parts`."""
    if prepared.config.publish.serve == "none":
        return []
    from launch.snapshot_service import SnapshotService

    service = SnapshotService(prepared.config, prepared.folder, host=hosts.index, num_hosts=hosts.count)
    parts.callback(service.close)
    return [service.outlet]


_GO_ON = "start again to go on from the last checkpoint"
_MEND = f"make room, or mend what it names, and {_GO_ON}"


def _failed(error: Exception, what_to_do: str) -> int:
    print(f"error: {command_line.one_line(error)}; {what_to_do}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    command_line.run(main)
