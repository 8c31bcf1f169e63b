"""One page per command with its --help text."""

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
    "startup.tiny_model",
    "supervision.snapshot_cleanup",
    "tools.smollm2",
    "uv_settings",
}
"""Modules that only other processes or scripts start."""
_SHARED = "\n\nPresets: --config=NAME"
"""Start of the help that all commands with a config share."""
_SEE = """
The command also accepts all [config fields](../reference/fields.md) as `--config.FIELD=VALUE`. `--config` accepts
[presets](../papers.md) and [recipes](../recipes.md).
"""


def names() -> list[str]:
    """Returns the modules that `python -m launch.NAME` starts."""
    folders = (_LAUNCH, *(_LAUNCH / room for room in ("services", "startup", "supervision", "tools")))
    files = [f for folder in folders for f in folder.glob("*.py") if 'if __name__ == "__main__"' in f.read_text()]
    rooms = [f.parent for folder in (_LAUNCH, _LAUNCH / "tools") for f in folder.glob("*/__main__.py")]
    found = {str(f.relative_to(_LAUNCH).with_suffix("")).replace("/", ".") for f in [*files, *rooms]}
    return sorted(found - _NOT_FOR_HANDS)


@functools.cache
def pages() -> dict[str, str]:
    """Returns the Markdown of each command's page by its name.

    Raises:
      RuntimeError: a command's --help fails.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names(), pool.map(_page, names()), strict=True))


def _page(name: str) -> str:
    own, shared, _ = _help(name).rstrip().partition(_SHARED)
    page = f"# {name}\n\n`python -m launch.{name}`\n\n```txt\n{own}\n```\n"
    return page + _SEE if shared else page


def _help(name: str) -> str:
    # One process per command, because two commands may define the same flag.
    call = [sys.executable, "-P", "-m", f"launch.{name}", "--help"]
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(call, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(call[1:])} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
