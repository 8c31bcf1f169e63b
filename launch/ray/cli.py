"""A run on a Ray cluster: `python -m launch.ray --config=NAME [--address=auto] [--learner_on=...] [...]`.

Places the learner's processes and the actors on nodes with the requested resources and monitors them like launch.local.
Streams their logs and the live view to this terminal, and stops all processes when the run ends. The run's data goes
through its store and its snapshots, so store.url must be a database, and publish.serve or publish.bucket must be set.
"""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Generator, Mapping

from absl import flags

from bridge.files import first_line
from configs.suggestions import install_command
from launch import cli
from launch.finalize import finalize_run
from launch.live_view import StartupStatus
from launch.local import CODES
from launch.startup import prepare_run
from launch.startup.join_run import check_no_password
from launch.supervision.supervisor import Supervisor
from launch.terminal import make_console

_MODE = "RAY_AUTH_MODE"


@contextlib.contextmanager
def connected(address: str, *, allow_open: bool, environ: Mapping[str, str]) -> Generator[None]:
    """Connects to a running cluster; Ray stops everything started through the connection when it closes.

    Raises ValueError if the cluster lacks token authentication and `allow_open` is False, or if it rejects the
    connection, and TimeoutError if none is reachable at `address` (host:port of its head, or auto).
    """
    import ray
    import ray.exceptions

    check_guarded(environ, allow_open=allow_open)
    try:
        ray.init(address, namespace="sluice", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, TimeoutError) as e:
        raise TimeoutError(f"no Ray cluster at {address}: start one with `ray start --head`; {first_line(e)}") from e
    except (ray.exceptions.AuthenticationError, ray.exceptions.RaySystemError, RuntimeError) as e:
        raise ValueError(f"the Ray cluster at {address} rejected the connection: {first_line(e)}") from e
    try:
        yield
    finally:
        ray.shutdown()


def check_guarded(environ: Mapping[str, str], *, allow_open: bool) -> None:
    """Raises ValueError for a cluster without tokens, in which any client can run code, unless it is allowed."""
    if not allow_open and environ.get(_MODE, "").lower() != "token":
        raise ValueError(
            f"the Ray cluster has no token authentication, so any client can run code on it; set {_MODE}=token for "
            "this command and for `ray start` on each node (create the token with `ray get-auth-token --generate`), "
            "or set --allow_open_cluster on a trusted network"
        )


_ADDRESS = flags.DEFINE_string("address", "auto", "host:port of the cluster's head, or auto for this node's cluster.")
_LEARNER_ON = flags.DEFINE_string(
    "learner_on", "cpu", "Devices of the learner: tpu:v5p:4x4x4 (a slice), gpu[:TYPE] (gpu:H100) or cpu[:CORES]."
)
_ACTORS_ON = flags.DEFINE_string("actors_on", "cpu", "Devices of the engines: gpu[:TYPE] or cpu[:CORES].")
_ACTOR_STORE = flags.DEFINE_string(
    "actor_store", None, "Store URL for the actors, with their role and without a password; default: store.url."
)
_PLACEMENT_TIMEOUT_S = flags.DEFINE_float(
    "placement_timeout_s", 600.0, "Timeout for placing the learner on the cluster, in seconds."
)
_LOGS = flags.DEFINE_bool("logs", True, "Show the processes' logs, which are always written to the run's folder.")
_OPEN = flags.DEFINE_bool(
    "allow_open_cluster", False, "Use a cluster without RAY_AUTH_MODE=token, which accepts any client."
)


def main() -> int:
    """Runs training; returns the exit codes of launch.local."""
    with cli.usage_errors():
        if importlib.util.find_spec("ray") is None:
            raise ValueError(f"Ray is not installed: {install_command('ray')}")
    from launch.ray.ray_backend import RayBackend
    from launch.ray.resources import check_spread, parse

    console = make_console()
    with contextlib.ExitStack() as cluster:
        with cli.usage_errors():
            learner_on = parse(_LEARNER_ON.value, flag="learner_on")
            actors_on = parse(_ACTORS_ON.value, flag="actors_on")
            # Checked before the run folder stores the config, because it would refuse a corrected one.
            check_spread(prepare_run.config())
            if _ACTOR_STORE.value:
                check_no_password(_ACTOR_STORE.value)
            cluster.enter_context(connected(_ADDRESS.value, allow_open=_OPEN.value, environ=os.environ))
            with contextlib.closing(StartupStatus(console)) as at:
                prepared = prepare_run.prepare_run(("learner",), at)
            backend = RayBackend(
                prepared.config,
                prepared.folder.resolve(),
                learner_on=learner_on,
                actors_on=actors_on,
                actor_store=_ACTOR_STORE.value or prepared.config.store.url,
                placement_timeout_s=_PLACEMENT_TIMEOUT_S.value,
                console=console if _LOGS.value else None,
            )
            supervisor = Supervisor(prepared, console, backend=backend)
        ending = supervisor.run()
    finalize_run(prepared, ending)
    if supervisor.last_error and CODES[ending] in (1, cli.USAGE_ERROR):
        print(f"error: {supervisor.last_error}", file=sys.stderr)
    return CODES[ending]
