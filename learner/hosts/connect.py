"""Joins the learner's processes: before anything else of JAX is used."""

import jax
from absl import logging

from learner.hosts.coordination import JaxHosts
from learner.hosts.hosts import HostLostError, Hosts, OneHost
from learner.hosts.identity import Identity

_LEAVE_S = 10
"""How long a process that ends waits for the others to end too."""


def connect(identity: Identity, *, join_s: int, silence_s: int) -> Hosts:
    """All processes of the learner, once each has come.

    From here on a process that ends without a word, is stopped, or can't be reached for `silence_s` ends all others:
    JAX aborts them (SIGABRT), wherever they wait, collectives too.

    Args:
      identity: this one's.
      join_s: how long the first one waits for the last one.
      silence_s: after that long without a sign of life a process is taken to be dead.

    Raises:
      HostLostError: not all came in time.
    """
    if identity.count == 1:
        return OneHost()
    # Of JAX's implementations for CPU the one that needs no other process manager; devices of other kinds ignore it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself; the learner has its own agreement (`Hosts.ask_to_stop`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            identity.coordinator,
            identity.count,
            identity.index,
            local_device_ids=[],  # all that this process is shown
            cluster_detection_method="deactivate",
            initialization_timeout=join_s,
            heartbeat_timeout_seconds=silence_s,
            shutdown_timeout_seconds=_LEAVE_S,
        )
    except jax.errors.JaxRuntimeError as e:
        raise HostLostError(
            f"the learner's {identity.count} processes did not all come to {identity.coordinator} within {join_s} s: "
            f"{str(e).splitlines()[0][:200]}"
        ) from e
    logging.info(
        "host=%d of %d coordinator=%s devices=%d of %d",
        identity.index,
        identity.count,
        identity.coordinator,
        jax.local_device_count(),
        jax.device_count(),
    )
    return JaxHosts()


def disconnect(hosts: Hosts) -> None:
    """Leaves together with the others; waits a few seconds for those that do not come. The last thing done with JAX."""
    if hosts.count == 1:
        return
    try:
        jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError as e:
        logging.warning("the learner's other processes are gone: %s", str(e).splitlines()[0][:200])
