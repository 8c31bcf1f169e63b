"""Tracker processes of a learner: started with it, restarted when they die, stopped with it.

Each process reads the run's metrics file itself (`learner.metrics.trackers`). So the learner never waits for a tracker,
and a hang or crash in a tracker's library cannot affect it.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from absl import logging

from configs import custom_functions
from configs.run_folder import RunFolder
from configs.schema import Config
from launch.services.track import END_S
from learner.metrics.tracker_kinds import KINDS
from learner.metrics.trackers import SentSteps

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
"""First and maximum pause before a restart, in seconds; the pause doubles each time."""
_GRACE_S = 5.0
"""Extra seconds before a process that exceeds its own timeout is killed."""


class TrackerService:
    """Tracker processes of a run, which run until this object is closed."""

    def __init__(self, config: Config, folder: pathlib.Path) -> None:
        """Starts the processes without waiting for them."""
        names = [name for name in config.run.tracker_names if name in KINDS]
        self._all = [TrackerProcess(name, folder) for name in names]

    def close(self) -> None:
        """Lets all trackers send their remaining rows concurrently, and logs the result of each."""
        for one in self._all:
            one.end()
        deadline_s = time.monotonic() + END_S + _GRACE_S
        for one in self._all:
            one.join(max(0.0, deadline_s - time.monotonic()))


class TrackerProcess:
    """Process of one tracker and its replacements after a crash."""

    def __init__(self, name: str, folder: pathlib.Path, *, command: Sequence[str] = ()) -> None:
        """Starts the process, which runs `launch.services.track` or `command`."""
        self._name, self._run = name, RunFolder(folder)
        self._command = list(command) or [
            *(sys.executable, "-P", "-m", "launch.services.track", f"--run_dir={folder.resolve()}"),
            *(f"--tracker={name}", "--follow"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Notifies the process that the run has ended."""
        with self._lock:
            self._is_ending.set()
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def join(self, seconds: float) -> None:
        """Waits at most `seconds`, then kills the process, and logs the tracker's state."""
        self._thread.join(seconds)
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._thread.join()
        try:
            marks = SentSteps.read(self._run.tracker(self._name).with_suffix(".json"))
        except (ValueError, OSError) as e:
            logging.error("tracker %s: %s", self._name, e)
            return
        if marks.num_unsure and not marks.num_left:
            logging.error(
                "tracker %s: %d of %d rows may be missing in the tracker (%s); see %s",
                self._name,
                marks.num_unsure,
                marks.num_sent,
                marks.problem or "its process was killed before it confirmed them",
                self._log,
            )
        elif marks.problem or marks.num_left:
            logging.error(
                "tracker %s: %d rows not sent (%s); send them with "
                "python -m launch.services.track --run_dir=%s --tracker=%s",
                self._name,
                marks.num_left,
                marks.problem,
                self._run.path,
                self._name,
            )
        else:
            logging.info("tracker %s: %d rows sent; %s", self._name, marks.num_sent, marks.where)

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._lock:
                if self._is_ending.is_set():
                    return
                self._process = self._start()
            code = self._process.wait()
            if self._is_ending.is_set():
                return
            logging.error(
                "tracker %s: process exited with code %d, restarting in %g s; see %s",
                self._name,
                code,
                pause_s,
                self._log,
            )
            self._is_ending.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    @property
    def _log(self) -> pathlib.Path:
        return self._run.log(f"tracker-{self._name}")

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the learner
                env=os.environ | {"PYTHONPATH": custom_functions.python_path(), "PYTHONUNBUFFERED": "1"},
            )
