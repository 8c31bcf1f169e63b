"""`launch.tools.runs`: the table, and the command on a store in a file."""

import dataclasses

import pytest

from bridge.store.admin import RunState
from bridge.store.open import SqliteStore
from launch.tools.runs_table import duration, render, size
from tests.integration.support.processes import python

RUN = RunState(
    run="0a1b",
    name="one",
    leader="",
    finished_step=None,
    step=None,
    num_trained=0,
    num_waiting=0,
    num_bytes=0,
    num_objects=0,
    silent_s=None,
    live_actors=(),
)


def command(*arguments: str) -> tuple[int, list[str]]:
    done = python("-m", "launch.tools.runs", *arguments)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_table_is_aligned_and_says_what_state_each_run_is_in():
    led = dataclasses.replace(
        RUN, run="2c", leader="host:/runs", step=12, num_trained=96, num_waiting=1000, num_bytes=1_500_000,
        num_objects=3, silent_s=1.4, live_actors=("a", "b"),
    )  # fmt: skip
    finished = dataclasses.replace(RUN, name="longer name", finished_step=40, step=38, silent_s=7200.0)
    assert render([RUN, led, finished]).splitlines() == [
        "run   name         state       step  trained  waiting              size  heartbeat  learner     actors alive",
        "0a1b  one          no learner     -        0        0               0 B      never  -           -",
        "2c    one          led           12       96     1000  2 MB + 3 objects    1 s ago  host:/runs  a, b",
        "0a1b  longer name  finished      40        0        0               0 B    2 h ago  -           -",
    ]
    assert render([]) == "no runs"


@pytest.mark.parametrize(
    ("num_bytes", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (3 * 10**12, "3.0 TB")]
)
def test_size_is_in_a_unit_that_people_read(num_bytes, said):
    assert size(num_bytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "never"), (-0.2, "0 s ago"), (119.0, "119 s ago"), (120.0, "2 min ago"), (3 * 86400.0, "3 d ago")],
)
def test_duration_is_in_the_largest_unit_of_which_there_are_two(seconds, said):
    assert duration(seconds) == said


@pytest.mark.heavy
def test_command_lists_the_run_of_a_file_and_drops_none(tmp_path):
    url = f"sqlite:///{tmp_path}/store.sqlite"
    code, lines = command(f"--store={url}")
    assert code == 2 and lines == [f"error: store {tmp_path}/store.sqlite does not exist"]
    store = SqliteStore(tmp_path / "store.sqlite")
    store.acquire_leadership("here", lease_s=1e6)
    store.finish(7)
    store._incarnation = None  # nor resigns
    store.close()
    code, (_, line) = command(f"--store={url}")
    assert code == 0 and line.split()[:4] == ["local", "-", "finished", "7"] and "here" in line
    code, lines = command(f"--store={url}", "--drop=local")
    assert code == 2 and len(lines) == 1 and "remove the run's folder" in lines[0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "set --store=URL"),
        (["--store=postgresql://u:secret@h/d"], "PGPASSFILE"),
        (["--store=sqlite:////x", "--unfence=a"], "--unfence=ACTOR and --run=RUN require each other"),
        (["--store=sqlite:////x", "--force"], "--force and --bucket require --drop"),
    ],
)
def test_command_that_is_given_too_little_says_what_to_give(arguments, said):
    code, lines = command(*arguments)
    assert code == 2 and len(lines) == 1 and said in lines[0] and "secret" not in lines[0]
