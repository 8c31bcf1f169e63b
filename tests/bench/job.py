"""One run of the main job, as a user starts it; a finished one is taken from its folder."""

import functools
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from configs.run_folder import RunFolder

PROJECT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("actor", "bridge", "configs", "launch", "learner")
"""What a run depends on."""


def run_job(config: str, overrides: Mapping[str, object], folder: pathlib.Path, *, reuse: bool) -> dict[str, Any]:
    """The run's summary, with `wall_s`: everything from the command on.

    Args:
      config: a preset's file.
      overrides: values by fields of the configuration, as in "run.seed".
      folder: the run's; deleted first, unless it holds a finished run that may be reused.
      reuse: whether it may, if it was asked for the same of the same code.

    Raises:
      RuntimeError: the job failed; with its last lines.
    """
    asked = asked_for(config, overrides)
    if reuse and (finished := finished_run(folder, asked)) is not None:
        return finished
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "launch.local", f"--config={config}", f"--config.run.dir={folder}"]
    command += [f"--config.{name}={value}" for name, value in asked["overrides"].items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    summary = json.loads(RunFolder(folder).summary.read_text()) | {"wall_s": time.monotonic() - start}
    _result(folder).write_text(json.dumps({"asked": asked, "summary": summary}))
    return summary


def asked_for(config: str, overrides: Mapping[str, object]) -> dict[str, Any]:
    """What makes a run this one and no other: JSON."""
    return {"config": config, "overrides": {k: str(v) for k, v in overrides.items()}, "code": code_hash()}


def finished_run(folder: pathlib.Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of the run that the folder holds; None if it holds none, or one that was asked for something else."""
    path = _result(folder)
    found = json.loads(path.read_text()) if path.is_file() else None
    return found["summary"] if found is not None and found["asked"] == asked else None


@functools.cache
def code_hash(*more: str) -> str:
    """BLAKE2 of the source that a run depends on, that in `more` too: one of another says nothing about this one."""
    digest = hashlib.blake2b(digest_size=8)
    for room in (*ROOMS, *more):
        for path in sorted(p for suffix in ("py", "sql") for p in (PROJECT / room).rglob(f"*.{suffix}")):
            digest.update(str(path.relative_to(PROJECT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _result(folder: pathlib.Path) -> pathlib.Path:
    return folder / "result.json"
