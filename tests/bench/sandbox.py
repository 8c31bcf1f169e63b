"""The sandbox: what it costs, and how long what it withstands takes.

    python -m tests.bench.sandbox [--small]

One small Python program (the sum of two numbers) is run in turns as a plain subprocess, in a sandbox that is started
for it, in one that waited, and as the next case in a sandbox that has run one. Then every attack of
`tests/actor/sandbox/attacks.py` is run once: how it ended, and how long after its timeout; those with a * are ours.
"""

import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from absl import app

from actor.sandbox import bwrap, languages
from actor.sandbox.bwrap import HostView
from actor.sandbox.pool import Sandbox
from actor.sandbox.process import SandboxProcess
from actor.sandbox.program import Case, SandboxLimits
from actor.sandbox.self_test import check_isolation
from tests.actor.sandbox.attacks import ALL, DEMANDED
from tests.actor.sandbox.trap import Trap
from tests.bench.harness import page, result
from tests.integration.support.processes import wait_until

SOURCE = "print(sum(map(int, input().split())))"
STDIN, STDOUT = b"19 23\n", b"42\n"
REPEATS = 100
PATIENT_S = 60.0
BARE, COLD, WARM, NEXT = "subprocess", "sandbox started for it", "sandbox that waited", "next case in a sandbox"


def costs(sandbox: Sandbox, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, by turns."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    (folder / "main.py").write_text(SOURCE)
    program, case = languages.program("python", SOURCE), Case(timeout_s=PATIENT_S, stdin=STDIN)
    python, _ = bwrap.interpreter(HostView())

    def bare() -> bytes:
        environment = {"PATH": "/usr/bin", "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run([python, "main.py"], input=STDIN, capture_output=True, cwd=folder, env=environment)
        return ran.stdout

    def cold() -> bytes:
        process = SandboxProcess(SandboxLimits(), HostView())
        try:
            process.wait_ready()
            process.hand_over(program)
            return process.run(program, program.argv, case).stdout
        finally:
            process.close()

    def warm() -> bytes:
        with sandbox.open(program) as box:
            return box.run(case).stdout

    took: dict[str, list[float]] = {name: [] for name in (BARE, COLD, WARM, NEXT)}

    def timed(name: str, way: Callable[[], bytes]) -> None:
        began = time.perf_counter()
        said = way()
        took[name].append(time.perf_counter() - began)
        if said != STDOUT:
            raise RuntimeError(f"{name} printed {said!r}")

    try:
        for _ in range(repeats):
            timed(BARE, bare)
            timed(COLD, cold)
            # What replaces used sandboxes is another core's work, or an idle moment's.
            wait_until(lambda: len(sandbox._warm) == 2, "sandboxes wait")
            timed(WARM, warm)
            wait_until(lambda: len(sandbox._warm) == 2, "sandboxes wait")
            with sandbox.open(program) as box:
                box.run(case)
                timed(NEXT, lambda: box.run(case).stdout)
    finally:
        shutil.rmtree(folder)
    return took


def starts(repeats: int) -> tuple[list[float], float]:
    """Seconds until a sandbox waits, and the MiB that one which waits takes for itself (0 if it can't be seen)."""
    took, mib = [], 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        process = SandboxProcess(SandboxLimits(), HostView())
        process.wait_ready()
        took.append(time.perf_counter() - began)
        mib = sum(_private_mib(pid) for pid in (process._process.pid, process._inner_pid))
        process.close()
    return took, mib


def _private_mib(pid: int) -> float:
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def attacks(sandbox: Sandbox) -> list[dict[str, Any]]:
    """Returns a row of each: how it ended, and what it reached or left."""
    rows = []
    for name, attack in ALL.items():
        trap = Trap(pathlib.Path(tempfile.mkdtemp(prefix="sluice-trap-")))
        os.environ["SLUICE_SECRET"] = trap.secret
        outcome, seconds = trap.spring(sandbox, attack)
        rows.append(
            {
                "name": name + ("" if name in DEMANDED else " *"),
                "how": f"{outcome.ended} {outcome.code}" if outcome.ended in ("exited", "signal") else outcome.ended,
                "wanted": outcome.ended in attack.ended and attack.says(outcome),
                "seconds": seconds,
                "timeout_s": attack.timeout_s,
                "late_s": max(0.0, seconds - attack.timeout_s),
                "problems": trap.problems(outcome),
            }
        )
        print(rows[-1], flush=True)
        trap.close()
        shutil.rmtree(trap.folder)
    return rows


def main(argv: list[str]) -> None:
    del argv
    repeats = 5 if result.SMALL.value else REPEATS
    began = time.perf_counter()
    isolation = check_isolation()
    check_s = time.perf_counter() - began
    with Sandbox(num_warm=2) as sandbox:
        took = costs(sandbox, repeats)
        ended = attacks(sandbox)
    start_s, waiting_mib = starts(repeats)
    rows = [
        {
            "name": name,
            "least_ms": min(seconds) * 1000,
            "median_ms": statistics.median(seconds) * 1000,
            "most_ms": statistics.quantiles(seconds, n=10)[-1] * 1000,
            "added_ms": (statistics.median(seconds) - statistics.median(took[BARE])) * 1000,
        }
        for name, seconds in took.items()
    ]
    added_ms = {row["name"]: row["added_ms"] for row in rows}
    withstood = {
        "attack": "{name}",
        "ended by": "{how}",
        "as it should": "{wanted}",
        "seconds": "{seconds:.2f}",
        "timeout, s": "{timeout_s:g}",
        "late, s": "{late_s:.2f}",
        "reached or left": "{problems}",
    }
    result.finish(
        "sandbox",
        __doc__,
        values={
            "sandbox_added_ms": added_ms[WARM],
            "least_added_ms": (min(took[WARM]) - min(took[BARE])) * 1000,
            "cold_added_ms": added_ms[COLD],
            "next_case_added_ms": added_ms[NEXT],
            "start_ms": statistics.median(start_s) * 1000,
            "waiting_mib": waiting_mib,
            "check_s": check_s,
            "late_s": max(one["late_s"] for one in ended),
            "problems": sum(len(one["problems"]) + (not one["wanted"]) for one in ended),
        },
        aims={
            "sandbox_added_ms": result.at_most(10.0),
            "late_s": result.at_most(1.0),
            "problems": result.at_most(0),
        },
        rows=rows,
        columns={
            "a run": "{name}",
            "least, ms": "{least_ms:.1f}",
            "median, ms": "{median_ms:.1f}",
            "90%, ms": "{most_ms:.1f}",
            "added, ms": "{added_ms:.1f}",
        },
        notes=[
            f"{repeats} runs each, Python {isolation.python_version}, sandboxes started by "
            f"{'root' if isolation.is_root else 'an ordinary user'}.",
            page.table(withstood, ended),
        ],
        beside="nothing else of ours",
        attacks=ended,
    )


if __name__ == "__main__":
    app.run(main)
