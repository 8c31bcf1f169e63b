"""The learner: `python -m launch.learner --config=tiny` or `--run_dir=FOLDER`.

On several hosts, start it on each with the same arguments and a run folder on a shared file system. Cloud TPU, Slurm
and Open MPI set each process's index. Elsewhere, set --coordinator, --num_processes and --process_id.
"""

import contextlib
import functools
import os
import sqlite3
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags, logging

from bridge.liveness import Liveness, report_phase
from launch import cli
from launch.startup import prepare_run
from launch.supervision.placement import gpu_memory_variables
from launch.supervision.process_tree import die_with_parent

if TYPE_CHECKING:
    from learner.distributed.channel import Processes
    from learner.gradient_helper.helper_client import HelperStarter
    from learner.learner_process import LearnerProcess
    from learner.publish.destinations import Destination
    from learner.replicate import Replicator

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port at which process 0 of a multi-process learner listens for the others."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of learner processes. 1 ignores a surrounding Slurm, MPI or TPU job."
)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this learner process, from 0.")
_HELPER_DEVICES = flags.DEFINE_string(
    "helper_devices", "", "CUDA_VISIBLE_DEVICES of the gradient helper (helpers.num_engines), set by launch.local."
)
_HELPER_CORES = flags.DEFINE_string(
    "helper_cores", "", "CPU cores of the gradient helper on a machine without GPUs, set by launch.local."
)
_START = "start"
"""Channel on which the leader broadcasts the exit code of the run's setup; 0 means success."""


def main() -> int:
    """Trains the run to completion; returns 0, or an error code after one line on stderr."""
    die_with_parent()
    liveness = Liveness.of_this_process()
    liveness.start()
    cli.log_to_stderr()
    report_phase("reading the run")
    with cli.start_errors():
        prepared, hosts = _join()
    os.environ.update(gpu_memory_variables(prepared.config))  # must be set before JAX is imported
    if not hosts.is_leader:
        return _follow(prepared, hosts, liveness)
    from learner.commands import End
    from learner.distributed.initialize import disconnect
    from learner.replicate import Replicator

    lead = Replicator(hosts)
    code = 1
    try:
        code = _lead(prepared, lead, liveness)
    except SystemExit as e:  # raised for invalid input whose error line is already printed
        code = e.code if isinstance(e.code, int) else code
        raise
    finally:
        if hosts.count > 1:
            with contextlib.suppress(TimeoutError):
                lead.send(End(code))
            disconnect(hosts)
    return code


def _join() -> "tuple[prepare_run.PreparedRun, Processes]":
    """Connects the learner's processes and sets up the run in the first one."""
    from learner.distributed.channel import SingleProcess
    from learner.distributed.initialize import ALONE, identify

    config = prepare_run.config()
    identity = identify(
        coordinator=_COORDINATOR.value,
        num_processes=_NUM_PROCESSES.value,
        process_id=_PROCESS_ID.value,
        init_timeout_s=config.supervision.connect_timeout_s,
    )
    if identity == ALONE:
        return prepare_run.prepare_run(("learner",), num_hosts=1, is_supervised=None), SingleProcess()
    from learner.distributed.initialize import connect, disconnect

    # Connect before reading prompts, which may take longer than the connection timeout of the other processes.
    hosts = connect(
        identity,
        init_timeout_s=config.supervision.connect_timeout_s,
        peer_timeout_s=config.supervision.peer_timeout_s,
    )
    try:
        return _set_up(hosts, start_s=config.supervision.start_timeout_s), hosts
    except BaseException:
        disconnect(hosts)
        raise


def _set_up(hosts: "Processes", *, start_s: float) -> prepare_run.PreparedRun:
    """Sets up the run in the leader, then opens it in the others, which exit with the leader's code if it fails."""
    start = hosts.channel(_START)
    if not hosts.is_leader:
        if code := int(start.broadcast(None, timeout_s=start_s)):
            cli.end("learner process 0 could not set up the run; see its log", code)
        return prepare_run.prepare_run(("learner",), num_hosts=hosts.count, is_supervised=None)
    try:
        prepared = prepare_run.prepare_run(("learner",), num_hosts=hosts.count, is_supervised=None)
    except BaseException as e:
        start.broadcast(b"%d" % cli.start_code(e), timeout_s=start_s)
        raise
    start.broadcast(b"0", timeout_s=start_s)
    return prepared


