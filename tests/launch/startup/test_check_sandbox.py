import dataclasses

import pytest

from configs.presets import tiny
from launch.startup import preflight
from launch.startup.build_actor import check_sandbox
from tests.actor.sandbox.conftest import isolated as isolated


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.heavy
def test_code_rewards_are_refused_in_one_line_where_nothing_isolates(nothing_installed):
    with pytest.raises(ValueError, match="code rewards cannot run: .*bubblewrap is not installed: apt-get") as e:
        check_sandbox(tiny.tiny_code())
    assert "\n" not in str(e.value)


def test_code_among_several_rewards_is_refused_as_well(nothing_installed):
    config = tiny.tiny_code()
    several = dataclasses.replace(config.prompts, verifier="exact", rewards={"exact": 0.5, "code": 1.0})
    with pytest.raises(ValueError, match="code rewards cannot run"):
        check_sandbox(dataclasses.replace(config, prompts=several))


def test_other_rewards_need_no_sandbox(nothing_installed):
    assert check_sandbox(tiny.tiny()) == []


def test_sandbox_is_tried_where_an_actor_is_to_run_and_not_elsewhere(nothing_installed):
    config = tiny.tiny_code()
    assert preflight.check_functions(config, ("learner",)) == []
    with pytest.raises(ValueError, match="code rewards cannot run"):
        preflight.check_functions(config, ("learner", "actor"))


@pytest.mark.integration
def test_machine_that_isolates_says_in_which_languages(isolated):
    config = tiny.tiny_code()
    (said,) = check_sandbox(config)
    assert preflight.check_functions(config, ("learner", "actor")) == [said]
    assert said.startswith("code rewards run in sandboxes: Python 3.") and "languages python" in said
    assert "; packages numpy; " in said


@pytest.mark.integration
def test_more_workers_than_cores_are_told_of(isolated):
    config = tiny.tiny_code()
    many = dataclasses.replace(config.actor, verifier_workers=1000)
    _, said = check_sandbox(dataclasses.replace(config, actor=many))
    assert "actor.verifier_workers=1000" in said and "verdicts do not change" in said
    two = dataclasses.replace(config.rewards, cpu_cores="0")
    few = dataclasses.replace(config.actor, verifier_workers=2, num_engines=1)
    _, said = check_sandbox(dataclasses.replace(config, actor=few, rewards=two))
    assert "rewards.cpu_cores=0 (1)" in said


@pytest.mark.integration
@pytest.mark.parametrize("field", ["path", "eval_path"])
def test_prompts_where_programs_could_read_them_are_refused(isolated, field):
    config = tiny.tiny_code()
    prompts = dataclasses.replace(config.prompts, **{field: "/usr/share/rows.jsonl"})
    with pytest.raises(ValueError, match=rf"prompts.{field}=/usr/share/rows.jsonl: sandboxed programs can read /usr"):
        check_sandbox(dataclasses.replace(config, prompts=prompts))
