"""An `Architecture` as config.json says what was read, or what was changed since."""

import dataclasses
import json

import pytest

from learner.model.config import Architecture
from learner.model.hf.fields import RopeScaling
from tests.learner.model.published import EVERY_KIND, MOE, QWEN2, QWEN3, without


@pytest.mark.parametrize("raw", EVERY_KIND)
def test_to_hf_returns_what_was_read(raw, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = Architecture.from_hf(tmp_path)
    assert config.to_hf() == raw and hash(config) == hash(Architecture.from_hf(raw))


@pytest.mark.parametrize(
    "raw", [QWEN2, QWEN3, MOE, without(QWEN3, "rope_theta") | {"rope_parameters": {"rope_theta": 1e6}}]
)
def test_to_hf_of_a_changed_config_rewrites_that_field_and_keeps_the_rest(raw):
    raw = raw | ({} if raw is MOE else {"layer_types": ["full_attention"] * raw["num_hidden_layers"]})
    changed = dataclasses.replace(Architecture.from_hf(raw), num_layers=2, rope_theta=7.0, tie_word_embeddings=False)
    assert Architecture.from_hf(changed.to_hf()) == changed
    rewritten = ("num_hidden_layers", "rope_theta", "rope_parameters", "layer_types")
    want = without(raw | {"tie_word_embeddings": False}, *rewritten)
    assert without(changed.to_hf(), *rewritten) == want


@pytest.mark.parametrize("raw", EVERY_KIND)
@pytest.mark.parametrize(
    "change",
    [
        dict(rope_scaling=RopeScaling(kind="linear", factor=3.0)),
        dict(rope_scaling=None),
        dict(sliding_window=None, windowed_layers=()),
        dict(sliding_window=5, windowed_layers=(True,) * 4, num_layers=4),
    ],
)
def test_to_hf_of_changed_scaling_or_windows_reads_back_equal(raw, change):
    read = Architecture.from_hf(raw)
    if "num_layers" in change and read.family == "llama":
        with pytest.raises(ValueError, match="sliding_window: got 5, wanted none for llama"):
            dataclasses.replace(read, **change)
        return
    changed = dataclasses.replace(read, **change)
    assert Architecture.from_hf(changed.to_hf()) == changed


@pytest.mark.parametrize("change", [dict(rope_theta=7.0), dict(local_rope_theta=7.0), dict(logit_soft_cap=7.0)])
@pytest.mark.parametrize("raw", EVERY_KIND[-3:-1])
def test_to_hf_of_a_changed_gemma3_reads_back_equal(raw, change):
    changed = dataclasses.replace(Architecture.from_hf(raw), **change)
    assert Architecture.from_hf(changed.to_hf()) == changed


@pytest.mark.parametrize("raw", EVERY_KIND)
def test_to_hf_of_a_config_made_in_code_reads_back_equal(raw):
    made = dataclasses.replace(Architecture.from_hf(raw), hf_json="{}")
    assert Architecture.from_hf(made.to_hf()) == made
