"""Learner process identity, and connection to jax.distributed."""

import dataclasses

import jax
from absl import logging
from jax._src import clusters, distributed

from bridge.files import first_line
from learner.distributed.channel import Processes, ProcessLostError, SingleProcess

DETECTED = ("gcetpu", "gketpu", "slurm", "ompi")
"""JAX's names of the cluster types that are detected: Cloud TPU (GCE and GKE), Slurm, Open MPI. Others, such as Ray,
need the flags."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a learner process; one process per host, with all visible devices of the host."""

    index: int
    count: int
    coordinator: str
    """host:port of process 0, which opens the coordination service there; empty for a single process."""

    def __post_init__(self) -> None:
        """Raises ValueError, with the flag's name, if a field is invalid."""
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
    """Returns the identity from the flags, or from the environment if no flag is given.

    --num_processes=1 forces a single process, whatever the environment says. `init_timeout_s` limits the resolution of
    process 0's address on a TPU. Raises ValueError if only some of the flags are given, or the environment is
    incomplete.
    """
    if num_processes == 1 and not process_id:
        return ALONE
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return _detected(init_timeout_s)
    if missing:
        raise ValueError(
            f"--coordinator, --num_processes and --process_id must be set together; {', '.join(missing)} missing"
        )
    assert coordinator is not None and num_processes is not None and process_id is not None
    return Identity(index=process_id, count=num_processes, coordinator=coordinator)


def _detected(init_timeout_s: int) -> Identity:
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
            f"detected {cluster.name}, but cannot read this process's identity from it ({e!r}); set "
            "--coordinator, --num_processes and --process_id, or --num_processes=1"
        ) from e


_LEAVE_S = 10
"""Seconds that a process that exits waits for the others."""


def connect(identity: Identity, *, init_timeout_s: int, peer_timeout_s: int) -> Processes:
    """Connects to all learner processes, and returns once each has connected.

    Afterwards JAX aborts every process (SIGABRT), even inside a collective, if one exits unexpectedly, is suspended or
    is unreachable for `peer_timeout_s`. Raises ProcessLostError if not all processes connected within `init_timeout_s`.
    """
    if identity.count == 1:
        return SingleProcess()
    # Gloo is the CPU implementation that needs no process manager; other devices ignore this setting.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The service would intercept SIGTERM; the learner has its own protocol (`Processes.request_stop`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            identity.coordinator,
            identity.count,
            identity.index,
            local_device_ids=[],  # all visible devices
            cluster_detection_method="deactivate",
            initialization_timeout=init_timeout_s,
            heartbeat_timeout_seconds=peer_timeout_s,
            shutdown_timeout_seconds=_LEAVE_S,
        )
    except jax.errors.JaxRuntimeError as e:
        raise ProcessLostError(
            f"the learner's {identity.count} processes did not all connect to {identity.coordinator} within "
            f"{init_timeout_s} s: {first_line(e)}"
        ) from e
    logging.info(
        "host=%d of %d coordinator=%s devices=%d of %d",
        identity.index,
        identity.count,
        identity.coordinator,
        jax.local_device_count(),
        jax.device_count(),
    )
    return Processes(distributed.global_state.client, index=jax.process_index(), count=jax.process_count())


def disconnect(hosts: Processes) -> None:
    """Disconnects, waiting a few seconds for the other processes. The last use of JAX in a process."""
    if hosts.count == 1:
        return
    try:
        jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError as e:
        logging.warning("other learner processes exited before disconnect error=%s", first_line(e))
