"""Drives the sides: each its own process, all started and checked one after the other, then timed in turns."""

import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
from collections.abc import Sequence

from tests.bench.peers.serve import NUM_THREADS

ROOT = pathlib.Path(__file__).resolve().parents[3]
MAX_FOREIGN = 0.15
"""Share of the two cores that others may have used during a timing."""
RETRIES = 2
TOLERANCE = 1e-3
"""Largest relative difference of loss and gradient norm from the reference side's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A side: how to start it."""

    name: str
    python: pathlib.Path
    module: str
    args: tuple[str, ...] = ()


class Process:
    """A running side."""

    def __init__(self, entry: Entry, model: pathlib.Path, log: pathlib.Path) -> None:
        self.name, self._log = entry.name, log
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": str(NUM_THREADS),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        with open(log, "w") as err:
            self._process = subprocess.Popen(
                [entry.python, "-m", entry.module, model, *entry.args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=ROOT,
                env=environment,
            )

    def ask(self, command: str) -> dict:
        """Sends a command; its answer. Raises RuntimeError with the end of its log if the process ended."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"side {self.name} died at {command!r}:\n{self._log.read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def difference(got: float, want: float) -> float:
    """Relative; infinite if either is not finite."""
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return abs(got - want) / max(abs(want), 1e-12)


def check(processes: Sequence[Process], batch: str, reference: str) -> dict[str, dict]:
    """Each side's answer to `check`, with its differences from the reference side and whether they are small."""
    answers = {p.name: p.ask(f"check {batch}") for p in processes}
    want = answers[reference]
    for answer in answers.values():
        answer["difference"] = {k: difference(answer[k], want[k]) for k in ("loss", "grad_norm", "loss_after")}
        answer["right"] = max(answer["difference"].values()) <= TOLERANCE
        answer["peak_over_start_gb"] = (answer["peak_mb"] - answer["start_mb"]) * 2**20 / 1e9
        answer["peak_over_empty_gb"] = (answer["peak_mb"] - answer["empty_mb"]) * 2**20 / 1e9
    return answers


def timings(processes: Sequence[Process], *, rounds: int) -> dict[str, list[dict]]:
    """Times the sides in turns, the others idle; a timing that others disturbed is taken again, at most twice.

    The first round warms up and is dropped. Each round starts with another side.
    """
    kept: dict[str, list[dict]] = {p.name: [] for p in processes}
    for i in range(rounds + 1):
        shift = i % len(processes)
        for process in (*processes[shift:], *processes[:shift]):
            tries = [process.ask("step")]
            while i and tries[-1]["foreign"] > MAX_FOREIGN and len(tries) <= RETRIES:
                tries.append(process.ask("step"))
            if i:
                best = min(tries, key=lambda t: t["foreign"])
                kept[process.name].append(best | {"tries": len(tries), "clean": best["foreign"] <= MAX_FOREIGN})
    return kept


def summary(times: list[dict]) -> dict:
    """Median seconds over the clean timings, over all if fewer than three are clean (`disturbed`)."""
    clean = [t["s"] for t in times if t["clean"]]
    used = clean if len(clean) >= min(3, len(times)) else [t["s"] for t in times]
    return {
        "s": statistics.median(used),
        "s_min": min(used),
        "s_max": max(used),
        "rounds": len(times),
        "clean_rounds": len(clean),
        "disturbed": len(used) != len(clean),
        "foreign": statistics.median(t["foreign"] for t in times),
        "load": statistics.median(t["load"] for t in times),
    }
