"""Updates with a correction: what is rejected leaves no trace, and weights make the losses that have their own."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from bridge.param_names import flatten
from configs.sections import CorrectionConfig
from learner.update.frozen_policies import FrozenLogprobs
from learner.update.packing import pack_groups
from tests.learner.streams import (
    NUM_SAMPLES,
    config_of,
    fresh_params,
    pack,
    random_groups,
    relative_differences,
    steps_of,
)

REJECTS = CorrectionConfig(reject="token", min_ratio=1e-9, max_ratio=1e9)
"""Bounds that the logprobs of random rollouts do not reach."""


def streams(seed):
    """Nine groups with impossible behavior logprobs, and those groups without the tokens that have them.

    All tokens of a group's first response are wrong, and the first sampled token of the others.
    """
    wrong, without = [], []
    for group in random_groups(seed, 10)[:9]:
        first, *others = group.rollouts
        bad = [np.arange(r.tokens.size) == np.argmax(r.loss_mask) for r in others]
        rest = [m & (r.loss_mask.sum() > 1) for r, m in zip(others, bad, strict=True)]
        # A truncated response is not trained with prompts.truncated_responses=mask, and its reward still counts.
        spoiled = [spoil(first, first.loss_mask), *(spoil(r, m) for r, m in zip(others, rest, strict=True))]
        clean = [dataclasses.replace(first, finish="length")]
        clean += [dataclasses.replace(r, loss_mask=r.loss_mask & ~m) for r, m in zip(others, rest, strict=True)]
        wrong.append(dataclasses.replace(group, rollouts=tuple(spoiled)))
        without.append(dataclasses.replace(group, rollouts=tuple(clean)))
    return wrong, without


def spoil(rollout, where):
    logprobs = rollout.behavior_logprobs - np.where(where & rollout.loss_mask, np.float32(60), np.float32(0))
    return dataclasses.replace(rollout, behavior_logprobs=logprobs)


def train(steps, config, groups, *, masks_truncated=False):
    """Three updates of three groups each; the last metrics and the parameters."""
    state, metrics = steps.init(fresh_params()), {}
    for i in range(0, 9, 3):
        micros = pack_groups(
            groups[i : i + 3],
            packing=config.packing,
            loss=config.loss,
            max_response_tokens=config.sampling.max_response_tokens,
            masks_truncated=masks_truncated,
        )
        for micro in micros:
            state = steps.accumulate(state, micro.batch)
        state, metrics = steps.apply(state)
    return jax.device_get(metrics), {k: np.asarray(v) for k, v in flatten(state.params).items()}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "normalization"),
    [("reinforce", "sequence"), ("gspo", "sequence"), pytest.param("reinforce", "constant", marks=pytest.mark.nightly)],
)
def test_run_with_wrong_logprobs_rejected_equals_the_run_without_those_tokens(name, normalization):
    fields: dict[str, Any] = dict(name=name, normalization=normalization, entropy_coef=0.1)
    wrong, without = streams(0)
    config = config_of(**fields, correction=REJECTS)
    steps = steps_of(config)
    metrics, params = train(steps, config, wrong)
    clean_metrics, clean = train(steps, config, without, masks_truncated=True)
    assert max(relative_differences(params, clean).values()) < 1e-6
    for name in ("loss", "grad_norm"):  # clipping and Adam hide a wrong divisor from the parameters
        np.testing.assert_allclose(metrics[name], clean_metrics[name], rtol=1e-5)
    assert clean_metrics["correction/rejected_tokens"] == 0 < clean_metrics["tokens"] < metrics["tokens"]
    np.testing.assert_allclose(metrics["correction/rejected_sequences"], 1 / 3, rtol=1e-6)
    share = 1 - clean_metrics["tokens"] / metrics["tokens"]
    np.testing.assert_allclose(metrics["correction/rejected_tokens"], share, rtol=1e-6)
    assert metrics["correction/ratio_max"] > 1e20 and metrics["correction/masked_tokens"] == 0
    # Without the correction those tokens are trained on.
    plain = config_of(**fields)
    other, trained = train(steps_of(plain), plain, wrong)
    assert max(relative_differences(trained, clean).values()) > 1e-3
    assert not any(name.startswith("correction") for name in other)


def gradient(config, steps, groups):
    """Sums, divisor and metrics of an update."""
    state = steps.init(fresh_params())
    for micro in pack_groups(groups, packing=config.packing, loss=config.loss, max_response_tokens=12):
        state = steps.accumulate(state, micro.batch)
    total = state.accumulator
    grads = {k: np.asarray(g, np.float64) for k, g in flatten(total.grads).items()}
    return grads, float(total.denominator - total.rejected), jax.device_get(steps.apply(state)[1])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("corrected", "built_in"),
    [
        (
            dict(name="reinforce", correction=CorrectionConfig(weight="token", max_weight=5.0)),
            dict(name="truncated_is"),
        ),
        pytest.param(
            dict(
                name="ppo_clip",
                epochs=2,
                correction=CorrectionConfig(weight="token", outside="mask", min_weight=0.5, max_weight=2.0),
            ),
            dict(name="masked_is", epochs=2),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_weight_of_tokens_makes_the_losses_that_have_it_built_in(corrected, built_in):
    (got, divisor, metrics), (want, want_divisor, want_metrics) = (
        gradient(c, steps_of(c), random_groups(3, 2)) for c in (config_of(**corrected), config_of(**built_in))
    )
    assert divisor == want_divisor
    assert max(relative_differences(got, want).values()) < 1e-5
    np.testing.assert_allclose(metrics["clip_fraction"], want_metrics["clip_fraction"])
    assert metrics["clip_fraction"] > 0


def with_logprobs(rollout, values):
    logprobs = np.where(rollout.loss_mask, values, 0).astype(np.float32)
    return dataclasses.replace(rollout, behavior_logprobs=logprobs)


@pytest.mark.heavy
def test_group_with_a_token_below_the_bound_leaves_no_trace():
    veto = CorrectionConfig(policy="current", veto="group", veto_ratio=10.0)
    config = config_of(name="reinforce", rows=8, whole_groups=True, normalization="sequence", correction=veto)
    steps = steps_of(config)
    # Where log mu is -60 a ratio is large; where it is 0 the ratio is a probability.
    groups = [
        dataclasses.replace(g, rollouts=tuple(with_logprobs(r, -60.0) for r in g.rollouts)) for g in random_groups(1, 5)
    ]
    last = groups[1].rollouts[-1]
    one_token = np.arange(last.tokens.size) == np.flatnonzero(last.loss_mask)[-1]
    vetoed = (*groups[1].rollouts[:-1], with_logprobs(last, np.where(one_token, 0.0, -60.0)))
    groups[1] = dataclasses.replace(groups[1], rollouts=vetoed)
    (got, divisor, metrics), (want, want_divisor, _) = (
        gradient(config, steps, g) for g in (groups, [groups[0], *groups[2:]])
    )
    assert divisor == want_divisor == 4 * NUM_SAMPLES
    assert max(relative_differences(got, want).values()) < 1e-6
    np.testing.assert_allclose(metrics["correction/vetoed_groups"], 1 / 5)
    np.testing.assert_allclose(metrics["correction/vetoed_sequences"], 1 / 5)
    np.testing.assert_allclose(metrics["correction/rejected_sequences"], 1 / 5)


@pytest.mark.heavy
def test_ratio_of_the_proximal_policy_is_constant_over_the_epochs_of_a_batch():
    weighted = CorrectionConfig(weight="sequence_mean", max_weight=1e6)
    config = config_of(name="ppo_clip", epochs=2, correction=weighted)
    steps = steps_of(config)
    state, kept = steps.init(fresh_params()), []
    micros = pack(config, random_groups(2, 2))
    for micro in micros:
        state = steps.accumulate(state, micro.batch)
        kept.append(steps.logprobs)
    state, first = steps.apply(state, 0)
    for micro, logprobs in zip(micros, kept, strict=True):
        state = steps.accumulate(state, micro.batch, FrozenLogprobs(proximal=logprobs))
    _, second = steps.apply(state, 1)
    np.testing.assert_allclose(second["correction/ratio_mean"], first["correction/ratio_mean"], rtol=1e-6)
    assert abs(second["ratio/mean"] / first["ratio/mean"] - 1) > 1e-4
