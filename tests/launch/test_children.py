"""What a process that we start finds when it starts in a folder of the user's with packages named like ours."""

import asyncio
import os
import pathlib
import re

import pytest

from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierPool
from bridge.rollout_types import Task
from configs import overrides
from configs.schema import Config
from configs.sections import LossConfig
from launch.startup import preflight, tiny_model
from launch.supervision.backend import hang_timeouts
from launch.supervision.child import Child
from launch.tools.profile_machine.profile_worker import RpcProcess
from tests.integration.support.processes import REPO


@pytest.fixture(autouse=True)
def shadowed(tmp_path, monkeypatch):
    """A working directory with a package for each of ours, none of which imports."""
    for package in ("configs", "actor", "bridge", "learner", "launch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('the folder is in the way')\n")
    (tmp_path / "mine.py").write_text("def advantage(rewards, config):\n    return rewards\n")
    monkeypatch.chdir(tmp_path)


def test_verifier_worker_is_ours():
    async def score() -> float:
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0)
        try:
            response = Response(text="42", finish="stop", num_tokens=1)
            return (await pool.score("exact", response, Task.judged_by("exact", answer="42"))).value
        finally:
            await pool.close()

    assert asyncio.run(score()) == 1.0


@pytest.mark.heavy
def test_objective_check_is_ours_and_finds_the_users_own():
    config = Config(preset="t", loss=LossConfig(advantage="mine:advantage"))
    assert preflight.check_functions(config, ("learner",)) == ["custom functions: loss.advantage=mine:advantage"]


@pytest.mark.heavy
def test_role_of_a_run_is_ours(tmp_path):
    bounds = hang_timeouts(Config(preset="t"), of_actor=False)
    child = Child("learner", ["--helpshort"], tmp_path / "log", devices="", bounds=bounds)
    child.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.kill_after(lambda: False)
    said = (tmp_path / "log").read_text()
    assert "--config" in said and "in the way" not in said


def test_piped_process_is_ours(tmp_path):
    child = RpcProcess("configs.custom_functions", [], tmp_path / "log")
    try:
        assert child.process.wait() == 0, (tmp_path / "log").read_text()
    finally:
        child.close()


@pytest.mark.heavy
def test_maker_of_the_tiny_model_is_ours(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(overrides, "to_json", lambda config: "no config")  # it reads this after its imports
    with pytest.raises(ValueError, match="training the tiny model failed"):
        tiny_model.cached_tiny_model(Config(preset="t"))
    said = capfd.readouterr().err
    assert "JSONDecodeError" in said and "in the way" not in said


def test_every_module_is_started_with_the_safe_path():
    sources = [
        p for package in ("actor", "learner", "launch", "docs") for p in (pathlib.Path(REPO) / package).rglob("*.py")
    ]
    # Not what is rendered for other machines: there it is the image's folder, or the user's, that one starts in.
    sources = [p for p in sources if "deploy" not in p.parts]
    starts = [found for p in sources for found in re.findall(r'.*"-m",.*', p.read_text())]
    assert len(starts) == 18
    assert [line for line in starts if '"-P", "-m",' not in line] == []
