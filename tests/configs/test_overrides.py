import dataclasses
import json
import pathlib
import sys
from typing import Any

import pytest

from configs import overrides
from configs.schema import Config
from configs.sections.prompts import PromptsConfig, PromptSource
from configs.suggestions import OTHER_NAMES
from launch import api

FOLDER = pathlib.Path(overrides.__file__).parent
PRESETS = ("serial", "cgp", "rolloutpipe", "rollpacker", "pipelinerl", "pipelinerl_ess", "roll_flash")
CONFIG = Config(preset="test")


def preset(name: str) -> Config:
    return overrides.load_preset(name)


@pytest.mark.parametrize("size", ["", ":tiny", ":paper"])
@pytest.mark.parametrize("name", PRESETS)
def test_load_preset_every_preset_comes_in_every_size(name, size):
    config = preset(f"{name}{size}")
    assert config.preset == name
    # Of the two sizes the tiny one alone serves float32.
    assert config.model.served_dtype == ("float32" if size == ":tiny" else "bfloat16")


def test_load_preset_tiny_is_rolloutpipe_with_four_times_the_samples_per_update():
    tiny, full = preset("tiny"), preset("rolloutpipe:tiny")
    larger = {name: getattr(full, name) for name in ("rounds", "optimizer", "packing", "actor")}
    assert dataclasses.replace(tiny, preset=full.preset, run=full.run, **larger) == full
    assert tiny.rounds == dataclasses.replace(full.rounds, groups_per_round=128, groups_per_update=64)
    assert (full.rounds.groups_per_round, full.rounds.groups_per_update) == (32, 16)
    assert (tiny.preset, tiny.run.name) == ("tiny", "tiny")


@pytest.mark.parametrize(
    ("name", "train_start", "admission", "publish"),
    [  # The table of presets in README.md.
        ("serial", "round_complete", "fifo", "round_end"),
        ("cgp", "group_ready", "fifo", "round_end"),
        ("rolloutpipe", "group_ready", "frontier", "round_end"),
        ("rollpacker", "group_ready", "fifo", "round_end"),
        ("pipelinerl", "group_ready", "window", "every"),
        ("pipelinerl_ess", "group_ready", "window", "every"),
        ("roll_flash", "group_ready", "window", "every"),
    ],
)
def test_load_preset_knobs_are_the_papers(name, train_start, admission, publish):
    config = preset(name)
    assert (config.rounds.train_start, config.admission.policy, config.publish.when) == (
        train_start,
        admission,
        publish,
    )


def test_load_preset_of_ours_is_found_from_any_folder_and_a_file_is_called_by_its_path(tmp_path, monkeypatch):
    here = overrides.load_preset("tiny")
    monkeypatch.chdir(tmp_path)
    assert overrides.load_preset("tiny") == here
    (tmp_path / "tiny").write_text("")
    assert overrides.load_preset("tiny") == here
    (tmp_path / "tiny.py").write_text("raise ValueError('the one that is there')")
    with pytest.raises(ValueError, match="the one that is there"):
        overrides.load_preset("tiny.py")


def test_load_preset_missing_file_names_the_presets():
    with pytest.raises(ValueError, match=r"cgp.*tiny") as e:
        overrides.load_preset("configs/nosuch.py")
    assert "schema.py" not in str(e.value)


@pytest.mark.parametrize("name", ["rolloutpipe:huge", "tiny:paper"])
def test_load_preset_unknown_size_is_refused(name):
    with pytest.raises(ValueError, match="size|argument"):
        preset(name)


def test_load_preset_that_returns_something_else_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    return {}\n")
    with pytest.raises(ValueError, match=r"must return a configs.schema.Config, got <class 'dict'>"):
        overrides.load_preset(str(tmp_path / "mine.py"))


def test_load_preset_json_is_the_config_that_was_written(tmp_path):
    config = dataclasses.replace(preset("rolloutpipe:tiny"), preset="mine")
    (tmp_path / "config.json").write_text(overrides.to_json(config))
    assert overrides.load_preset(str(tmp_path / "config.json")) == config
    with pytest.raises(ValueError, match="takes no argument 'serial'"):
        overrides.load_preset(f"{tmp_path / 'config.json'}:serial")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected a JSON object"),
        ("{", "Expecting"),
        ('{"preset": "a", "runs": {}}', "has no field"),
        ("[" * 99999, ""),
    ],
)
def test_load_preset_json_that_is_no_config_is_refused_with_the_file(text, says, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json: .*{says}"):
        overrides.load_preset(str(tmp_path / "config.json"))


def test_load_preset_of_ours_that_is_no_preset_names_those_that_are():
    with pytest.raises(ValueError, match=r"schema.py: expected a function get_config\(\), got none; .*cgp"):
        overrides.load_preset(f"{FOLDER}/schema.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def get_config(:\n", r"mine.py:1: SyntaxError: "),
        ("import json\n\njson.loads('{')\n", r"mine.py:3: JSONDecodeError: "),
        ("def get_config():\n    return [][1]\n", r"mine.py:2: IndexError: "),
        ("raise SystemExit(0)\n", r"mine.py:1: SystemExit: 0"),
        ("get_config = 3\n", r"mine.py: expected a function get_config\(\), got none; presets are "),
        ("\0", r"mine.py: "),
    ],
)
def test_load_preset_with_an_error_of_its_own_is_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        overrides.load_preset(str(tmp_path / "mine.py"))


