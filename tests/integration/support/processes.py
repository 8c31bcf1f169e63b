"""Starting this repository's test scripts as processes of their own, and waiting for what they do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]


def spawn(module: str, *args: object, stdout: int | None = None) -> subprocess.Popen[str]:
    """Runs `python -m module args` from the repository's root."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, args)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=stdout,
        text=True,
    )


def python(*args: object, env: Mapping[str, str] = {}, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Runs `python args` from the repository's root to its end, with its output."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def piped(code: str, *args: object, env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    """Starts `python -c code args` from the repository's root, with pipes for its input and output."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL: the process gets no chance to clean up."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = 120.0) -> None:
    """Returns as soon as the condition holds; fails the test if it never does."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline_s} s"
        time.sleep(0.01)  # not less: what is waited for may share the core
