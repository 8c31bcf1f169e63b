"""Constants that a run reports for its loss, against what public systems ship."""

from typing import Any

import pytest

from configs.sections import CorrectionConfig, LossConfig
from learner.objective.effective_constants import effective_constants
from tests.learner.objective.test_losses import config_of

COMMON = {
    "advantage": "grpo",
    "advantage_eps": 1e-6,
    "advantage_std": "sample",
    "normalization": "token",
    "temperature": 0.7,
}


SPECIFIED: dict[str, dict[str, Any]] = {
    # What public systems ship.
    "reinforce": dict(),
    "ppo_clip": dict(clip_low=0.2, clip_high=0.2, proximal="batch"),
    "grpo_clip": dict(clip_low=0.2, clip_high=0.2),
    "truncated_is": dict(max_weight=5.0),
    "dapo": dict(clip_low=0.2, clip_high=0.28, overlong_buffer_tokens=4096.0, overlong_penalty=1.0),
    "gspo": dict(clip_low=3e-4, clip_high=4e-4, normalization="sequence"),
    "decoupled_ppo": dict(clip_low=0.2, clip_high=0.2, max_weight=5.0, proximal="batch"),
    "tis": dict(clip_low=0.2, clip_high=0.2, max_weight=2.0, proximal="batch"),
    "masked_is": dict(clip_low=0.2, clip_high=0.2, min_weight=0.5, max_weight=2.0, proximal="batch"),
    "cispo": dict(clip_low=0.1, clip_high=0.1),
    "topr": dict(min_weight=0.0, max_weight=1.0),
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_effective_constants_are_the_specified_defaults_and_nothing_else(name):
    got = effective_constants(LossConfig(name=name), temperature=0.7, steps_per_proximal=2)
    assert got == {"name": name} | COMMON | SPECIFIED[name]


def test_effective_constants_leave_out_a_clip_that_is_never_reached():
    got = effective_constants(LossConfig(name="masked_is"), temperature=1.0, steps_per_proximal=1)
    assert {k for k in got if "clip" in k} == set() and got["min_weight"] == 0.5
    got = effective_constants(LossConfig(name="grpo_clip"), temperature=1.0, steps_per_proximal=1)
    assert got["clip_low"] == 0.2  # its ratio is to mu


def test_effective_constants_show_the_fields_of_a_correction_that_have_an_effect():
    correction = CorrectionConfig(weight="sequence", reject="turn_mean", max_ratio=3.0)
    got = effective_constants(LossConfig(name="reinforce", correction=correction), temperature=0.7)
    assert got == {"name": "reinforce", "proximal": "batch"} | COMMON | {
        "correction_policy": "proximal",
        "correction_weight": "sequence",
        "correction_min_weight": 0.0,
        "correction_max_weight": 2.0,
        "correction_outside": "truncate",
        "correction_reject": "turn_mean",
        "correction_min_ratio": 0.5,
        "correction_max_ratio": 3.0,
    }
    current = LossConfig(correction=CorrectionConfig(policy="current", veto="sequence"))
    got = effective_constants(current, temperature=0.7)
    assert {k: v for k, v in got.items() if k.startswith("correction") or k == "proximal"} == {
        "correction_policy": "current",
        "correction_veto": "sequence",
        "correction_veto_ratio": 1e-4,
    }


def test_effective_constants_dr_grpo_and_proximal_of_the_round():
    got = effective_constants(config_of("dr_grpo"), temperature=1.0)
    assert got == {
        "name": "dr_grpo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "advantage": "dr_grpo",
        "normalization": "constant",
        "temperature": 1.0,
    }
    tis = LossConfig(name="tis", proximal="round", clip_high=0.3, dual_clip=4)
    got = effective_constants(tis, temperature=1.0, steps_per_proximal=4)
    assert (got["clip_low"], got["clip_high"], got["dual_clip"], got["max_weight"]) == (0.2, 0.3, 4.0, 2.0)
    assert got["proximal"] == "round"


def test_effective_constants_name_shaping_and_turns_where_they_are_on():
    config = LossConfig(advantage="turn_grpo", turn_discount=0.5, length_penalty=0.25)
    got = effective_constants(config, temperature=1.0)
    names = ("advantage", "advantage_eps", "advantage_std", "turn_discount", "length_penalty")
    assert {k: got[k] for k in names} == {
        "advantage": "turn_grpo",
        "advantage_eps": 1e-6,
        "advantage_std": "sample",
        "turn_discount": 0.5,
        "length_penalty": 0.25,
    }


def test_effective_constants_kl_and_entropy_appear_with_their_coefficient():
    config = LossConfig(kl_coef=1e-3, kl_estimator="k2", entropy_coef=0.01, reference_path="models/base")
    got = effective_constants(config, temperature=1.0)
    assert {k: got[k] for k in ("kl_coef", "kl_estimator", "reference", "entropy_coef")} == {
        "kl_coef": 1e-3,
        "kl_estimator": "k2",
        "reference": "models/base",
        "entropy_coef": 0.01,
    }
    assert "started from" in str(effective_constants(LossConfig(kl_coef=1.0), temperature=1.0)["reference"])


def test_effective_constants_of_supervised_rows_name_no_advantage():
    want = {"name": "sft", "normalization": "token", "temperature": 1.0}
    assert effective_constants(LossConfig(name="sft"), temperature=1.0) == want
