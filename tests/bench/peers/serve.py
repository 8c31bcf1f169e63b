"""A side of the learner bench as a process: reads a command a line, answers with one line of JSON.

    check NAME    load the weights anew, train on batch NAME; loss and gradient norm of the first update, memory
    step          one timed update
    (end of file) stop

Memory is resident set size, from /proc/self: `start` once weights, optimizer moments and batch are in place,
`peak` the high-water mark of a later update. What a side allocates for gradients counts in the peak, also where
it keeps them between updates (`gradient_bytes` is taken off its start). `empty` is before the weights were loaded.
"""

import ctypes
import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Protocol

NUM_THREADS = 2


class Side(Protocol):
    """One way to train; made anew for every batch."""

    gradient_bytes: int
    """Bytes of gradient accumulators that are held between updates."""
    version: str
    slots: int
    """Tokens that it computes in an update, padding too."""

    def __init__(self, folder: pathlib.Path, batch_name: str) -> None:
        """Puts weights, optimizer moments and batch in place."""
        ...

    def step(self) -> None:
        """One update, done when it returns."""
        ...

    def numbers(self) -> tuple[float, float]:
        """Loss and gradient norm of the last update; not timed."""
        ...


def pin() -> None:
    """Keeps this process on two cores; before any library makes its threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])


def serve(make: type[Side]) -> None:
    """Answers commands until standard input ends; argument 1 is the model folder."""
    pin()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    folder, side = pathlib.Path(sys.argv[1]), None
    for line in sys.stdin:
        command, _, batch = line.strip().partition(" ")
        if command == "check":
            side = None  # frees the one before
            side, answer = check(make, folder, batch)
        elif command == "step" and side is not None:
            answer = timed(side.step)
        else:
            raise ValueError(f"got {line!r}, wanted 'check NAME', then 'step'")
        print(json.dumps(answer), file=answers, flush=True)


def check(make: type[Side], folder: pathlib.Path, batch: str) -> tuple[Side, dict]:
    """A fresh side after three updates, and what they showed."""
    empty = resident_mb("VmRSS")
    side = make(folder, batch)
    start = resident_mb("VmRSS") - side.gradient_bytes / 2**20
    first = timed(side.step)
    loss, grad_norm = side.numbers()
    side.step()
    loss_after, _ = side.numbers()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    side.step()
    answer = {
        "version": side.version,
        "slots": side.slots,
        "loss": loss,
        "grad_norm": grad_norm,
        "loss_after": loss_after,
        "first_step_s": first["s"],
        "empty_mb": empty,
        "start_mb": start,
        "peak_mb": resident_mb("VmHWM", trim=False),
    }
    return side, answer


def timed(work: Callable[[], object]) -> dict:
    """Wall time of some work, and how much of the two cores others used meanwhile."""
    busy, own, start = busy_s(), time.process_time(), time.perf_counter()
    work()
    wall = time.perf_counter() - start
    foreign = busy_s() - busy - (time.process_time() - own)
    return {"s": wall, "foreign": max(0.0, foreign / (NUM_THREADS * wall)), "load": os.getloadavg()[0]}


def busy_s() -> float:
    """Seconds that this process's cores have worked for anyone since boot; steal is work for others."""
    cores = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    ticks = 0
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, numbers[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_mb(key: str, *, trim: bool = True) -> float:
    """VmRSS or VmHWM in MiB; freed memory is handed back to the system first."""
    if trim:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {key}")
