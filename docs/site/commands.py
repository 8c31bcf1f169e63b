"""A page for each command: what its --help says."""

import concurrent.futures
import functools
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
_LAUNCH = ROOT / "launch"
_NOT_FOR_HANDS = {
    "__main__",
    "services.judge_server",
    "services.snapshot_server",
    "services.tracker_service",
    "tools.smollm2",
    "uv_settings",
}
"""What another process or a script starts, with arguments of its own."""


def names() -> list[str]:
    """What `python -m launch.NAME` starts."""
    folders = (_LAUNCH, *(_LAUNCH / room for room in ("services", "startup", "supervision", "tools")))
    files = [f for folder in folders for f in folder.glob("*.py") if 'if __name__ == "__main__"' in f.read_text()]
    rooms = [f.parent for folder in (_LAUNCH, _LAUNCH / "tools") for f in folder.glob("*/__main__.py")]
    found = {str(f.relative_to(_LAUNCH).with_suffix("")).replace("/", ".") for f in [*files, *rooms]}
    return sorted(found - _NOT_FOR_HANDS)


@functools.cache
def pages() -> dict[str, str]:
    """The Markdown of each command's page, by its name.

    Raises:
      RuntimeError: a command's --help fails.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names(), pool.map(_page, names()), strict=True))


def _page(name: str) -> str:
    return f"# {name}\n\n`python -m launch.{name}`\n\n```txt\n{_help(name).rstrip()}\n```\n"


def _help(name: str) -> str:
    # A process for each: two commands may name a flag alike.
    call = [sys.executable, "-P", "-m", f"launch.{name}", "--help"]
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(call, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(call[1:])} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
