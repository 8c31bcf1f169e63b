"""Limits of open files: as they are in a process of its own."""

import resource
import subprocess
import sys

import pytest

from launch.cli import raise_open_files
from launch.startup.prepare_run import MIN_OPEN_FILES, check_open_files

PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from launch.cli import raise_open_files
raise_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 900, 900), (100, 100, 100), (32, 64, 64)])
def test_soft_limit_is_raised_to_the_hard_one(soft, hard, raised):
    call = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == f"({raised}, {hard})\n"


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(1024, -1, 2**20), (1024, 2**30, 2**20), (-1, -1, None), (2**21, -1, None)]
)
def test_limit_without_a_bound_is_raised_to_a_bound(monkeypatch, soft, hard, raised):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    raise_open_files()
    assert asked == ([(raised, hard)] if raised else [])


def test_limit_that_no_engine_starts_with_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    with pytest.raises(
        ValueError, match=rf"ulimit -n\) is 64, expected at least {MIN_OPEN_FILES}; raise the hard limit"
    ):
        check_open_files()


@pytest.mark.parametrize(("limit", "num_notes"), [(MIN_OPEN_FILES, 1), (1023, 1), (1024, 0), (-1, 0)])
def test_limit_that_may_do_is_said(monkeypatch, limit, num_notes):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert len(check_open_files()) == num_notes
