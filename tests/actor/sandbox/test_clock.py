"""The time of a run, from looks that are made up, and of real programs among many."""

import threading

import pytest

from actor.sandbox import languages
from actor.sandbox.inside import case
from actor.sandbox.inside.case import IDLE_FACTOR, Clock
from actor.sandbox.pool import Sandbox
from actor.sandbox.program import Case, Outcome

LOOK_S = 0.025


def looked(monkeypatch, looks: list[tuple[float, float, bool]], *, before_s: float = 0.0) -> Clock:
    """A clock that has looked at (now, CPU seconds, whether something is runnable)."""
    one = Clock(began=0.0, before_s=before_s)
    for now, cpu_s, is_runnable in looks:
        monkeypatch.setattr(case, "cpu", lambda found=(cpu_s, is_runnable): found)
        one.look(now, LOOK_S)
    return one


@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        ([(0.025, 0.025, True), (0.05, 0.05, True)], 0.05),  # runs all the time
        ([(0.025 * n, 0.01, True) for n in range(1, 1000)], 0.01),  # waits for a core
        ([(0.025 * n, 0.0, False) for n in range(1, 1001)], 25.0 / IDLE_FACTOR),  # sleeps
        ([(10.0, 0.0, False), (10.025, 0.0, False)], 2 * LOOK_S / IDLE_FACTOR),  # the first look was late
        ([(0.025, 0.02, False)], 0.02),  # it ran and went to sleep: most of that time is no idle time
        ([(0.025, 0.5, True)], 0.5),  # on several cores
    ],
)
def test_time_is_of_cores_and_a_fifth_of_what_was_seen_to_be_idle(monkeypatch, looks, seconds):
    one = looked(monkeypatch, looks)
    assert one.seconds(looks[-1][1]) == pytest.approx(seconds)
    assert one.is_over(seconds * 0.999) and not one.is_over(seconds * 1.001)


def test_time_before_the_program_was_executed_is_none_of_its_own(monkeypatch):
    one = looked(monkeypatch, [(0.025, 1.02, True)], before_s=1.0)
    assert one.seconds(1.02) == pytest.approx(0.02) and not one.is_over(0.5)


def test_child_that_a_look_counted_twice_ends_nothing(monkeypatch):
    one = looked(monkeypatch, [(0.025, 2.0, True)])
    monkeypatch.setattr(case, "cpu", lambda: (1.0, True))
    assert not one.is_over(1.5) and one.is_over(1.0)


def busy(cpu_s: float) -> str:
    return f"import time\nwhile time.process_time() < {cpu_s}: pass\nprint('done')"


def outcomes(sandbox: Sandbox, sources: list[str], timeout_s: float) -> list[Outcome]:
    """Runs all at once."""
    found: dict[int, Outcome] = {}

    def run(i: int) -> None:
        (found[i],) = sandbox.run(languages.program("python", sources[i]), [Case(timeout_s=timeout_s)])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(sources))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return [found[i] for i in range(len(sources))]


@pytest.mark.integration
def test_verdict_of_a_program_does_not_depend_on_how_many_run_beside_it(sandbox: Sandbox):
    quick, slow = busy(0.25), busy(5.0)
    got = outcomes(sandbox, [quick] * 10 + [slow], 0.7)
    assert [o.ended for o in got] == ["exited"] * 10 + ["timeout"]
    assert all(0.25 <= o.seconds < 0.7 for o in got[:10]) and got[10].seconds >= 0.7


FAMILIES = {
    "children at once": "import os, time\nfor _ in range(3): os.fork()\nwhile time.process_time() < 0.6: pass",
    "one child after the other": "import os\nwhile True:\n    pid = os.fork()\n    if pid == 0:\n"
    "        sum(range(10**6)); os._exit(0)\n    os.waitpid(pid, 0)",
    "threads": "import threading\ndef f():\n    while True: pass\n"
    "for _ in range(4): threading.Thread(target=f).start()",
    "an orphan": "import os, time\nif os.fork() == 0:\n    while True: pass\ntime.sleep(1000)",
    "a sleep": "import time\ntime.sleep(1000)",
    "a child that sleeps": "import subprocess\nsubprocess.run(['sleep', '1000'])",
    "a lock for ever": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "threads that wait for each other": "import queue, threading\nq = queue.Queue()\n"
    "t = threading.Thread(target=q.get)\nt.start()\nt.join()",
    "many short sleeps": "import time\nwhile True: time.sleep(0.001)",
}


@pytest.mark.integration
@pytest.mark.parametrize("name", FAMILIES)
def test_time_of_all_processes_counts_and_what_waits_for_itself_ends_too(sandbox: Sandbox, name: str):
    (got,) = outcomes(sandbox, [FAMILIES[name]], 0.4)
    assert got.ended == "timeout" and got.seconds >= 0.4


@pytest.mark.integration
def test_timeout_that_becomes_shorter_while_a_case_runs_ends_it(sandbox: Sandbox):
    asked = []

    def timeout_s() -> float:
        asked.append(1)
        return 1000.0 if len(asked) < 3 else 0.1

    with sandbox.open(languages.program("python", "n = input()\nwhile n == '1': pass\nprint(n)")) as box:
        process = box._process
        assert box.run(Case(timeout_s=1000.0, stdin=b"1"), timeout_s=timeout_s).ended == "timeout"
        assert len(asked) >= 3
        after = box.run(Case(timeout_s=60.0, stdin=b"2"))  # a message that came late is none of the next case's
        assert after.stdout == b"2\n" and box._process is process


@pytest.mark.integration
def test_timeout_that_becomes_longer_while_a_case_runs_lets_it_finish(sandbox: Sandbox):
    with sandbox.open(languages.program("python", busy(2.5))) as box:
        assert box.run(Case(timeout_s=2.0), timeout_s=lambda: 1000.0).stdout == b"done\n"
