"""The streamed gradient equals the full-batch gradient (docs/design/streaming.md).

The oracle is one plain, unpacked, unsplit batch (`streams.plain_loss`) and AdamW in numpy. Differences are
relative to the largest entry of each tensor: max |got - want| / max |want| <= 1e-5, float32.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.param_names import flatten
from tests.learner.streams import (
    NumpyAdamW,
    config_of,
    fresh_params,
    pack,
    padded,
    plain_loss,
    random_groups,
    relative_differences,
    steps_of,
    stream,
)

NUM_GROUPS = 5
LOSSES: dict[str, dict[str, Any]] = {
    "grpo_clip": dict(name="grpo_clip", clip_low=0.2, clip_high=0.28, entropy_coef=0.01),
    "truncated_is": dict(name="truncated_is", max_weight=2.0, advantage="mean_baseline"),
}
NORMALIZATIONS = ["token", "sequence", "sequence_sum", "constant"]


@functools.cache
def steps_and_oracle(loss):
    # The device code does not know the normalisation, so one compilation serves all of them.
    config = config_of(**LOSSES[loss])
    gradient = jax.jit(jax.value_and_grad(functools.partial(plain_loss, loss=config.loss)))
    return steps_of(config), gradient


def check(loss, normalization, seed, arrivals):
    """Streams two updates, each group batch of `arrivals` packed on its own, and compares with the oracle."""
    steps, gradient = steps_and_oracle(loss)
    config = config_of(normalization=normalization, **LOSSES[loss])
    state, oracle = steps.init(fresh_params()), NumpyAdamW(config.optimizer)
    expected = jax.tree.map(np.asarray, state.params)
    for update in range(2):
        groups = random_groups(seed + update, NUM_GROUPS)
        for batch in arrivals(config, groups):
            state = steps.accumulate(state, batch.batch)
        value, want = gradient(expected, *padded(groups, config, 16))
        want = flatten(want)
        total = state.accumulator
        got = {k: np.asarray(g) / float(total.denominator) for k, g in flatten(total.grads).items()}
        differences = relative_differences(got, want)
        assert max(differences.values()) <= 1e-5, (update, differences)
        state, metrics = steps.apply(state)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            metrics["grad_norm"], np.sqrt(sum((np.float64(g) ** 2).sum() for g in want.values())), rtol=1e-5
        )
        rate = config.optimizer.learning_rate * (update + 1) / config.optimizer.warmup_steps
        flat = oracle.update(flatten(expected), want, rate)
        differences = relative_differences(flatten(state.params), flat)
        assert max(differences.values()) <= 1e-5, (update, differences)
        expected = jax.tree.map(np.asarray, state.params)


@pytest.mark.heavy
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=8)
@given(data=st.data())
def test_streamed_gradient_of_any_split_and_order_equals_one_batch(loss, normalization, data):
    order = data.draw(st.permutations(range(NUM_GROUPS)), label="order")
    cuts = sorted(data.draw(st.sets(st.integers(1, NUM_GROUPS - 1)), label="cuts"))
    seed = data.draw(st.integers(0, 10**6), label="seed")

    def arrivals(config, groups):
        for a, b in zip([0, *cuts], [*cuts, NUM_GROUPS], strict=True):
            yield from pack(config, [groups[i] for i in order[a:b]])

    check(loss, normalization, seed, arrivals)


@pytest.mark.heavy
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_streamed_gradient_through_the_selector_equals_one_batch(normalization):
    check("grpo_clip", normalization, 7, stream)