def test_split_argv_takes_the_overrides_and_leaves_the_rest():
    rest, found, repeated = overrides.split_argv(
        ["prog", "--config=tiny", "--config.run.name=a=b", "-v", "--config.prompts.pattern=", "x"]
    )
    assert rest == ["prog", "--config=tiny", "-v", "x"]
    assert found == {"run.name": "a=b", "prompts.pattern": ""} and repeated == []


def test_split_argv_without_value_is_refused():
    with pytest.raises(ValueError, match=r"expected a value. Use --config.run.seed=VALUE"):
        overrides.split_argv(["--config.run.seed"])


def test_split_argv_of_a_repeated_field_takes_the_last_value():
    _, found, repeated = overrides.split_argv([f"--config.run.{f}" for f in ("seed=1", "name=a", "seed=2", "seed=3")])
    assert found == {"run.seed": "3", "run.name": "a"} and repeated == ["run.seed"]


@pytest.mark.parametrize(
    ("path", "text", "want"),
    [
        ("run.seed", "7", 7),
        ("run.name", "7", "7"),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1", 1.0),
        ("actor.enforce_eager", "true", True),
        ("actor.enforce_eager", "false", False),
        ("rounds.max_lag_steps", "9", 9),
        ("rounds.max_lag_steps", "none", None),
        ("loss.name", "truncated_is", "truncated_is"),
        ("prompts.task_args", '{"a": 1, "b": "x"}', {"a": 1, "b": "x"}),
        ("prompts.task_args.max_terms", "3", {"max_terms": 3}),
        ("prompts.task_args.rate", "0.5", {"rate": 0.5}),
        ("prompts.task_args.flag", "true", {"flag": True}),
        ("prompts.task_args.flag", "False", {"flag": False}),
        ("prompts.task_args.text", "hello", {"text": "hello"}),
        ("prompts.rewards.math", "2", {"math": 2.0}),
    ],
)
def test_apply_value_gets_the_fields_type(path, text, want):
    changed = overrides.apply(CONFIG, {path: text})
    section, field = path.split(".")[:2]
    got = getattr(getattr(changed, section), field)
    assert got == want and type(got) is type(want)
    assert {type(v) for v in got.values()} == {type(v) for v in want.values()} if isinstance(want, dict) else True
    # Nothing else moved, and the original stays as it was.
    back = dataclasses.replace(changed, **{section: getattr(CONFIG, section)})
    assert back == CONFIG == Config(preset="test")


