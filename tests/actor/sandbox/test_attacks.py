"""Programs that mean harm, in real sandboxes; as root, and as an ordinary user in a second run of this file."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator

import pytest

from actor.sandbox.pool import Sandbox
from tests.actor.sandbox.attacks import ALL, DEMANDED, ENDLESS_S, Attack
from tests.actor.sandbox.trap import Trap, processes_with
from tests.integration.support.processes import wait_until

pytestmark = pytest.mark.integration
REPO = pathlib.Path(__file__).resolve().parents[3]
GENEROUS_S = 30.0
"""Over the timeout; what it really took is printed, and measured by tests/bench/sandbox.py."""
ORDINARY_USER = 54_321


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-trap-"))
    one = Trap(folder)
    monkeypatch.setenv("SLUICE_SECRET", one.secret)
    yield one
    one.close()
    shutil.rmtree(folder)


def test_attacks_are_all_that_were_demanded():
    assert len(DEMANDED) == 16


@pytest.mark.parametrize("name", ALL)
def test_attack_ends_in_time_as_it_should_reaches_nothing_and_leaves_nothing(sandbox: Sandbox, trap: Trap, name: str):
    attack = ALL[name]
    outcome, seconds = trap.spring(sandbox, attack)
    print(f"{name}: {outcome.ended} {outcome.code} after {seconds:.2f} s of {attack.timeout_s}")
    assert trap.problems(outcome) == []
    assert outcome.ended in attack.ended, outcome
    assert attack.says(outcome), outcome
    assert seconds < attack.timeout_s + GENEROUS_S


def test_mark_of_a_program_is_in_the_process_table_while_it_runs(sandbox: Sandbox, trap: Trap):
    endless = Attack(source="while True: pass", ended=("timeout",), timeout_s=ENDLESS_S)
    seen: list[int] = []
    running = threading.Thread(target=lambda: trap.spring(sandbox, endless))
    running.start()
    wait_until(lambda: bool(seen.extend(processes_with(trap.mark)) or seen), "the program runs")
    running.join()
    assert len(set(seen)) == 1 and processes_with(trap.mark) == []


def other_python() -> str:
    """An interpreter of this version that an ordinary user may run."""
    for path in (sys.executable, "/usr/bin/python3"):
        asked = [path, "-c", "import sys; print(*sys.version_info[:2])"]
        try:
            said = subprocess.run(
                asked, user=ORDINARY_USER, group=ORDINARY_USER, cwd="/", capture_output=True, text=True
            )
        except OSError:
            continue
        if said.stdout.split() == [str(n) for n in sys.version_info[:2]]:
            return path
    pytest.skip("no Python of this version that another user may run")


WALLS = (
    *("4 GB allocation", "reading a host file", "opening a socket", "writing outside", "/proc of the host", "ptrace"),
    *("killing the runner", "memory in many processes"),
)
"""Attacks on what differs for an ordinary user: the mapping of users, /proc and the limits."""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root alone can")
@pytest.mark.parametrize("only", [WALLS, pytest.param((), id="all", marks=pytest.mark.nightly)])
def test_attacks_against_an_ordinary_users_sandbox_end_the_same(isolated: None, only: tuple[str, ...]):
    assert set(only) <= set(ALL)
    path = os.pathsep.join([str(REPO), sysconfig.get_path("purelib")])
    here = pathlib.Path(__file__)
    of_this = "test_attack_ends_in_time_as_it_should_reaches_nothing_and_leaves_nothing"
    files = [f"{here}::{of_this}[{name}]" for name in only] or [str(here), str(here.parent / "test_cases.py")]
    done = subprocess.run(
        [other_python(), "-B", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *files],
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=[],
        cwd=REPO,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": "/nonexistent", "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    if "cannot be isolated on this machine" in done.stdout:
        pytest.skip(
            "an ordinary user of this machine can't: "
            + done.stdout.partition("cannot be isolated on this machine: ")[2][:300]
        )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= (len(only) or len(ALL) + 1)
