"""Snapshot server of a learner: restarted when it dies or is suspended, stopped with the learner."""

import os
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Sequence

from absl import logging

from bridge.snapshots.snapshot_format import SnapshotError, version_url
from bridge.weight_types import WeightManifest
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch.services.snapshot_server import ServerProcess
from launch.startup.network_check import of_process
from launch.supervision.hang_detector import SigstopWatchdog
from launch.supervision.process_tree import kill_below, stopped_below
from learner.publish.destinations import Destination

MAX_RESTARTS = 5
"""Maximum consecutive restarts; serving for `STEADY_S` resets the count."""
STEADY_S = 60.0
READER_GRACE_S = 10.0
"""Time that a superseded version stays available to readers that have started to read it, in seconds."""
_WATCH_S = 0.5
_BACKOFF_S = 1.0


class SnapshotService:
    """Snapshot server process that runs until this object is closed."""

    def __init__(self, config: Config, folder: pathlib.Path, *, host: int = 0, num_hosts: int = 1) -> None:
        """Starts the server and waits until it listens.

        `host` is the index of this learner process, whose rows are served, of `num_hosts`. Raises ValueError if the
        token, certificate or address is invalid, or several processes share one URL.
        """
        publish = config.publish
        listen, advertise = (of_process(address, host) for address in (publish.listen, publish.advertise))
        if num_hosts > 1 and publish.advertise and advertise == publish.advertise:
            raise ValueError(
                "publish.advertise: expected {process_id} or {host} in the URL, because each learner process serves "
                f"its own rows, got {publish.advertise!r}; add one, or leave the field empty"
            )
        self._run = run_id(folder)
        self._snapshots, self._scheme = snapshot_folder(config), publish.serve
        self._waits = {"reader_grace_s": READER_GRACE_S, "slow_reader_grace_s": publish.slow_reader_grace_s}
        self._stopped = SigstopWatchdog(config.supervision.heartbeat_timeout_s)
        self._is_required = not publish.bucket
        self._log = RunFolder(folder).log(f"snapshot-server-{host}" if host else "snapshot-server")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._server = self._start(listen)
        self._listen = urllib.parse.urlsplit(self._server.url).netloc
        """Address with the actual port, which a restarted server must reuse because actors know it."""
        self.url = advertise or self._server.url
        self._failure = ""
        self._is_closing = threading.Event()
        # The server dies with the thread that started it. So one thread, which lives as long as this process, does
        # every restart.
        self._thread = threading.Thread(target=self._watch, name="snapshot server", daemon=True)
        self._thread.start()
        logging.info("snapshots served url=%s listen=%s", self.url, self._listen)

    @property
    def destination(self) -> Destination:
        """Publish target that maps a version to its URL; nothing is copied, because the server reads the slots."""
        return Destination(name="snapshot server", put=self._put, is_required=self._is_required)

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._server.pid

    def close(self) -> None:
        """Stops the server."""
        self._is_closing.set()
        self._thread.join()
        self._server.close()

    def _put(self, manifest: WeightManifest) -> Sequence[str]:
        if self._failure:
            raise SnapshotError(self._failure)
        return (version_url(self.url, self._run, manifest.version),)

    def _start(self, listen: str) -> ServerProcess:
        return ServerProcess(
            self._snapshots,
            listen=listen,
            scheme=self._scheme,
            **self._waits,
            log=self._log,
        )

    def _end_if_stopped(self) -> None:
        """Kills a suspended server, because its readers would wait, and in round mode the run with them."""
        for pid in self._stopped.look({self._server.pid} & stopped_below(os.getpid())):
            logging.error("snapshot server suspended for too long (supervision.heartbeat_timeout_s), killed")
            kill_below(pid, os.getpid())

    def _watch(self) -> None:
        num_restarts, started_s = 0, time.monotonic()
        while not self._is_closing.wait(_WATCH_S):
            code = self._server.returncode
            if code is None:
                self._end_if_stopped()
                continue
            num_restarts = 1 if time.monotonic() - started_s > STEADY_S else num_restarts + 1
            if num_restarts > MAX_RESTARTS:
                self._failure = f"the snapshot server died {num_restarts} times in a row (code {code}); see {self._log}"
                logging.error("%s", self._failure)
                return
            logging.error("snapshot server died, restarting code=%s", code)
            if self._is_closing.wait(_BACKOFF_S * (num_restarts - 1)):
                return
            started_s = time.monotonic()
            try:
                self._server.close()
                self._server = self._start(self._listen)
            except (ValueError, OSError) as e:  # the next check retries, because the port or memory may become free
                logging.error("snapshot server restart failed error=%s", e)