def test_apply_sources_of_a_mixture_are_set_field_by_field():
    given = {
        "prompts.mixture.gsm.path": "gsm.jsonl",
        "prompts.mixture.gsm.weight": "3",
        "prompts.mixture.gsm.rewards.math": "0.5",
        "prompts.mixture.sums.task": "chain_sum",
        "prompts.mixture.sums.task_args.max_terms": "4",
    }
    changed = overrides.apply(CONFIG, given)
    want = {
        "gsm": PromptSource(path="gsm.jsonl", weight=3.0, rewards={"math": 0.5}),
        "sums": PromptSource(task="chain_sum", task_args={"max_terms": 4}),
    }
    assert changed.prompts.mixture == want
    more = overrides.apply(changed, {"prompts.mixture.gsm.weight": "1"})
    assert more.prompts.mixture["gsm"].weight == 1 and more.prompts.mixture["sums"] == want["sums"]
    whole = json.dumps({name: dataclasses.asdict(source) for name, source in want.items()})
    assert overrides.apply(CONFIG, {"prompts.mixture": whole}) == changed
    assert overrides.from_dict(json.loads(overrides.to_json(changed))) == changed


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("prompts.mixture.gsm.pth", "x", "config has no field 'prompts.mixture.gsm.pth'; did you mean "),
        ("prompts.mixture.gsm", "x", "config.prompts.mixture.gsm: expected a field, got a section"),
        ("prompts.mixture.gsm.weight", "much", "--config.prompts.mixture.gsm.weight: expected float, got 'much'"),
        ("prompts.mixture.gsm.weight", "2", "prompts.mixture.gsm: set path, task or environment"),
        ("prompts.mixture", "3", "--config.prompts.mixture: expected a JSON object"),
        ("prompts.mixture", '{"a": {"pth": "x"}}', "config has no field 'prompts.mixture.a.pth'; did you mean "),
    ],
)
def test_apply_source_of_a_mixture_that_is_wrong_is_refused_by_name(path, text, said):
    with pytest.raises(ValueError, match=said):
        overrides.apply(CONFIG, {path: text})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("rounds.samples_per_grup", "did you mean 'rounds.samples_per_group'"),
        ("round.groups_per_update", "did you mean 'rounds.groups_per_update'"),
        ("learning_rate", "did you mean 'optimizer.learning_rate'"),
        ("optimizer.lr", "did you mean 'optimizer.learning_rate'"),
        ("lr", "did you mean 'optimizer.learning_rate'"),
        ("sampling.n", "did you mean 'rounds.samples_per_group'"),
        ("sampling.stop", "sampling has max_response_tokens, temperature, top_p, top_k"),
        ("sampling.temprature", "did you mean 'sampling.temperature'"),
        ("sampling.learning_rate", "did you mean 'optimizer.learning_rate'"),
        ("optimiser.learnin_rate", "did you mean 'optimizer.learning_rate'"),
        ("qwertz", "config has preset, "),
        ("temperature", "did you mean 'sampling.temperature'"),
        ("judge.max_num_seqs", "did you mean 'judge.engine.max_num_seqs'"),
        ("batch_size", "did you mean 'rounds.groups_per_update'"),
        ("seq_len", "did you mean 'model.max_tokens'"),
        ("actor_rollout_ref.rollout.n", "did you mean 'rounds.samples_per_group'"),
        ("data.train_batch_size", "did you mean 'rounds.groups_per_round'"),
        ("orchestrator.rollouts_per_example", "did you mean 'rounds.samples_per_group'"),
        ("run.seed.x", "config.run.seed: expected no subfield, got 'x'"),
        ("", "config has no field ''"),
    ],
)
def test_apply_unknown_field_names_the_nearest(path, said):
    with pytest.raises(ValueError, match=said):
        overrides.apply(CONFIG, {path: "1"})


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("run.seed", "1.5", "--config.run.seed: expected int, got '1.5'"),
        ("run.seed", "", "--config.run.seed: expected int, got ''"),
        ("run.seed", "none", "--config.run.seed: expected int, got 'none'"),
        ("actor.enforce_eager", "2", "--config.actor.enforce_eager: expected bool, got '2'"),
        ("rounds.max_lag_steps", "few", "--config.rounds.max_lag_steps: expected int"),
        ("loss.name", "ppo", r"^loss.name: expected one of .*truncated_is, .*mean 'ppo_clip' or 'decoupled_ppo'\?$"),
        ("loss.name", "grpo", r"did you mean 'grpo_clip' or 'dr_grpo'\?$"),
        ("loss.advantage", "gspo", r"got 'gspo'$"),
        ("publish.when", "evry", "expected one of .*did you mean 'every'"),
        ("prompts.task_args", "3", "--config.prompts.task_args: expected a JSON object, got '3'"),
        ("prompts.task_args", '{"a": [1]}', "expected a JSON object"),
        ("rounds", "3", "config.rounds: expected a field, got a section. Use --config.rounds.FIELD=VALUE"),
    ],
)
def test_apply_wrong_type_is_refused_by_name(path, text, said):
    with pytest.raises(ValueError, match=said):
        overrides.apply(CONFIG, {path: text})


def test_apply_checks_the_result_as_a_whole_not_each_override():
    # Either alone breaks max_tokens <= row_tokens or the room for a prompt; together they fit.
    together = {"model.max_tokens": "1024", "packing.row_tokens": "1024"}
    assert overrides.apply(CONFIG, together).model.max_tokens == 1024
    with pytest.raises(ValueError, match="must hold the longest sequence"):
        overrides.apply(CONFIG, {"model.max_tokens": "1024"})


@pytest.mark.parametrize("name", [f"{p}:{s}" for p in PRESETS for s in ("tiny", "paper")])
def test_to_json_reads_back_as_the_same_config(name):
    config = overrides.apply(preset(name), {"rounds.max_lag_steps": "60", "prompts.task_args.flag": "true"})
    assert overrides.from_dict(json.loads(overrides.to_json(config))) == config


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"preset": "x", "rnu": {}}, "did you mean"),
        ({"preset": "x", "run": {"seeds": 1}}, "did you mean 'run.seed'"),
        ({"preset": "x", "run": {"seed": "1"}}, r"config.run.seed"),
        ({"preset": "x", "run": {"seed": {"a": 1}}}, "config.run.seed: expected no subfield"),
        ({"preset": "x", "run": 5}, r"config.run"),
        ({}, "preset"),
    ],
)
def test_from_dict_unknown_or_wrong_field_is_refused(raw: dict[str, Any], said):
    with pytest.raises(ValueError, match=said):
        overrides.from_dict(raw)


