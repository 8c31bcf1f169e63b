"""The sandbox: what it costs, and how long what it withstands takes.

    python -m tests.bench.sandbox [--small]

One small Python program (the sum of two numbers) is run in turns as a plain subprocess, in a sandbox that is started
for it, in one that waited, and as the next case in a sandbox that has run one. Then every attack of
`tests/actor/sandbox/attacks.py` is run once: how it ended, and how long after its timeout.

Writes `results/sandbox.{json,md}`.
"""

import dataclasses
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

from absl import app

from actor.sandbox import bwrap, languages
from actor.sandbox.bwrap import HostView
from actor.sandbox.pool import Sandbox
from actor.sandbox.process import SandboxProcess
from actor.sandbox.program import Case, SandboxLimits
from actor.sandbox.self_test import check_isolation
from tests.actor.sandbox.attacks import ALL, DEMANDED, ENDLESS_S
from tests.actor.sandbox.trap import Trap
from tests.bench.rig import report
from tests.integration.support.processes import wait_until

SOURCE = "print(sum(map(int, input().split())))"
STDIN, STDOUT = b"19 23\n", b"42\n"
REPEATS = 100
PATIENT_S = 60.0
BARE, COLD, WARM, NEXT = "subprocess", "sandbox started for it", "sandbox that waited", "next case in a sandbox"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """What came of an attack."""

    name: str
    how: str
    wanted: bool
    seconds: float
    late_s: float
    """After its timeout."""
    problems: list[str]


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


def attacks(sandbox: Sandbox) -> list[Ended]:
    """All of them."""
    ended = []
    for name, attack in ALL.items():
        trap = Trap(pathlib.Path(tempfile.mkdtemp(prefix="sluice-trap-")))
        os.environ["SLUICE_SECRET"] = trap.secret
        outcome, seconds = trap.spring(sandbox, attack)
        one = Ended(
            name=name,
            how=f"{outcome.ended} {outcome.code}" if outcome.ended in ("exited", "signal") else outcome.ended,
            wanted=outcome.ended in attack.ended and attack.says(outcome),
            seconds=seconds,
            late_s=max(0.0, seconds - attack.timeout_s),
            problems=trap.problems(outcome),
        )
        print(one, flush=True)
        ended.append(one)
        trap.close()
        shutil.rmtree(trap.folder)
    return ended


def main(argv: list[str]) -> None:
    del argv
    repeats = 5 if report.SMALL.value else REPEATS
    began = time.perf_counter()
    isolation = check_isolation()
    check_s = time.perf_counter() - began
    with Sandbox(num_warm=2) as sandbox:
        took = costs(sandbox, repeats)
        ended = attacks(sandbox)
    start_s, waiting_mib = starts(repeats)
    median = {name: statistics.median(seconds) for name, seconds in took.items()}
    added_ms = {name: (median[name] - median[BARE]) * 1000 for name in took}
    worst = max(ended, key=lambda one: one.late_s)
    problems = sum(len(one.problems) + (not one.wanted) for one in ended)
    withstood = report.Table(
        columns=["attack", "ended by", "seconds", "timeout, s", "late, s", "reached or left"],
        rows=[
            [
                one.name + ("" if one.name in DEMANDED else " *"),
                one.how if one.wanted else f"{one.how}, not as it should",
                f"{one.seconds:.2f}",
                f"{ALL[one.name].timeout_s:g}",
                f"{one.late_s:.2f}",
                ", ".join(one.problems) or "nothing",
            ]
            for one in ended
        ],
    )
    report.finish(
        "sandbox",
        title="The sandbox",
        about=[(__doc__ or "").split("\n\n")[2].replace("\n", " ")],
        table=report.Table(
            columns=["a run", "least, ms", "median, ms", "90%, ms", "added, ms", "times a subprocess"],
            rows=[
                [
                    name,
                    f"{min(seconds) * 1000:.1f}",
                    f"{median[name] * 1000:.1f}",
                    f"{statistics.quantiles(seconds, n=10)[-1] * 1000:.1f}",
                    f"{added_ms[name]:.1f}",
                    f"{median[name] / median[BARE]:.2f}",
                ]
                for name, seconds in took.items()
            ],
        ),
        remarks=[
            f"{repeats} runs each, Python {isolation.python_version}, sandboxes started by "
            f"{'root' if isolation.is_root else 'an ordinary user'}. A sandbox waits "
            f"{statistics.median(start_s) * 1000:.0f} ms after its start and takes {waiting_mib:.0f} MiB of its own "
            "while it waits (0: not to be seen by this user). The test of itself at an actor's start takes "
            f"{check_s:.1f} s.",
            f"The attacks; those with a * are ours. An endless one has a timeout of {ENDLESS_S} s.",
            withstood.markdown(),
            f"The latest was {worst.name}, {worst.late_s:.2f} s after its timeout.",
        ],
        values={
            "sandbox_added_ms": added_ms[WARM],
            "least_added_ms": (min(took[WARM]) - min(took[BARE])) * 1000,
            "cold_added_ms": added_ms[COLD],
            "next_case_added_ms": added_ms[NEXT],
            "start_ms": statistics.median(start_s) * 1000,
            "waiting_mib": waiting_mib,
            "check_s": check_s,
            "late_s": worst.late_s,
            "problems": problems,
        },
        aims={
            "sandbox_added_ms": report.Aim(value=added_ms[WARM], aim=10.0, at_least=False).to_json(),
            "late_s": report.Aim(value=worst.late_s, aim=1.0, at_least=False).to_json(),
            "problems": report.Aim(value=problems, aim=0, at_least=False).to_json(),
        },
        data={"attacks": [dataclasses.asdict(one) for one in ended]},
        figure=False,
        beside="nothing else of ours",
    )


if __name__ == "__main__":
    app.run(main)
