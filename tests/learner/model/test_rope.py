import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.model.families.config_fields import read_rope
from learner.model.rope import frequencies, rotary_angles, rotate
from tests.support.lazy import torch, transformers

YARN = dict(rope_type="yarn", original_max_position_embeddings=32768, factor=4.0)
LLAMA3 = dict(rope_type="llama3", original_max_position_embeddings=8192, factor=8.0, low_freq_factor=1.0)
KINDS = [
    dict(rope_type="linear", factor=2.5),
    YARN,
    YARN | dict(truncate=False, beta_fast=16, beta_slow=2),
    YARN | dict(attention_factor=1.25),
    YARN | dict(mscale=0.8, mscale_all_dim=1.3),
    YARN | dict(factor=1.25, original_max_position_embeddings=40960),
    LLAMA3 | dict(high_freq_factor=4.0),
]


def reference(rope, head_dim, theta):
    """transformers' (frequencies, attention factor) in float64, through its own float32 code."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=40960, rope_parameters=rope | {"rope_theta": theta}
    )
    found, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return found.numpy(), factor


def ours(rope, head_dim, theta):
    scaling = read_rope({"rope_theta": theta, "rope_scaling": rope, "max_position_embeddings": 40960}).scaling
    return frequencies(head_dim, theta, scaling), 1.0 if scaling is None else scaling.attention_factor


@pytest.mark.parametrize("rope", KINDS, ids=str)
@pytest.mark.parametrize("head_dim,theta", [(128, 1e6), (64, 1e4), (24, 5e5)])
def test_frequencies_scaled_equal_transformers(rope, head_dim, theta):
    want, want_factor = reference(rope, head_dim, theta)
    got, got_factor = ours(rope, head_dim, theta)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=5e-7)
    assert got_factor == pytest.approx(want_factor, rel=1e-12)
    assert np.abs(got / frequencies(head_dim, theta) - 1).max() > 0.1  # it does scale


@given(half=st.integers(1, 80), theta=st.floats(2.0, 1e8))
def test_frequencies_plain_are_the_formula_to_float32(half, theta):
    want = np.array([theta ** (-i / half) for i in range(half)])
    np.testing.assert_allclose(frequencies(2 * half, theta), want, rtol=2e-6)


@given(
    theta=st.sampled_from([1e4, 1e6]),
    factor=st.floats(1.5, 64),
    original=st.integers(2**12, 2**17),
    fast=st.floats(4, 64),
    slow=st.floats(0.25, 2),
    truncate=st.booleans(),
)
def test_frequencies_yarn_equal_transformers_for_any_setting(theta, factor, original, fast, slow, truncate):
    rope = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=original, beta_fast=fast)
    rope |= dict(beta_slow=slow, truncate=truncate)
    raw = {"rope_theta": theta, "rope_scaling": rope, "max_position_embeddings": original}
    got = frequencies(64, theta, read_rope(raw)[1])
    np.testing.assert_allclose(got, reference(rope, 64, theta)[0], rtol=2e-6)


@pytest.mark.parametrize("rope", [dict(rope_type="default"), YARN | dict(attention_factor=1.25)], ids=str)
def test_rotate_long_positions_equals_transformers(rope):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = transformers.Qwen3Config(
        head_dim=16, max_position_embeddings=40960, rope_parameters=rope | {"rope_theta": 1e6}
    )
    rng = np.random.default_rng(0)
    positions = np.array([[0, 1, 17, 4095, 32767], [40000, 5, 5, 6, 131071]])
    q = rng.normal(size=(2, 5, 3, 16)).astype(np.float32)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.from_numpy(q), torch.from_numpy(positions))
    want, _ = apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(q), cos, sin, unsqueeze_dim=2)
    scaling = read_rope({"rope_theta": 1e6, "rope_scaling": rope, "max_position_embeddings": 40960}).scaling
    got = jax.jit(lambda q, p: rotate(q, rotary_angles(p, 16, 1e6, scaling)))(q, positions)
    # A unit in the last place of a frequency is 131071 * 6e-8 = 0.008 radian at the last position.
    np.testing.assert_allclose(got, want.numpy(), atol=0.04)
    np.testing.assert_allclose(got[:1, :3], want.numpy()[:1, :3], atol=1e-5)


def test_rotate_score_depends_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(i, j):
        def turn(x, at):
            return rotate(x, rotary_angles(jnp.array([[at]]), 8, 100.0))

        return float((turn(q, i) * turn(k, j)).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert math.fabs(score(9, 4) - score(9, 5)) > 1e-3
