"""Timing things in turns, so that what else the machine does falls on all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping

import psutil


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
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Of each, with `_s` behind its name."""
    return {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
