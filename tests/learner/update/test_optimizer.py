from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.sections import OptimizerConfig
from configs.sections.model import OPTIMIZERS
from learner.update.optimizer import decay_mask, learning_rate, make_optimizer, scale_by_adafactor
from tests.learner.streams import NumpyAdamW


@pytest.mark.parametrize(
    "schedule,want",
    [
        # warm-up over 4 steps, then 6 more; num_steps = 10
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ("cosine", [0.25, 0.5, 0.75, 1, *[(1 + np.cos(np.pi * i / 6)) / 2 for i in range(7)]]),
    ],
)
def test_learning_rate_warms_up_and_falls(schedule, want):
    config = OptimizerConfig(learning_rate=3e-4, warmup_steps=4, schedule=schedule)
    got = [float(learning_rate(i, config, num_steps=10)) for i in range(11)]
    np.testing.assert_allclose(got, 3e-4 * np.array(want), rtol=1e-5, atol=1e-10)


def test_learning_rate_without_warmup_starts_full_and_stays_past_the_end():
    config = OptimizerConfig(learning_rate=0.5)
    assert [float(learning_rate(i, config, num_steps=3)) for i in (0, 2, 50)] == [0.5] * 3


def test_decay_mask_leaves_norms_and_biases_out():
    params = {
        "layers": {"q_norm": {"scale": 0}, "q_proj": {"kernel": 0, "bias": 0}, "post_norm": {"scale": 0}},
        "final_norm": {"scale": 0},
        "embed": {"embedding": 0},
    }
    assert decay_mask(params) == {
        "layers": {
            "q_norm": {"scale": False},
            "q_proj": {"kernel": True, "bias": False},
            "post_norm": {"scale": False},
        },
        "final_norm": {"scale": False},
        "embed": {"embedding": True},
    }


@pytest.mark.heavy
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_make_optimizer_matches_adamw_by_the_book(scale):
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=3, schedule="cosine", weight_decay=0.2)
    optimizer, oracle = make_optimizer(config, num_steps=6), NumpyAdamW(config)
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 4)).astype(np.float32), "norm": np.ones((2, 4), np.float32)}
    want: dict[str, Any] = dict(params)
    got: Any = {k: jnp.asarray(v) for k, v in params.items()}
    state = optimizer.init(got)
    for i in range(5):
        grads = {k: (scale * rng.normal(size=v.shape)).astype(np.float32) for k, v in params.items()}
        updates, state = optimizer.update(grads, state, got)
        got = optax.apply_updates(got, updates)
        rate = 0.1 * min(1, (i + 1) / 3) * (0.5 + 0.5 * np.cos(np.pi * max(i - 3, 0) / 3))
        want = oracle.update(want, grads, rate)
        for k in params:
            np.testing.assert_allclose(got[k], want[k], rtol=1e-4, atol=1e-5)


def test_adafactor_clips_the_update_of_each_layer_alone():
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(2, 4, 128, 128)).astype(np.float32)
    grads[1, 1, 1] *= 50  # one matrix jumps
    stacked: Any = {"layers": {"q_proj": {"kernel": grads[0]}, "input_norm": {"scale": grads[0, :, 0]}}}
    after: Any = {"layers": {"q_proj": {"kernel": grads[1]}, "input_norm": {"scale": grads[1, :, 0]}}}
    optimizer = scale_by_adafactor(OptimizerConfig(name="adafactor"))
    _, state = optimizer.update(stacked, optimizer.init(stacked), stacked)
    found: Any = optimizer.update(after, state, after)[0]
    updates = found["layers"]
    for i in range(4):
        one = {"kernel": grads[0, i]}
        _, state = optimizer.update(one, optimizer.init(one), one)
        want: Any = optimizer.update({"kernel": grads[1, i]}, state, one)[0]
        np.testing.assert_allclose(updates["q_proj"]["kernel"][i], want["kernel"], rtol=1e-4)
    rms = np.sqrt((np.asarray(updates["input_norm"]["scale"]) ** 2).mean(1))
    assert rms.max() <= 1 + 1e-5


@pytest.mark.heavy
def test_make_optimizer_adafactor_first_step_is_the_factored_estimate_clipped_and_decayed():
    config = OptimizerConfig(name="adafactor", learning_rate=0.1, weight_decay=0.5, max_grad_norm=1e9)
    optimizer = make_optimizer(config, num_steps=10)
    rng = np.random.default_rng(0)
    params = {"layers": {"q_proj": {"kernel": rng.normal(size=(128, 256)).astype(np.float32)}}}
    grads = rng.normal(size=(128, 256)) * np.linspace(0.1, 3, 128)[:, None]
    state = optimizer.init(params)
    largest = max(x.size for x in jax.tree.leaves(state))
    assert largest <= 256  # rows and columns, and no first moment
    tree = {"layers": {"q_proj": {"kernel": grads.astype(np.float32)}}}
    updates: Any = optimizer.update(tree, state, params)[0]
    square = grads**2 + 1e-30
    rows, columns = square.mean(1, keepdims=True), square.mean(0, keepdims=True)
    scaled = grads / np.sqrt(rows * columns / square.mean())
    scaled /= max(1.0, np.sqrt((scaled**2).mean()))
    want = -0.1 * (scaled + 0.5 * params["layers"]["q_proj"]["kernel"])
    np.testing.assert_allclose(updates["layers"]["q_proj"]["kernel"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_every_optimizer_is_what_its_entry_says(name, dtypes):
    """Rows and columns of factored moments, and counters, are the rest."""
    fields = {field: d for field, d in zip(("mu_dtype", "nu_dtype"), dtypes, strict=True) if name != "adafactor"}
    config = OptimizerConfig(name=name, **fields)
    params = {
        "layers": {"q_proj": {"kernel": jax.ShapeDtypeStruct((2, 512, 256), "bfloat16")}},
        "embed": {"embedding": jax.ShapeDtypeStruct((1024, 256), "bfloat16")},
    }
    state = jax.eval_shape(make_optimizer(config, num_steps=1).init, params)
    real = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= real - config.state_bytes(num_matrix=2 * 512 * 256, num_other=1024 * 256) < 20_000
