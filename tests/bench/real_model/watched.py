"""A run of the main job that ends after so many minutes of training, and what it held in memory."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil

from configs.run_folder import RunFolder
from learner.metrics.metrics_writer import read_rows
from tests.bench.job import asked_for

_LOOK_S = 2.0
_ROLES = ("learner", "actor")
INTERRUPTED = 130
"""Exit code of a job that was told to end."""


def training_s(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Seconds of training up to each step: waiting, computing and publishing, from the first group on."""
    total, by_step = 0.0, {0: 0.0}
    for row in rows:
        if row["kind"] == "step":
            total += row["time/step_s"]
            by_step[row["step"]] = total
    return by_step


def run_for(
    config: str, overrides: Mapping[str, object], folder: pathlib.Path, *, bound_s: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A run's metrics, and what else was seen of it; a run of the same code that is in the folder is taken as it is.

    The job is told to end (as by Ctrl-C) once it has trained for `bound_s`. Seen are `wall_s`, all from the command on,
    and `learner_peak_bytes` and `actor_peak_bytes`: the largest resident set of each process of the role (the kernel's
    VmHWM), added up over those that were ever there.

    Raises:
      RuntimeError: the job failed; with its last lines.
    """
    asked = asked_for(config, overrides) | {"bound_s": bound_s}
    result = folder / "result.json"
    found = json.loads(result.read_text()) if result.is_file() else None
    if found is None or found["asked"] != asked:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        seen = _run(config, overrides, folder, bound_s=bound_s)
        result.write_text(json.dumps({"asked": asked, "seen": seen}))
        found = {"seen": seen}
    return list(read_rows(RunFolder(folder).metrics)), found["seen"]


def _run(config: str, overrides: Mapping[str, object], folder: pathlib.Path, *, bound_s: float) -> dict[str, float]:
    command = [sys.executable, "-m", "launch.local", f"--config={config}", f"--config.run.dir={folder}"]
    command += [f"--config.{name}={value}" for name, value in overrides.items()]
    log = folder.with_name(f"{folder.name}.log")
    start, is_told = time.monotonic(), False
    peaks: dict[tuple[str, int], int] = {}
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as job:
        while True:
            try:
                job.wait(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                pass
            look_at_memory(psutil.Process(job.pid), peaks)
            if not is_told and max(training_s(_rows(folder)).values()) > bound_s:
                job.send_signal(signal.SIGINT)
                is_told = True
    if job.returncode not in (0, INTERRUPTED):
        raise RuntimeError(f"{' '.join(command)} failed with {job.returncode}:\n{log.read_text()[-3000:]}")
    sums = {f"{role}_peak_bytes": float(sum(b for (r, _), b in peaks.items() if r == role)) for role in _ROLES}
    return {"wall_s": time.monotonic() - start, **sums}


def _rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    metrics = RunFolder(folder).metrics
    return list(read_rows(metrics)) if metrics.is_file() else []


def look_at_memory(job: psutil.Process, peaks: dict[tuple[str, int], int]) -> None:
    """Enters the peak of each process below the learner and the actors of a job, by role and process id."""
    for child in _children(job):
        role = _role(child)
        for process in (child, *_children(child)) if role else ():
            if size := _peak_bytes(process.pid):
                peaks[role, process.pid] = max(size, peaks.get((role, process.pid), 0))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:  # it has ended
        return []


def _role(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return next((role for role in _ROLES if f"launch.{role}" in command), "")


def _peak_bytes(pid: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
