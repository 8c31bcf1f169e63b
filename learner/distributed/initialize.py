"""Which process this is; joins jax.distributed."""

import dataclasses

import jax
from absl import logging
from jax._src import clusters

from learner.distributed.channel import JaxProcesses, Processes, ProcessLostError, SingleProcess

DETECTED = ("gcetpu", "gketpu", "slurm", "ompi")
"""JAX's names of what says it by itself: Cloud TPU (GCE and GKE), Slurm, Open MPI. Ray and others pass flags."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """One of the learner's processes; one a host, with all of the host's devices that it is shown."""

    index: int
    count: int
    coordinator: str
    """host:port of process 0, where it opens the coordination service; empty for one process alone."""

    def __post_init__(self) -> None:
        """Refuses what can't be.

        Raises:
          ValueError: it names the flag.
        """
        if self.count < 1:
            raise ValueError(f"--num_processes must be >= 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(f"--process_id must be from 0 to --num_processes - 1 ({self.count - 1}), got {self.index}")
        if self.count > 1:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"--coordinator must be host:port of process 0, got {self.coordinator!r}")


ALONE = Identity(index=0, count=1, coordinator="")


def identify(
    *, coordinator: str | None, num_processes: int | None, process_id: int | None, init_timeout_s: int
) -> Identity:
    """From the flags; from the environment if none is given.

    Args:
      coordinator: --coordinator.
      num_processes: --num_processes; 1 alone says that there is one process, whatever the environment says.
      process_id: --process_id.
      init_timeout_s: how long process 0's name may take to be known, on a TPU.

    Raises:
      ValueError: some of the flags are given and others missing, or the environment is incomplete.
    """
    if num_processes == 1 and not process_id:
        return ALONE
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return _detected(init_timeout_s)
    if missing:
        raise ValueError(f"--coordinator, --num_processes and --process_id go together; {', '.join(missing)} missing")
    assert coordinator is not None and num_processes is not None and process_id is not None
    return Identity(index=process_id, count=num_processes, coordinator=coordinator)


def _detected(init_timeout_s: int) -> Identity:
    """What JAX itself would find; the process alone where nothing started several."""
    found = [c for c in clusters.ClusterEnv._cluster_types if c.name in DETECTED and c.is_env_present()]
    if not found:
        return ALONE
    cluster = found[0]
    try:
        count = cluster.get_process_count()
        if count == 1:
            return ALONE
        coordinator = cluster.get_coordinator_address(timeout_secs=init_timeout_s, override_coordinator_port=None)
        return Identity(index=cluster.get_process_id(), count=count, coordinator=coordinator)
    except (KeyError, RuntimeError) as e:
        raise ValueError(
            f"this looks like {cluster.name}, but which process this is can't be read there ({e!r}); give "
            "--coordinator, --num_processes and --process_id, or --num_processes=1"
        ) from e


_LEAVE_S = 10
"""How long a process that ends waits for the others to end too."""


def connect(identity: Identity, *, init_timeout_s: int, peer_timeout_s: int) -> Processes:
    """All processes of the learner, once each has come.

    From here on a process that ends without a word, is stopped, or can't be reached for `silence_s` ends all others:
    JAX aborts them (SIGABRT), wherever they wait, collectives too.

    Args:
      identity: this one's.
      init_timeout_s: how long the first one waits for the last one.
      peer_timeout_s: after that long without a sign of life a process is taken to be dead.

    Raises:
      ProcessLostError: not all came in time.
    """
    if identity.count == 1:
        return SingleProcess()
    # Of JAX's implementations for CPU the one that needs no other process manager; devices of other kinds ignore it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself; the learner has its own agreement (`Hosts.request_stop`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            identity.coordinator,
            identity.count,
            identity.index,
            local_device_ids=[],  # all that this process is shown
            cluster_detection_method="deactivate",
            initialization_timeout=init_timeout_s,
            heartbeat_timeout_seconds=peer_timeout_s,
            shutdown_timeout_seconds=_LEAVE_S,
        )
    except jax.errors.JaxRuntimeError as e:
        raise ProcessLostError(
            f"the learner's {identity.count} processes did not all come to {identity.coordinator} within "
            f"{init_timeout_s} s: {str(e).splitlines()[0][:200]}"
        ) from e
    logging.info(
        "host=%d of %d coordinator=%s devices=%d of %d",
        identity.index,
        identity.count,
        identity.coordinator,
        jax.local_device_count(),
        jax.device_count(),
    )
    return JaxProcesses()


def disconnect(hosts: Processes) -> None:
    """Leaves together with the others; waits a few seconds for those that do not come. The last thing done with JAX."""
    if hosts.count == 1:
        return
    try:
        jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError as e:
        logging.warning("the learner's other processes are gone: %s", str(e).splitlines()[0][:200])
