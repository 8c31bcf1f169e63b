"""The way into a Ray cluster."""

import contextlib
import logging
from collections.abc import Generator, Mapping

import ray
import ray.exceptions

from bridge.files import first_line

_MODE = "RAY_AUTH_MODE"


@contextlib.contextmanager
def connected(address: str, *, allow_open: bool, environ: Mapping[str, str]) -> Generator[None]:
    """Connects to a cluster that is there; what was started through it ends with the connection.

    Args:
      address: host:port of its head, or auto.
      allow_open: whether it may let in everybody.
      environ: of this process.

    Raises:
      ValueError: it lets in everybody, and that was not allowed; or it refuses us.
      TimeoutError: there is none.
    """
    check_guarded(environ, allow_open=allow_open)
    try:
        ray.init(address, namespace="sluice", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, TimeoutError) as e:
        raise TimeoutError(f"no Ray cluster at {address}: start one with `ray start --head`; {first_line(e)}") from e
    except (ray.exceptions.AuthenticationError, ray.exceptions.RaySystemError, RuntimeError) as e:
        raise ValueError(f"the Ray cluster at {address} does not let us in: {first_line(e)}") from e
    try:
        yield
    finally:
        ray.shutdown()


def check_guarded(environ: Mapping[str, str], *, allow_open: bool) -> None:
    """Refuses a cluster without tokens: who reaches its ports runs what they like on every node.

    Raises:
      ValueError: says what to set.
    """
    if not allow_open and environ.get(_MODE, "").lower() != "token":
        raise ValueError(
            f"a Ray cluster without tokens runs anybody's code: set {_MODE}=token, here and where `ray start` is "
            "called on each node (`ray get-auth-token --generate` makes the token), or give --allow_open_cluster on a "
            "network that nobody else reaches"
        )
