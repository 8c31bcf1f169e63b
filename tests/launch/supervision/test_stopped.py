"""An actor's watch on what is below it, in a process of its own: it would end other tests' stopped processes."""

import pytest

from tests.integration.support.processes import python

PROGRAM = """
import os, signal, subprocess, sys
from launch.supervision.hang_detector import end_stopped_processes
stopped, running = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
os.kill(stopped.pid, signal.SIGSTOP)
done = end_stopped_processes(1.5)
print(stopped.wait(), running.poll())
print([str(stopped.pid) in line and "suspended" in line for line in done] == [True])
running.kill()
"""


@pytest.mark.heavy
def test_process_below_that_was_stopped_is_killed_and_one_that_runs_is_not():
    done = python("-c", PROGRAM)
    assert done.stdout.splitlines() == ["-9 None", "True"], done.stderr
