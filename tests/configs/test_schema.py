import dataclasses
from typing import Any

import pytest

from configs import schema
from configs.schema import Config


def rounds(R=4, U=2, K=2, **fields):
    return schema.RoundsConfig(groups_per_round=R, groups_per_update=U, samples_per_group=K, **fields)


WINDOW: dict[str, Any] = {
    "admission": schema.AdmissionConfig(policy="window"),
    "publish": schema.PublishConfig(when="every"),
}


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("RunConfig", dict(name="../up"), "run.name"),
        ("RunConfig", dict(num_updates=0), "run.num_updates"),
        ("RunConfig", dict(seed=-1), "run.seed"),
        ("PromptsConfig", dict(held_out_one_in=1), "held_out_one_in"),
        ("PromptsConfig", dict(path="a.jsonl", verifier="reasoning_gym"), "reasoning-gym"),
        ("PromptsConfig", dict(pattern="no group"), "group in parentheses"),
        ("PromptsConfig", dict(pattern="("), "no regular expression"),
        ("SamplingConfig", dict(top_p=0.9), "top_p=0.9"),
        ("SamplingConfig", dict(temperature=0.0), "sampling.temperature"),
        ("RoundsConfig", dict(samples_per_group=1), r"\(K\) must be >= 2"),
        ("RoundsConfig", dict(groups_per_round=10, groups_per_update=4), r"U=4.*must divide.*R=10"),
        ("RoundsConfig", dict(max_lag_steps=-1), "max_lag_steps"),
        ("PublishConfig", dict(every_n_steps=0), "every_n_steps"),
        ("LossConfig", dict(clip_low=1.5), "clip_low"),
        ("OptimizerConfig", dict(beta2=1.0), "betas"),
        ("OptimizerConfig", dict(weight_decay=float("nan")), "weight_decay"),
        ("CheckpointConfig", dict(keep=1), "checkpoint.keep"),
        ("MeshConfig", dict(tensor=0), "mesh.tensor"),
    ],
)
def test_section_value_out_of_range_is_refused_by_name(section, fields, said):
    with pytest.raises(ValueError, match=said):
        getattr(schema, section)(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(model=schema.ModelConfig(max_tokens=300)), r"packing.row_tokens \(256\)"),
        (dict(sampling=schema.SamplingConfig(max_response_tokens=64)), "leave room for a"),
        (dict(admission=schema.AdmissionConfig(policy="window")), "go together"),
        (dict(publish=schema.PublishConfig(when="every")), "go together"),
        (WINDOW | dict(rounds=rounds(train_start="round_complete")), "needs publish.when=round_end"),
        (WINDOW | dict(admission=schema.AdmissionConfig(policy="window", width=1), rounds=rounds()), "never fills"),
        (dict(rounds=rounds(R=8, U=2, max_lag_steps=2)), r"\(2\) is below R/U - 1 = 3"),
        (dict(rounds=rounds(R=6, U=2), run=schema.RunConfig(num_updates=100)), "multiple of the round's 3 updates"),
        (dict(packing=schema.PackingConfig(rows=3), mesh=schema.MeshConfig(data=2)), "multiple of mesh.data"),
    ],
)
def test_config_sections_that_do_not_fit_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Config(preset="test", **fields)


def test_config_lag_bound_of_a_rounds_last_update_is_accepted():
    # R/U = 4 updates at lags 0 to 3.
    Config(preset="test", rounds=rounds(R=8, U=2, max_lag_steps=3))


def test_config_by_window_num_updates_need_not_fill_rounds():
    Config(preset="test", rounds=rounds(R=6, U=2), run=schema.RunConfig(num_updates=100), **WINDOW)


@pytest.mark.parametrize(
    ("policy", "width", "want"),
    [("fifo", 0, 0), ("frontier", 0, 3), ("frontier", 5, 5), ("window", 0, 12), ("window", 7, 7)],
)
def test_admission_width_zero_is_filled_in_from_the_policy(policy, width, want):
    when = "every" if policy == "window" else "round_end"
    config = Config(
        preset="test",
        run=schema.RunConfig(num_updates=2),
        rounds=rounds(R=6, U=3),
        admission=schema.AdmissionConfig(policy=policy, width=width),
        publish=schema.PublishConfig(when=when),
    )
    assert config.admission_width == want


def test_parity_bound_zero_is_filled_in_from_the_served_dtype():
    config = Config(preset="test")
    bf16 = dataclasses.replace(config, model=schema.ModelConfig(served_dtype="bfloat16"))
    given = dataclasses.replace(bf16, publish=schema.PublishConfig(parity_bound=0.5))
    assert (config.parity_bound, bf16.parity_bound, given.parity_bound) == (1e-4, 0.25, 0.5)