def _lead(prepared: prepare_run.PreparedRun, lead: "Replicator", liveness: Liveness) -> int:
    """Runs the learner's leader process; returns the exit code for all processes."""
    report_phase("importing JAX")
    import jax

    from bridge.snapshots.snapshot_format import SnapshotBusyError, SnapshotError
    from bridge.store.store_types import SupersededLearnerError
    from launch.services.tracker_service import TrackerService
    from learner.checkpoint_hosts import CheckpointError
    from learner.heartbeat import Stopped
    from learner.metrics.tracker_kinds import KINDS
    from learner.update_metrics import NotFiniteError

    parts, run = contextlib.ExitStack(), None
    try:
        with cli.start_errors():
            run, train = _open(prepared, parts, lead, liveness)
            if any(name in KINDS for name in prepared.config.run.tracker_names):
                # The trackers must start after the metrics file is truncated to the resume point.
                parts.callback(TrackerService(prepared.config, prepared.folder).close)
        with contextlib.closing(run):
            train()
    except Stopped:
        if run is not None:
            logging.info("stopped step=%d resume_step=%d", run.step, run.checkpoints.latest or 0)
        return cli.STOPPED
    except SupersededLearnerError as e:
        print(f"error: {cli.one_line(e)}; this learner's checkpoints remain in its folder", file=sys.stderr)
        return cli.SUPERSEDED
    except NotFiniteError as e:
        return _failed(e, "the run's folder and its last checkpoint are kept")
    except (TimeoutError, SnapshotBusyError) as e:
        _failed(e, _RESUME)
        return cli.BUSY
    except (SnapshotError, CheckpointError, sqlite3.OperationalError, OSError) as e:
        return _failed(e, _FIX)
    except jax.errors.JaxRuntimeError as e:
        if lead.hosts.count == 1:
            raise
        _failed(
            TimeoutError(f"connection between the learner's processes lost: {str(e).splitlines()[0][:300]}"), _RESUME
        )
        return cli.BUSY
    finally:
        parts.close()
    return 0


def _open(
    prepared: prepare_run.PreparedRun, parts: contextlib.ExitStack, lead: "Replicator", liveness: Liveness
) -> "tuple[LearnerProcess, Callable[[], None]]":
    """Returns the run's components and the function that trains it; services close with `parts`."""
    config, folder, model_folder = prepared.config, prepared.folder, prepared.model_folder
    if config.loss.is_supervised:
        from learner.supervised import open_sft, train_sft

        supervised = open_sft(config, folder, model_folder, liveness=liveness, lead=lead)
        return supervised, functools.partial(train_sft, supervised)
    from learner.open_run import open_run
    from learner.train import train

    run = open_run(
        config,
        folder,
        model_folder,
        liveness=liveness,
        destinations=_destinations(prepared, parts, lead.hosts),
        lead=lead,
        helper=_helper(prepared, lead.hosts),
    )
    return run, functools.partial(train, run)


def _follow(prepared: prepare_run.PreparedRun, hosts: "Processes", liveness: Liveness) -> int:
    report_phase("importing JAX")
    import jax

    from learner.checkpoint_hosts import CheckpointError
    from learner.distributed.initialize import disconnect
    from learner.follower import join_run

    parts = contextlib.ExitStack()
    try:
        with cli.start_errors():
            destinations = _destinations(prepared, parts, hosts)
            follower = join_run(
                prepared.config,
                prepared.folder,
                prepared.model_folder,
                hosts=hosts,
                liveness=liveness,
                destinations=destinations,
            )
        with contextlib.closing(follower):
            code = follower.follow()
        disconnect(hosts)
        return code
    except (TimeoutError, jax.errors.JaxRuntimeError) as e:
        _failed(e if isinstance(e, TimeoutError) else TimeoutError(str(e).splitlines()[0][:300]), _RESUME)
        return cli.BUSY
    except CheckpointError as e:  # raised in all processes, so the leader exits as well
        code = _failed(e, _FIX)
        disconnect(hosts)
        return code
    finally:
        parts.close()


def _destinations(
    prepared: prepare_run.PreparedRun, parts: contextlib.ExitStack, hosts: "Processes"
) -> "list[Destination]":
    """Returns the publish targets to other machines for this process's weights; their services close with `parts`."""
    if prepared.config.publish.serve == "none" or prepared.config.loss.is_supervised:
        return []
    from launch.services.snapshot_service import SnapshotService

    service = SnapshotService(prepared.config, prepared.folder, host=hosts.index, num_hosts=hosts.count)
    parts.callback(service.close)
    return [service.destination]


def _helper(prepared: prepare_run.PreparedRun, hosts: "Processes") -> "HelperStarter | None":
    """Returns the starter of the gradient helper; None without helpers.num_engines."""
    config = prepared.config
    if not config.helpers.num_engines:
        return None
    from launch.services.helper_service import HelperService

    if not _HELPER_DEVICES.value and not _HELPER_CORES.value:
        raise ValueError("helpers.num_engines: only launch.local knows the engines' devices; start the run with it")
    if hosts.count != config.learner.num_processes:
        raise ValueError("helpers.num_engines: expected all learner processes on one machine; use launch.local")
    service = HelperService(prepared.folder, devices=_HELPER_DEVICES.value, cpu_cores=_HELPER_CORES.value)
    if config.packing.rows % service.num_devices:
        raise ValueError(
            f"helpers.num_engines: packing.rows ({config.packing.rows}) must be a multiple of the helper's "
            f"{service.num_devices} devices"
        )
    return service


_RESUME = "start again to resume from the last checkpoint"
_FIX = f"fix the cause (such as a full disk), then {_RESUME}"


def _failed(error: Exception, what_to_do: str) -> int:
    print(f"error: {cli.one_line(error)}; {what_to_do}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    cli.run(main)
