"""Ctrl-C in a command's first moments: one word, no traceback."""

import os
import signal
import subprocess
import sys

import pytest

from tests.integration.support.processes import REPO

PROGRAM = """
import launch, signal, sys
def interrupt(*_): signal.raise_signal(signal.SIGINT)
if sys.argv[1:] == ["import"]:
    sys.modules["launch.cli"] = None  # nothing of the command is imported yet
    interrupt()
from launch import cli
cli.run(interrupt)
"""


@pytest.mark.parametrize("when", [["import"], []])
def test_interrupt_is_one_word_and_no_traceback(when):
    call = [sys.executable, "-c", PROGRAM, *when]
    done = subprocess.run(
        call,
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also where the tests run in the background
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")


def test_other_errors_keep_their_traceback():
    call = [sys.executable, "-c", "import launch; raise TypeError('a bug')"]
    done = subprocess.run(call, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "TypeError: a bug" in done.stderr


SPAWNER = """
import multiprocessing, signal, sys
import launch
def child():
    signal.raise_signal(signal.SIGINT)
    sys.exit(7)
if __name__ == "__main__":
    one = multiprocessing.get_context("spawn").Process(target=child)
    one.start()
    one.join()
    sys.exit(256 + one.exitcode)
"""


def test_interrupt_of_the_terminals_group_ends_a_spawned_process_without_a_word(tmp_path):
    (tmp_path / "spawner.py").write_text(SPAWNER)
    call = [sys.executable, str(tmp_path / "spawner.py")]
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (256 - signal.SIGINT, "")
