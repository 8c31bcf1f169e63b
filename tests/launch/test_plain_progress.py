"""Lines about a run that starts slowly, by a clock that the test turns."""

import itertools
import json
import re

import pytest

from configs.schema import Config
from configs.sections import RunConfig
from launch import live_view
from launch.live_view import PlainProgress, RunView


class Started:
    """A run whose start is looked at every tenth of a second."""

    def __init__(self, folder) -> None:
        self.now_s = 1000.0
        self.lines: list[tuple[float, str]] = []
        self.file = folder / "metrics.jsonl"
        self.view = RunView(Config(preset="test", run=RunConfig(num_updates=40)), folder)
        self.announcer = PlainProgress(
            self.view, lambda line: self.lines.append((self.now_s - 1000, line)), lambda: self.now_s
        )

    def look(self, seconds: float, **status: str) -> None:
        """Lets so much time pass, in which the processes do this."""
        self.view.status = {name.replace("_", "-"): doing for name, doing in status.items()}
        for _ in range(round(seconds * 10)):
            self.announcer.update(self.view.update())
            self.now_s += 0.1

    def step(self, step: int) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps({"kind": "step", "step": step, "reward/mean": 0.5}) + "\n")

    @property
    def said(self) -> list[str]:
        """Without their times and without heartbeats."""
        lines = [re.sub(r"^\[ *\d+ s\] ", "", line) for _, line in self.lines]
        return [line for line in lines if not line.startswith("still starting: ")]


@pytest.fixture
def run(tmp_path):
    return Started(tmp_path)


def test_start_of_sixty_seconds_says_each_thing_once_when_it_begins(run):
    run.look(3, learner="pid 1, starting", actor_0="pid 2, starting")
    run.look(9, learner="pid 1, reading the prompts", actor_0="pid 2, importing vLLM")
    run.look(30, learner="pid 1, waiting", actor_0="pid 2, engine: building the model")
    run.look(2, learner="pid 1, waiting", actor_0="pid 2, importing vLLM")  # it comes back to what was said
    run.look(16, learner="pid 1, compiling accumulate (8 x 128 tokens)", actor_0="pid 2")
    assert run.said == [
        "learner: pid 1, starting",
        "actor-0: pid 2, starting",
        "learner: reading the prompts",
        "actor-0: importing vLLM",
        "learner: waiting",
        "actor-0: engine: building the model",
        "learner: compiling accumulate (8 x 128 tokens)",
        "actor-0: pid 2",
    ]
    assert run.lines[0][0] < 0.05  # progress from the first second


def test_start_without_news_prints_a_heartbeat_with_elapsed_times_every_five_seconds(run):
    run.look(3, learner="pid 1, starting", actor_0="pid 2, starting")
    run.look(600, learner="pid 1, waiting", actor_0="pid 2, engine: building the model")
    run.look(9, learner="pid 1, waiting", actor_0="pid 2")
    at_s = [0.0, *(at_s for at_s, _ in run.lines), 612.0]
    assert max(later - sooner for sooner, later in itertools.pairwise(at_s)) < live_view.WAIT_MESSAGE_S + 0.15
    beats = [line for _, line in run.lines if "still" in line]
    assert beats[0].endswith("still starting: learner: waiting, 5 s; actor-0: engine: building the model, 5 s")
    assert beats[-1].endswith("still starting: learner: waiting, 605 s; actor-0: running, 5 s")
    assert len(set(beats)) == len(beats)


def test_step_that_takes_long_is_said_at_growing_distances_and_never_the_same(run):
    run.step(1)
    run.look(600, learner="pid 1, waiting", actor_0="pid 2")
    still = [(round(at_s), line) for at_s, line in run.lines if "still" in line]
    assert [at_s for at_s, _ in still] == [60, 180, 420]
    assert "still at step 1, no progress for 60 s: learner: pid 1, waiting; actor-0: pid 2" in still[0][1]
    assert len({line for _, line in run.lines}) == len(run.lines) == 4


def test_steps_are_said_when_they_are_new_and_not_too_often(run):
    run.look(1, learner="pid 1", actor_0="pid 2")
    for step in range(1, 11):
        run.step(step)
        run.look(1, learner="pid 1", actor_0="pid 2, waiting")
    run.look(30, learner="pid 1", actor_0="pid 2, waiting")
    steps = [line for line in run.said if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/40", "6/40", "10/40"]
    assert len(set(run.said)) == len(run.said)


def test_evaluations_are_said_each(run):
    run.look(1, learner="pid 1")
    with open(run.file, "a") as file:
        file.writelines(json.dumps({"kind": "eval", "step": s, "eval/reward": s / 8}) + "\n" for s in (0, 2))
    run.look(1, learner="pid 1")
    assert run.said[1:] == ["held-out reward 0.000 at step 0", "held-out reward 0.250 at step 2"]


def test_evaluations_of_an_earlier_start_are_not_said_again(run):
    rows = [{"kind": "eval", "step": s, "eval/reward": s / 8} for s in (0, 2, 4)]
    run.file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    run.look(1, learner="pid 1")
    rewritten = run.file.with_name("new")
    rewritten.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewritten.rename(run.file)
    run.look(1, learner="pid 1")
    assert run.said[1:] == ["held-out reward 0.500 at step 4"]


def test_of_many_actors_changes_are_gathered(run):
    def look(seconds: float, loading: int) -> None:
        actors = {f"actor_{i}": f"pid {i}, {'loading' if i < loading else 'starting'}" for i in range(64)}
        run.look(seconds, learner="pid 99, waiting", **actors)

    for loading in range(65):
        look(0.5, loading)
    assert run.said[:2] == ["learner: pid 99, waiting", "64 actors: starting"]
    assert len(run.said) <= 2 * (32.5 / live_view.STEP_LINE_S + 1) and len(set(run.said)) == len(run.said)
