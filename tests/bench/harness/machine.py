"""Speed of the machine's cores, measured between sessions: shared machines slow down while a bench runs."""

import concurrent.futures
import hashlib
import os
import statistics
import time

_BLOCK = bytes(2**20)
_SECONDS = 0.2


def speed(seconds: float = _SECONDS) -> float:
    """Returns the mean over this process's cores of the MB/s that one thread per core hashes (SHA-256)."""
    cores = sorted(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(len(cores)) as threads:
        return statistics.fmean(threads.map(lambda core: _hash_rate(core, seconds), cores))


def _hash_rate(core: int, seconds: float) -> float:
    os.sched_setaffinity(0, {core})  # of this thread alone
    start = time.perf_counter()
    end, count = start, 0
    while end - start < seconds:
        hashlib.sha256(_BLOCK).digest()
        count, end = count + 1, time.perf_counter()
    return count * len(_BLOCK) / 1e6 / (end - start)
