"""Sandboxes that die or stand still under an answer: the machine's fault, never a verdict."""

import json
import os
import pathlib
import shutil
import signal

import pytest

from actor.rewards.types import Context, Response, Score
from actor.rewards.verifiers import code
from actor.sandbox import process
from actor.sandbox.pool import Sandbox
from actor.sandbox.process import SandboxProcess
from actor.sandbox.program import SandboxError
from bridge.rollout_types import Task
from configs.sections import RewardsConfig

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("isolated")]

SETTINGS = RewardsConfig()
RIGHT = {
    "python": "import time\ntime.sleep(1)\nprint(sum(map(int, input().split())))",
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
}
STALLED_S = 0.5


def judged(language: str = "python", settings: RewardsConfig = SETTINGS) -> Score:
    if language == "c" and "gcc" not in code.open_sandbox(settings).tools():
        pytest.skip("the sandbox lacks gcc")
    of = {"tests": [{"input": "1 2\n", "output": "3\n"}], "code_in": "text", "language": language}
    task = Task.judged_by("code", answer="", metadata=json.dumps(of))
    response = Response(text=RIGHT[language], finish="stop", num_tokens=1)
    return code.score(response, task, Context(settings=settings))


def kill_inner(one: SandboxProcess) -> None:
    os.kill(one._inner_pid, signal.SIGKILL)


def kill_outer(one: SandboxProcess) -> None:
    one._process.kill()


def stall(one: SandboxProcess) -> None:
    os.kill(one._inner_pid, signal.SIGSTOP)


def disturb(monkeypatch, at: str, what, *, times: int) -> list[SandboxProcess]:
    """Before the first so many calls of a method, something happens to the sandbox; returns those it happened to."""
    code.open_sandbox(SETTINGS)  # its own test of isolation is not what is disturbed
    disturbed: list[SandboxProcess] = []
    method = getattr(SandboxProcess, at)
    patient_s = process.PREPARE_S

    def disturbed_method(self, *args, **options):
        is_due = len(disturbed) < times
        if is_due:
            disturbed.append(self)
            what(self)
        monkeypatch.setattr(process, "PREPARE_S", STALLED_S if is_due and what is stall else patient_s)
        return method(self, *args, **options)

    monkeypatch.setattr(SandboxProcess, at, disturbed_method)
    return disturbed


@pytest.mark.parametrize(
    ("language", "at", "what"),
    [
        ("python", "run", kill_inner),
        ("python", "run", kill_outer),
        ("python", "run", stall),
        ("python", "_outcome", kill_inner),
        ("python", "_outcome", kill_outer),
        ("c", "run", kill_inner),
        ("c", "run", stall),
        ("c", "_outcome", kill_outer),
    ],
)
def test_sandbox_that_dies_or_stalls_costs_a_right_answer_nothing(monkeypatch, language, at, what):
    disturbed = disturb(monkeypatch, at, what, times=1)
    assert judged(language).verdict == "ok" and len(disturbed) == 1


@pytest.mark.parametrize(("language", "at"), [("python", "run"), ("python", "_outcome"), ("c", "run")])
def test_sandboxes_that_die_each_time_are_no_verdict(monkeypatch, language, at):
    disturbed = disturb(monkeypatch, at, kill_inner, times=100)
    with pytest.raises(SandboxError, match="3 sandboxes"):
        judged(language)
    assert len(disturbed) == 3


@pytest.mark.parametrize(
    ("line", "failing"),
    [
        ("    pid = os.fork()\n", "    raise BlockingIOError(11, 'no process')\n"),
        ("        os.execvpe(", "        raise MemoryError('no memory')\n        os.execvpe("),
        ("        _bound(limits", "        raise OSError('no bounds')\n        _bound(limits"),
    ],
)
def test_machine_that_can_not_begin_a_program_is_no_verdict(monkeypatch, tmp_path, line, failing):
    sources: pathlib.Path = shutil.copytree(process._SOURCES, tmp_path / "inside")
    text = (sources / "case.py").read_text()
    assert text.count(line) == 1
    (sources / "case.py").write_text(text.replace(line, failing))
    monkeypatch.setattr(process, "_SOURCES", sources)
    others = RewardsConfig(sandbox_memory_mib=SETTINGS.sandbox_memory_mib + 1)
    with Sandbox(code.limits_of(others), num_warm=1) as broken:
        monkeypatch.setitem(code._open, (code.limits_of(others), code.view_of(others)), broken)
        with pytest.raises(SandboxError, match="3 sandboxes failed while they ran a case"):
            judged(settings=others)
