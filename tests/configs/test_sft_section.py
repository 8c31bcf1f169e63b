"""What a supervised run may not ask for, and what other runs may not say of one."""

import pytest

from configs import overrides


@pytest.mark.parametrize("size", ["model", "tiny"])
def test_preset_is_supervised(size):
    config = overrides.load_preset(f"sft:{size}")
    assert config.loss.is_supervised and config.loss.normalized_by == "token" and not config.loss.constants


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("sampling.temperature", "0.5", "requires sampling.temperature=1.0, got 0.5"),
        ("rounds.epochs", "2", "requires rounds.epochs=1, got 2"),
        ("loss.kl_coef", "0.1", "requires loss.kl_coef=0.0, got 0.1"),
        ("prompts.curriculum", "learnable", "curriculum"),
        ("prompts.environment", "guess", "got prompts.environment=guess"),
        ("loss.advantage", "rloo", "loss.advantage=rloo has no effect"),
        ("loss.length_penalty", "0.1", "loss.length_penalty=0.1 has no effect"),
        ("loss.max_weight", "2", "loss.max_weight=2.0 has no effect with loss.name=sft"),
        ("sft.response_field", "", "sft.response_field must be the name of a column"),
    ],
)
def test_setting_that_has_no_place_in_a_supervised_run_is_refused(field, value, said):
    config = overrides.load_preset("sft:tiny")
    with pytest.raises(ValueError, match=said):
        overrides.apply(config, {field: value}).loss.constants  # noqa: B018  # constants are checked when read


@pytest.mark.parametrize(
    "fields",
    [
        {"loss.teacher_coef": "1", "loss.teacher_path": "m"},
        {"model.routing_replay": "True", "actor.prefix_caching": "True"},
    ],
)
def test_part_that_only_runs_with_actors_have_is_refused(fields):
    with pytest.raises(ValueError, match=f"loss.name=sft requires {next(iter(fields))}="):
        overrides.apply(overrides.load_preset("sft:tiny"), fields)


@pytest.mark.parametrize(("field", "value"), [("rows_per_update", "8"), ("response_field", "text")])
def test_setting_of_supervised_runs_is_refused_in_any_other(field, value):
    with pytest.raises(ValueError, match=f"sft.{field}={value} has no effect without loss.name=sft"):
        overrides.apply(overrides.load_preset("tiny"), {f"sft.{field}": value})


def test_size_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no size 'paper'; expected model or tiny"):
        overrides.load_preset("sft:paper")
