"""What is said of processes' ends, which are made up here: by each keeper of the product, and in a row."""

import json
import pathlib
import sys

import pytest

from tests.integration.faults import audit, evidence, replay
from tests.integration.faults.evidence import End, Evidence
from tests.integration.faults.keepers import KUBERNETES, SLURM, SUPERVISOR, pause_s, problems

DONE = 0
ALL = [SUPERVISOR, KUBERNETES, SLURM]


def end(code: int, *, had_new_step: bool = True, had_full_disk: bool = False) -> End:
    return End(code=code, had_new_step=had_new_step, had_full_disk=had_full_disk, said="")


def who_gives_up(process: str, *ends: End) -> list[str]:
    """The keepers that are named, of one problem or none."""
    said = problems({process: [*ends, end(DONE)]}, max_restarts=5)
    assert len(said) <= 1
    return [keeper for keeper in ALL if said and keeper in said[0]]


@pytest.mark.parametrize(
    ("process", "code", "keepers"),
    [
        ("learner-0", -9, []),
        ("learner-1", -6, []),
        ("learner-0", 1, [SUPERVISOR]),
        ("learner-0", 2, ALL),
        ("learner-1", 3, []),
        ("learner-0", 4, []),
        ("learner-1", 5, ALL),
        ("learner-0", 75, [SUPERVISOR]),
        ("a", -9, []),
        ("a", 1, []),
        ("v", 2, [SUPERVISOR, SLURM]),
        ("v", 4, []),
        ("v", 75, []),
    ],
)
def test_end_is_a_problem_by_each_keeper_that_would_not_start_the_process_again(process, code, keepers):
    assert who_gives_up(process, end(-9), end(code)) == keepers


@pytest.mark.parametrize(("code", "keepers"), [(1, []), (2, ALL), (5, ALL), (130, [SUPERVISOR])])
def test_learner_may_end_with_1_and_no_other_code_while_the_disk_of_its_run_is_full(code, keepers):
    assert who_gives_up("learner-0", end(code, had_full_disk=True)) == keepers


def test_last_life_is_not_asked_for_since_nobody_starts_it_again():
    assert problems({"learner-0": [end(-9), end(1)], "a": [end(2)]}, max_restarts=5) == []


def test_ends_in_a_row_without_a_new_step_are_counted_against_max_restarts():
    idle = [end(-9, had_new_step=False)] * 5
    assert problems({"a": [*idle, end(DONE)]}, max_restarts=5) == []
    assert problems({"a": [end(-9), *idle[1:], end(-9), *idle, end(DONE)]}, max_restarts=6) == []
    (said,) = problems({"a": [end(-9), *idle, end(DONE)]}, max_restarts=5)
    assert said.startswith("a ended 6 times without a new step")


def test_supervisor_waits_twice_as_long_each_time_in_a_row_after_what_may_pass():
    idle = [end(4, had_new_step=False)] * 7
    waits = [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert [pause_s(idle[: n + 1]) for n in range(7)] == waits
    assert [pause_s([end(-9), end(4), *idle[:n]]) for n in range(7)] == waits
    assert pause_s([end(-9), *idle[:1]]) == 4.0 and pause_s([*idle, end(4)]) == 2.0
    assert pause_s([*idle, end(-9)]) == pause_s([*idle, end(1)]) == 0.0


def test_actor_that_wants_other_limits_of_its_engine_has_not_failed():
    asked = [end(75, had_new_step=False)] * 7
    assert problems({"v": [*asked, end(DONE)]}, max_restarts=5) == []


def test_learner_that_is_started_again_more_often_than_kubernetes_does_is_a_problem():
    assert problems({"learner-0": [end(-9)] * 50 + [end(DONE)]}, max_restarts=5) == []
    (said,) = problems({"learner-0": [end(-9)] * 51 + [end(DONE)]}, max_restarts=5)
    assert "51 times; Kubernetes does 50" in said


def test_learner_all_of_whose_processes_end_well_before_the_run_is_done_is_a_problem():
    of = {"learner-0": [end(0), end(0)], "learner-1": [end(-9), end(0)]}
    assert problems(of, max_restarts=5) == []
    (said,) = problems(of | {"learner-1": [end(0), end(0)]}, max_restarts=5)
    assert "ended with 0 (life 1)" in said


def test_auditor_takes_each_end_of_each_process_from_the_evidence(tmp_path: pathlib.Path):
    run = tmp_path / "run"
    for folder in ("events", "checkpoints"):
        (run / folder).mkdir(parents=True)
    for file in ("events/learner.jsonl", "metrics.jsonl"):
        (run / file).touch()
    (run / "config.json").write_text(json.dumps({"actor": {"max_restarts": 1}}))
    ends = {"learner-0": [end(2), end(0)], "a": [end(-9), end(-9, had_new_step=False), end(0)]}
    evidence.collect(lambda question: [(None,)] if "finished_step" in question else [], ends, tmp_path)
    found: Evidence = evidence.read(tmp_path)
    assert {name: list(own) for name, own in found.ends.items()} == ends and found.max_restarts == 1
    said = audit.audit(found, num_orphans=0).problems
    assert any(p.startswith("learner-0 ended with 2 (life 1)") for p in said)
    assert any(p.startswith("a ended 2 times without a new step") for p in said)


def test_replay_that_does_not_end_is_killed_and_said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RuntimeError, match=r"not done within 0\.2 s"):
        replay.replay(tmp_path, limit_s=0.2)
