"""A trial store: `python -m launch.tools.store_server --dir=DIR --listen=HOST:PORT --cert=FILE --key=FILE`.

Serves until Ctrl-C or SIGTERM, and continues with the data in DIR when restarted. Outside loopback it accepts only
encrypted connections, which requires this machine's own PostgreSQL (apt-get install postgresql). Prints the settings of
learner and actors, whose passwords are in files that only you can read. For your own database, --print_sql prints the
SQL that its administrator runs once.
"""

import pathlib
import signal
import socket
import sys
from types import FrameType

from absl import flags

from launch import cli
from launch.supervision import process_tree
from launch.tools.store_server import trial_store

_DIR = flags.DEFINE_string("dir", None, "Folder for the data and the passwords, created if needed.")
_LISTEN = flags.DEFINE_string("listen", "127.0.0.1:5432", "Address and port. 0.0.0.0:PORT listens on all addresses.")
_ADVERTISE = flags.DEFINE_string(
    "advertise", None, "Host name that clients dial, if it differs from the listen address."
)
_CERT = flags.DEFINE_string("cert", None, "PEM file of the server's certificate.")
_KEY = flags.DEFINE_string("key", None, "PEM file of the certificate's private key.")
_PRINT_SQL = flags.DEFINE_boolean("print_sql", False, "Print the SQL of the schema and the roles, and start nothing.")


_LOOK_S = 0.5
SHARED_FLAGS = ()
"""Shared flags that this command accepts."""


class _StopError(Exception):
    pass


def main() -> int:
    """Serves until stopped; returns 1 if the server exited by itself."""
    process_tree.die_with_parent()
    with cli.usage_errors():
        if _PRINT_SQL.value:
            print(trial_store.administrators_sql())
            return 0
        place = _place()
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        try:
            with trial_store.serving(place) as cluster:
                print(f"{place.describe()}\n\nserving at {place.host}:{place.port} (Ctrl-C stops it)", flush=True)
                while (code := cluster.wait(_LOOK_S)) is None:
                    pass
                print(f"error: PostgreSQL exited ({code}); see {cluster.log}", file=sys.stderr)
                return 1
        except _StopError:
            return 0


def _stop(signum: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(signum, signal.SIG_IGN)  # ignore further signals during the shutdown
    raise _StopError


def _place() -> trial_store.TrialLocation:
    if _DIR.value is None:
        raise ValueError("set --dir=FOLDER")
    host, port = parse_address(_LISTEN.value)
    everywhere = host in ("0.0.0.0", "::", "*")
    return trial_store.TrialLocation(
        folder=pathlib.Path(_DIR.value).absolute(),
        host=host,
        port=port,
        advertise=_ADVERTISE.value or (socket.gethostname() if everywhere else host),
        certificate=_path(_CERT.value),
        key=_path(_KEY.value),
    )


def parse_address(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, with an IPv6 address in brackets; raises ValueError if the text has another format."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"--listen={text}: expected HOST:PORT, as in 127.0.0.1:5432")
    return host, int(port)


def _path(text: str | None) -> pathlib.Path | None:
    return pathlib.Path(text) if text else None


if __name__ == "__main__":
    cli.run(main)
