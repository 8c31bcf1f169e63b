"""Serves a run's snapshots: `python -m launch.services.snapshot_server --folder=FOLDER --listen=HOST:PORT`.

SLUICE_TOKEN or SLUICE_TOKEN_FILE sets the token, SLUICE_TLS_CERT and SLUICE_TLS_KEY the certificate and its key. The
first line on stdout is the server's URL. The server exits with its parent process, or on SIGTERM.
"""

import asyncio
import os
import pathlib
import resource
import selectors
import signal
import subprocess
import sys
import time

from absl import flags

from bridge.credentials import KEY, TOKEN, TOKEN_FILE, read_tls, read_token, without_secrets
from bridge.snapshots.remote.connection_guard import MAX_CONNECTIONS
from bridge.snapshots.remote.range_server import SnapshotServer, listen, url_of
from configs import custom_functions
from launch import cli
from launch.supervision import process_tree

_FOLDER = flags.DEFINE_string("folder", None, "Snapshot folder into which the learner publishes.")
_LISTEN = flags.DEFINE_string("listen", "127.0.0.1:0", "Address and port to serve at. Port 0 selects a free port.")
_SCHEME = flags.DEFINE_enum("scheme", "https", ["http", "https"], "URL scheme. http requires a loopback address.")
_READER_WAIT_S = flags.DEFINE_float(
    "reader_grace_s", 10.0, "Seconds for which a superseded version stays available to its current readers."
)
_SLOW_READER_S = flags.DEFINE_float(
    "slow_reader_grace_s",
    0.0,
    "Additional seconds for one superseded version, for readers slower than the publish interval. Requires a third "
    "slot.",
)
_OTHER_FILES = 64
_START_S = 30.0
_END_S = 10.0
SHARED_FLAGS = ()
"""Shared flags that this command accepts."""


def main() -> int:
    """Serves until SIGTERM or SIGINT; returns 0."""
    process_tree.die_with_parent()
    cli.log_to_stderr()
    with cli.usage_errors():
        if not _FOLDER.value or _READER_WAIT_S.value <= 0 or _SLOW_READER_S.value < 0:
            raise ValueError(
                "expected --folder=FOLDER of the snapshots, --reader_grace_s > 0 and --slow_reader_grace_s >= 0"
            )
        token = read_token()
        limit, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], MAX_CONNECTIONS + _OTHER_FILES
        if limit != resource.RLIM_INFINITY and wanted > limit:
            raise ValueError(
                f"{MAX_CONNECTIONS} connections need {wanted} open files, the limit (ulimit -n) is {limit}; raise the "
                "limit"
            )
        listener, tls = listen(_LISTEN.value, scheme=_SCHEME.value, token=token, tls=read_tls())
    server = SnapshotServer(
        _FOLDER.value,
        listener,
        token=token,
        tls=tls,
        reader_grace_s=_READER_WAIT_S.value,
        slow_reader_grace_s=_SLOW_READER_S.value,
    )

    async def serve() -> None:
        serving = asyncio.create_task(server.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        print(url_of(listener, _SCHEME.value), flush=True)
        await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()

    asyncio.run(serve())
    return 0


class ServerProcess:
    """Snapshot server subprocess of the learner; it exits with this process."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        listen: str,
        scheme: str,
        reader_grace_s: float,
        slow_reader_grace_s: float = 0.0,
        log: pathlib.Path,
    ) -> None:
        """Starts the server and waits until it listens. Raises ValueError with its last log line if it did not start.

        Token and certificates come from the environment.
        """
        arguments = [
            *(f"--folder={folder}", f"--listen={listen}", f"--scheme={scheme}"),
            *(f"--reader_grace_s={reader_grace_s}", f"--slow_reader_grace_s={slow_reader_grace_s}"),
        ]
        with open(log, "ab") as err:
            begins = err.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launch.services.snapshot_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                env=without_secrets(os.environ, keep=(TOKEN, TOKEN_FILE, KEY))
                | {"PYTHONPATH": custom_functions.python_path(), process_tree.VARIABLE: str(os.getpid())},
            )
        self.url = self._first_line()
        """Server URL: scheme, address and port."""
        if not self.url:
            self.close()
            said = log.read_bytes()[begins:].decode(errors="replace").strip().splitlines()
            raise ValueError(f"snapshot server start failed: {said[-1] if said else 'no output'}")

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the server runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> None:
        """Terminates the server."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _first_line(self) -> str:
        out = self._process.stdout
        assert out is not None
        line, end_s = b"", time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while not line.endswith(b"\n") and selector.select(max(0.0, end_s - time.monotonic())):
                read = os.read(out.fileno(), 4096)
                if not read:
                    return ""
                line += read
        return line.decode().strip() if line.endswith(b"\n") else ""


if __name__ == "__main__":
    cli.run(main)
