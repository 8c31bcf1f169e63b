"""Configs in TOML files: read, refused, and printed so that they read back."""

import dataclasses

import pytest

from configs import overrides, toml_config

TOML = """
preset = "rolloutpipe:tiny"
[optimizer]
learning_rate = 3e-4
[prompts.task_args]
max_terms = 2
[rounds]
max_lag_steps = "none"
"""


def test_load_preset_toml_sets_fields_on_top_of_its_preset_or_of_another(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    config, base = overrides.load_preset(str(file)), overrides.load_preset("rolloutpipe:tiny")
    assert config.optimizer == dataclasses.replace(base.optimizer, learning_rate=3e-4)
    assert config.prompts.task_args == {"max_terms": 2} and config.prompts.task == base.prompts.task
    assert config.rounds == dataclasses.replace(base.rounds, max_lag_steps=None) and config.publish == base.publish
    assert overrides.load_preset(f"{file}:pipelinerl:tiny").publish == overrides.load_preset("pipelinerl:tiny").publish


def test_toml_table_within_a_section_replaces_only_its_fields_and_a_dict_field_whole(tmp_path):
    base, file = tmp_path / "base.toml", tmp_path / "mine.toml"
    loss = "[loss]\nname = 'reinforce'\nmax_weight = 'none'\ncorrection = {weight = 'token', max_weight = 3.0}\n"
    base.write_text(f"preset = 'pipelinerl:tiny'\n{loss}[prompts.task_args]\nmax_terms = 2\nmin_terms = 2\n")
    file.write_text(f"preset = '{base}'\n[loss.correction]\nveto = 'sequence'\n[prompts.task_args]\nmax_terms = 3\n")
    config, given = overrides.load_preset(str(file)), overrides.load_preset(str(base))
    assert config.loss.correction == dataclasses.replace(given.loss.correction, veto="sequence")
    assert given.loss.correction.max_weight == 3.0 and config.prompts.task_args == {"max_terms": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("preset = 3", "preset: expected a string, got 3"),
        ("preset = 'tiny'\n[run\n", "mine.toml: "),
        ("preset = 'tiny'\n[optimizer]\nlr = 1.0", "mine.toml: config has no field 'optimizer.lr'; did you mean"),
        ("preset = 'tiny'\n[run]\nseed = '1'", "mine.toml: config: Expected `int`"),
        ("preset = 'tiny'\n[run]\nseed = 'none'", "mine.toml: config: Expected `int`"),
        ("preset = 'tiny'\nrun = 3", "mine.toml: config.*run"),
        ("preset = 'tiyn'", "did you mean tiny"),
        ("preset = 'mine.toml'", "mine.toml -> .*mine.toml: the preset of mine.toml leads back to it"),
        ("[run]\nname = 'x'\n[rounds]\ngroups_per_update = 7", "mine.toml: rounds.groups_per_update"),
    ],
)
def test_load_preset_toml_that_is_wrong_is_refused_with_the_file(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        overrides.load_preset(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", ["tiny", "pipelinerl", "tpu_v5p_64", "gsm_smollm2", "tiny_calculator"])
def test_render_reads_back_as_the_same_config(name, tmp_path):
    given = {"prompts.task_args.a b": 'x"\\ é', "rounds.max_lag_steps": "none", "optimizer.weight_decay": "1e-9"}
    config = overrides.apply(overrides.load_preset(name), given)
    (tmp_path / "printed.toml").write_text(toml_config.render(config, base=name))
    assert dataclasses.replace(overrides.load_preset(str(tmp_path / "printed.toml")), preset=config.preset) == config


def test_render_marks_what_differs_from_the_default():
    lines = toml_config.render(
        overrides.apply(overrides.load_preset("tiny"), {"optimizer.learning_rate": "0.5"})
    ).splitlines()
    assert "learning_rate = 0.5  # default: 1e-06" in lines and "beta1 = 0.9" in lines