def test_load_preset_tiny_code_judges_programs_and_is_rolloutpipe_otherwise():
    code, tiny = preset("tiny_code"), preset("rolloutpipe:tiny")
    assert code.prompts.parts == {"code": 1.0} and code.rewards.code_in == "text"
    assert (code.loss, code.optimizer, code.publish) == (tiny.loss, tiny.optimizer, tiny.publish)


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_load_preset_of_an_environment_is_rolloutpipe_otherwise(name):
    played, tiny = preset(f"tiny_{name}"), preset("rolloutpipe:tiny")
    assert played.prompts.environment == name and played.preset == f"tiny_{name}"
    assert (played.loss, played.optimizer, played.publish) == (tiny.loss, tiny.optimizer, tiny.publish)


BESIDE = "RATE = 0.5\n"
USES_BESIDE = """from __future__ import annotations
import dataclasses
import {module}
from configs.presets import tiny
@dataclasses.dataclass(frozen=True)
class Sweep:
    seeds: list[int] = dataclasses.field(default_factory=list)
def get_config():
    import {module} as again
    optimizer = dataclasses.replace(tiny.tiny().optimizer, learning_rate=again.RATE)
    return dataclasses.replace(tiny.tiny(), optimizer=optimizer)
"""


def test_load_preset_is_loaded_as_a_module_with_what_lies_beside_it(tmp_path):
    (tmp_path / "rates_of_mine.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(USES_BESIDE.format(module="rates_of_mine"))
    before = list(sys.path)
    assert overrides.load_preset(str(tmp_path / "mine.py")).optimizer.learning_rate == 0.5
    assert sys.path == before


def test_key_of_a_dict_field_may_have_dots():
    prompts = dataclasses.replace(preset("tiny").prompts, verifier=PromptsConfig().verifier, rewards={"math": 1.0})
    base, path = dataclasses.replace(preset("tiny"), prompts=prompts), "prompts.rewards.my.mod:score"
    for given in (overrides.apply(base, {path: "0.5"}), api.with_fields(base, {path: 0.5})):
        assert given.prompts.rewards == {"math": 1.0, "my.mod:score": 0.5}


@pytest.mark.parametrize(
    ("name", "said"),
    [("tiyn", "did you mean tiny"), ("grpo", "it is a loss: .*--config.loss.name=grpo_clip"), ("zzz", "presets are")],
)
def test_load_preset_unknown_name_gets_what_helps(name, said):
    with pytest.raises(ValueError, match=said):
        overrides.load_preset(name)


def test_load_preset_beside_another_file_of_the_same_name_takes_its_own(tmp_path):
    for rate in (0.25, 0.5):
        folder = tmp_path / str(rate)
        folder.mkdir()
        (folder / "rates_of_mine.py").write_text(f"RATE = {rate}\n")
        (folder / "mine.py").write_text(USES_BESIDE.format(module="rates_of_mine"))
        assert overrides.load_preset(str(folder / "mine.py")).optimizer.learning_rate == rate


def test_load_preset_that_imports_what_is_missing_says_where_it_was_looked_for(tmp_path):
    (tmp_path / "mine.py").write_text(USES_BESIDE.format(module="rates_of_nobody"))
    with pytest.raises(ValueError, match=rf"mine.py:3: ModuleNotFoundError: .*looked in {tmp_path}"):
        overrides.load_preset(str(tmp_path / "mine.py"))
    assert "sluice_preset_mine" not in sys.modules


def test_load_preset_can_not_replace_our_own_packages(tmp_path):
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner/__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "mine.py").write_text("import learner\nfrom configs.presets import tiny\nget_config = tiny.tiny\n")
    assert overrides.load_preset(str(tmp_path / "mine.py")).preset == "tiny"


def test_load_preset_finds_a_file_of_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("from configs.presets import tiny\nget_config = tiny.tiny\n")
    assert overrides.load_preset("~/mine.py").preset == "tiny"


def test_names_of_other_projects_stand_for_fields_that_exist_and_for_none_of_ours():
    ours = set(overrides.field_paths())
    assert set(OTHER_NAMES.values()) <= ours
    for name, field in OTHER_NAMES.items():
        section = field.partition(".")[0]
        assert f"{section}.{name}" not in ours
