"""Timing things in turns, so that what else the machine does falls on all of them alike."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.integration.support.processes import REPO


def in_turns(works: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, after one round that doesn't count."""
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def speed_over(seconds: Mapping[str, list[float]], work: str, *, than: str) -> float:
    """How fast `work` is against another thing that was timed in turns with it: the median of the rounds' ratios."""
    return statistics.median(b / a for a, b in zip(seconds[work], seconds[than], strict=True))


def with_cpu(work: Callable[[], object], into: list[float], *, beside: int | None = None) -> Callable[[], None]:
    """`work`, which also notes how many seconds of CPU it took, those of another process (`beside`) included.

    Ratios of these say what something costs also where others use the cores.
    """

    def run() -> None:
        begin_s = time.process_time() + cpu_s(beside)
        work()
        into.append(time.process_time() + cpu_s(beside) - begin_s)

    return run


def cpu_s(pid: int | None) -> float:
    """Seconds of CPU that another process has taken so far; none if there is no other."""
    if pid is None:
        return 0.0
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Of each, with `_s` behind its name."""
    return {f"{name}_s": statistics.median(values) for name, values in seconds.items()}


def child(module: str, *arguments: object, timeout_s: float = 540.0) -> dict[str, Any]:
    """What a module of this bench prints as its last line, run in a process of its own, so that its memory goes.

    Raises:
      RuntimeError: it failed.
    """
    command = [sys.executable, "-m", f"tests.bench.publish.{module}", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def print_measured(measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Prints what a part found, with the seconds that it took, as its last line."""
    began_s = time.monotonic()
    print(json.dumps(measure(*arguments) | {"wall_s": time.monotonic() - began_s}))
