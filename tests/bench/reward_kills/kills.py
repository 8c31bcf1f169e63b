"""The kills: which, drawn by a seed, and how each is done. One thread does all of it, and continues what it stopped."""

import contextlib
import dataclasses
import heapq
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from launch.supervision.process_tree import descendants, environment
from tests.bench.reward_kills import busy, judge_server

_WORKER, _ZYGOTE = "actor.rewards.verifier_worker", "actor.environments.fork_server"
KINDS = (
    ("worker", "kill"), ("worker", "stop"), ("worker", "stop for a while"),
    ("episode", "kill"), ("episode", "stop"),
    ("zygote", "kill"), ("zygote", "stop for a while"),
    ("judge", "kill"), ("judge", "stop for a while"), ("judge", "500"), ("judge", "garbage"),
)  # fmt: skip
RARE = ("zygote", "stop")
"""Once in so many rounds of the others: nobody continues it, the actor ends it after
supervision.heartbeat_timeout_s."""
ONE_IN = 4
PAUSE_S = (1.0, 4.5)
"""Between two kills."""
AWAY_S = (0.5, 12.0)
"""How long a judge is dead, or somebody stands still, who comes back."""
_LOOK_S = 0.05
_TARGET_S = 5.0
"""How long a kill waits for a process that is at work; then it takes an idle one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One that is to be done."""

    target: str
    how: str
    pause_s: float
    """After the one before."""
    outage_timeout_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """One that was done."""

    target: str
    how: str
    at_s: float
    """Unix time."""
    was_busy: bool


def draw(seed: int) -> Iterator[Kill]:
    """Without end; each kind as often as the others, but the rare one."""
    source = random.Random(seed)
    for number in itertools.count():
        kinds = [*KINDS, *([RARE] if number % ONE_IN == ONE_IN // 2 else [])]
        source.shuffle(kinds)
        for target, how in kinds:
            yield Kill(
                target=target, how=how, pause_s=source.uniform(*PAUSE_S), outage_timeout_s=source.uniform(*AWAY_S)
            )


class JudgeProcess:
    """The judge's endpoint: always at the same port."""

    def __init__(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of its API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int | None:
        """None while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """At its port, again."""
        self.kill()
        command = [sys.executable, "-P", "-m", judge_server.__name__, str(self.port)]
        self._process = subprocess.Popen(command, env=os.environ | environment("reward-kills-judge"))

    def kill(self) -> None:
        """Leaves no zombie."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def below(pid: int) -> set[psutil.Process]:
    """Returns all processes below one; each is itself and no later one of its id."""
    found = set()
    for child in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(child))
    return found


def find(run: int) -> dict[str, list[psutil.Process]]:
    """Returns verifier workers, zygotes and episodes' processes below the run's command."""
    found: dict[str, list[psutil.Process]] = {"worker": [], "zygote": [], "episode": []}
    for process in sorted(below(run), key=lambda p: p.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            command, parent = process.cmdline(), process.parent()
            if _WORKER in command:
                found["worker"].append(process)
            elif _ZYGOTE in command:
                is_forked = parent is not None and _ZYGOTE in parent.cmdline()
                found["episode" if is_forked else "zygote"].append(process)
    return found


def status(process: psutil.Process) -> str:
    """Returns `psutil.STATUS_*`; that of a process that is gone is dead."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    return psutil.STATUS_DEAD


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signals a process; returns False if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return True
    return False


class Killer:
    """Does kills on a run."""

    def __init__(self, run: int, judge: JudgeProcess, busy_folder: pathlib.Path, log: pathlib.Path) -> None:
        """`run`: the process of the run's command."""
        self._run, self._judge, self._busy, self._log = run, judge, busy_folder, log
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.done: list[Done] = []
        self.seen: set[psutil.Process] = set()
        """Every process of the run that was seen."""

    def wait(self, seconds: float) -> None:
        """Time goes by; who is to come back comes back."""
        end_s = time.monotonic() + seconds
        while True:
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            self.seen |= below(self._run)
            if time.monotonic() >= end_s:
                return
            time.sleep(_LOOK_S)

    def settle(self) -> None:
        """Who is away comes back now."""
        while self._later:
            heapq.heappop(self._later)[2]()

    def do(self, kill: Kill) -> bool:
        """Waits for the pause, and for somebody to hit; False if there is nobody."""
        self.wait(kill.pause_s)
        process, was_busy = self._find(kill.target)
        if process is None or not self._hit(process, kill):
            return False
        one = Done(target=kill.target, how=kill.how, at_s=time.time(), was_busy=was_busy)
        self.done.append(one)
        with self._log.open("a") as log:
            log.write(
                json.dumps(dataclasses.asdict(one) | {"pid": process.pid, "outage_timeout_s": kill.outage_timeout_s})
                + "\n"
            )
        return True

    def _find(self, target: str) -> tuple[psutil.Process | None, bool]:
        """Somebody at work, if there is anybody within a while; else an idle one."""
        end_s, idle = time.monotonic() + _TARGET_S, None
        while time.monotonic() < end_s:
            found = self._candidates(target)
            working = [process for process in found if self._is_busy(target, process.pid)]
            if working:
                return random.Random(len(self.done)).choice(working), True
            idle = found[0] if found else None
            self.wait(0.0)
            time.sleep(_LOOK_S / 5)
        return idle, False

    def _candidates(self, target: str) -> list[psutil.Process]:
        if target == "judge":
            return [psutil.Process(self._judge.pid)] if self._judge.pid is not None else []
        found = find(self._run)[target]
        return [process for process in found if status(process) != psutil.STATUS_STOPPED]

    def _is_busy(self, target: str, pid: int) -> bool:
        if target == "zygote":
            return bool(find(self._run)["episode"])
        return busy.is_busy(self._busy, pid)

    def _hit(self, process: psutil.Process, kill: Kill) -> bool:
        if kill.how in ("500", "garbage"):
            return send(process, signal.SIGUSR1 if kill.how == "500" else signal.SIGUSR2)
        if kill.how == "kill":
            if kill.target == "judge":
                self._judge.kill()
                self._after(kill.outage_timeout_s, self._judge.start)
                is_hit = True
            else:
                is_hit = send(process, signal.SIGKILL)
            busy.take(self._busy, process.pid)
            return is_hit
        is_hit = send(process, signal.SIGSTOP)
        if kill.how == "stop for a while":
            self._after(kill.outage_timeout_s, lambda: send(process, signal.SIGCONT))
        return is_hit

    def _after(self, seconds: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), lambda: (what(), None)[1]))
