"""A virtual environment of its own for libtpu, made once: beside the main one it would claim to be a TPU."""

import fcntl
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import venv
from importlib import metadata

from launch.tiny_model import cache_folder

_EXTRAS = ("learner", "tpu")


def requirements() -> list[str]:
    """What the project declares for a learner on a TPU, as pip takes it.

    Raises:
      ValueError: the project isn't installed, so nothing is declared.
    """
    try:
        declared = metadata.requires("sluice") or []
    except metadata.PackageNotFoundError as e:
        raise ValueError("sluice is not installed in this Python; run bash launch/setup.sh first") from e
    wanted = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        is_ours = requirement.startswith("sluice")
        if not is_ours and (extra is None or extra.group(1) in _EXTRAS):
            wanted.append(requirement.strip())
    return sorted(wanted)


def tpu_python() -> pathlib.Path:
    """The interpreter of the environment with jax and libtpu; made first if it is not there (about a minute).

    It lives in $SLUICE_TPU_VENV, or in the cache folder under a name that changes with the requirements.

    Raises:
      ValueError: it could not be made; the log says why.
    """
    wanted = requirements()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256("\n".join([version, *wanted]).encode()).hexdigest()
    chosen = os.environ.get("SLUICE_TPU_VENV")
    folder = pathlib.Path(chosen).expanduser().absolute() if chosen else cache_folder() / f"tpu-venv-{key[:12]}"
    python, stamp = folder / "bin" / "python", folder / ".sluice-stamp"
    if stamp.is_file() and stamp.read_text().strip() == key:
        return python
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise ValueError(f"{folder} (SLUICE_TPU_VENV) has files but is no virtual environment; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one maker at a time; a second finds it made
        if not (stamp.is_file() and stamp.read_text().strip() == key):
            print(f"making {folder} with jax[tpu] (once, about a minute)", file=sys.stderr, flush=True)
            _make(folder, python, wanted)
            stamp.write_text(f"{key}\n")
    return python


def environment(python: pathlib.Path) -> dict[str, str]:
    """The environment variables with which libtpu compiles where there is no TPU."""
    library = next((python.parent.parent / "lib").glob("python*/site-packages/libtpu/libtpu.so"), None)
    if library is None:
        raise ValueError(f"{python.parent.parent} has no libtpu; remove the folder and start again")
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "TPU_LIBRARY_PATH": str(library),
        # No metadata server to ask; what it would have said doesn't matter for compiling.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # libtpu's lock is about the chips, which aren't there: several compilers may run at once.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _make(folder: pathlib.Path, python: pathlib.Path, wanted: list[str]) -> None:
    venv.create(folder, with_pip=True, clear=folder.is_dir())
    log = folder / "install.log"
    with log.open("w") as out:
        done = subprocess.run(
            [str(python), "-P", "-m", "pip", "install", "--progress-bar", "off", *wanted],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        last = next((line for line in reversed(log.read_text().splitlines()) if "ERROR" in line), "see the log")
        raise ValueError(f"could not install jax[tpu] into {folder}: {last} (log: {log})")
