"""The peers' virtual environments: made once from their lock files, kept outside the repository.

They lie in ~/.cache/sluice/bench/<name>-<hash of the lock and the Python version>, or below $SLUICE_BENCH_CACHE. A
finished one has a stamp; one without is made again.
"""

import fcntl
import hashlib
import logging
import os
import pathlib
import platform
import subprocess
import sys
import venv

LOCKS = pathlib.Path(__file__).parent
# As launch/setup.sh: pip's own sources first, this index where they don't have the CPU build.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def cache_folder() -> pathlib.Path:
    """Where the environments lie."""
    return pathlib.Path(os.environ.get("SLUICE_BENCH_CACHE") or pathlib.Path.home() / ".cache/sluice/bench")


def ensure(name: str) -> pathlib.Path:
    """The interpreter of `<name>.lock.txt`'s environment, made if missing. Raises RuntimeError if pip fails."""
    lock = LOCKS / f"{name}.lock.txt"
    digest = hashlib.sha256(lock.read_bytes() + platform.python_version().encode()).hexdigest()[:12]
    folder = cache_folder() / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, stamp = folder / "bin/python", folder / ".complete"
    with open(folder.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # two benches must not make the same one
        if not stamp.exists():
            logging.info("making the environment of %s in %s (minutes)", name, folder)
            venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(folder)
            _install(python, lock)
            stamp.touch()
    return python


def _install(python: pathlib.Path, lock: pathlib.Path) -> None:
    pins = [line for line in lock.read_text().split() if not line.startswith("torch==")]
    for torch in (line for line in lock.read_text().split() if line.startswith("torch==")):
        quick = ["--timeout", "15", "--retries", "1"]
        if _pip(python, [*quick, torch]) and (error := _pip(python, [*quick, "--index-url", TORCH_INDEX, torch])):
            raise RuntimeError(f"{torch} is neither in pip's sources nor to be had from {TORCH_INDEX}:\n{error}")
    if error := _pip(python, pins):
        raise RuntimeError(
            f"could not install {lock.name}; the learner bench needs a package index (PyPI or a mirror that pip "
            f"is configured for), or an environment made before in {cache_folder()} ($SLUICE_BENCH_CACHE moves it):\n"
            f"{error}"
        )


def _pip(python: pathlib.Path, args: list[str]) -> str:
    """What pip said if it failed, else nothing."""
    command = [python, "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check", "-q", *args]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV")}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean)
    return done.stdout[-3000:] or f"exit status {done.returncode}" if done.returncode else ""


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for each in sys.argv[1:] or ("torch", "tunix"):
        print(ensure(each))
