"""packing.share_prompts: the same sequences, losses and gradients from fewer tokens."""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.distributed.sharding import make_mesh
from learner.parity import max_abs_dlogprob
from learner.update.auto_shape import AutoShape
from learner.update.frozen_policies import FrozenPolicies
from learner.update.packed_codec import decode_batch, encode_batch
from learner.update.packing import empty_batch, parts
from learner.update.train_step import build_train_step
from tests.learner.streams import MODEL, config_of, fresh_params, pack, random_group, steps_of

LOSSES: dict[str, dict[str, Any]] = {
    "grpo_clip": dict(name="grpo_clip"),
    "truncated_is": dict(name="truncated_is", normalization="sequence_sum"),
    "gspo": dict(name="gspo", clip_low=0.9, clip_high=9.0),
    "kl_and_entropy": dict(name="grpo_clip", kl_coef=0.1, entropy_coef=0.01),
}
ARRAYS = ("tokens", "loss_mask", "behavior_logprobs", "advantages", "token_versions", "token_weights")
FEWER = ("real_tokens", "packing/fill")
"""Metrics that say how many tokens were computed."""


def config_with(*, shares=True, rows=2, row_tokens=48, most=128, **other):
    config = config_of(rows=rows, row_tokens=row_tokens, **other)
    packing = dataclasses.replace(config.packing, share_prompts=shares, max_row_sequences=most)
    return dataclasses.replace(config, packing=packing)


def groups_of(seed, num_groups=4, *, max_prompt=9, max_response=8):
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = dict(max_prompt=max_prompt, max_response=max_response)
    return [random_group(rng, f"t{i}", rewards=(None,) * 5, **sizes) for i in range(num_groups)]


def sequences_of(batch):
    """Every sequence as its tokens see it: those of its shared prompt, then its own but for the repeated one."""
    for tokens, segments, prefixes, positions, *others in zip(
        *(getattr(batch, name) for name in ("tokens", "segment_ids", "prefix_ids", "positions", *ARRAYS[1:])),
        strict=True,
    ):
        shared = set(prefixes[prefixes != 0].tolist())
        for segment in set(segments[segments != 0].tolist()) - shared:
            own = np.nonzero(segments == segment)[0]
            (prefix,) = set(prefixes[own].tolist())
            seen = np.concatenate([np.nonzero(segments == prefix)[0] if prefix else own[:0], own])
            np.testing.assert_array_equal(positions[seen], np.arange(seen.size))
            assert np.all(np.diff(seen) > 0)  # what is seen lies before
            yield tuple(x[seen].tobytes() for x in (tokens, *others))


@given(seed=st.integers(0, 10**6), row_tokens=st.sampled_from([24, 48, 96]), most=st.sampled_from([2, 4, 128]))
def test_shared_packs_hold_the_sequences_of_unshared_ones_from_fewer_tokens(seed, row_tokens, most):
    groups = groups_of(seed)
    shared = [m.batch for m in pack(config_with(row_tokens=row_tokens, most=most), groups)]
    apart = [m.batch for m in pack(config_with(shares=False, row_tokens=row_tokens), groups)]
    got = collections.Counter(s for batch in shared for s in sequences_of(batch))
    alone = [dataclasses.replace(batch, prefix_ids=np.zeros_like(batch.tokens)) for batch in apart]
    assert got == collections.Counter(s for batch in alone for s in sequences_of(batch))
    assert sum((b.segment_ids != 0).sum() for b in shared) <= sum((b.segment_ids != 0).sum() for b in apart)
    assert all(len(set(row[row != 0])) <= most for batch in shared for row in batch.segment_ids)
    assert all((b.segment_ids != 0).sum(1).max() <= row_tokens for b in shared)


def test_part_of_a_group_is_as_long_as_its_prompt_once_and_each_response_with_one_token_more():
    (group,) = groups_of(0, 1, max_prompt=9)
    group = dataclasses.replace(group, prompt_tokens=np.arange(9, dtype=np.int32))
    lengths = [r.tokens.size for r in group.rollouts]
    (part,) = parts(group, config_with(row_tokens=200).packing)
    assert part.size == 8 + sum(1 + n for n in lengths) and list(part.rollouts) == list(range(5))
    tight = list(parts(group, config_with(row_tokens=9 + max(lengths)).packing))
    assert [i for p in tight for i in p.rollouts] == list(range(5)) and len(tight) > 1


def update_of(config, groups, steps=None):
    """An update's gradient and metrics."""
    steps = steps or steps_of(config)
    state = dataclasses.replace(steps.init(fresh_params()), step=jax.device_put(np.int32(4)))
    anchors = FrozenPolicies(
        steps, config, load_reference=lambda: jax.tree.map(lambda x: x * 1.1, fresh_params()), params=state.params
    )
    for micro in pack(config, groups):
        state = steps.accumulate(state, micro.batch, anchors.score(micro.batch))
    grads = jax.tree.map(np.array, state.accumulator.grads)
    return grads, jax.tree.map(np.array, steps.apply(state)[1])


def assert_same_update(got, want):
    scale = max(np.abs(x).max() for x in jax.tree.leaves(want[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * scale), got[0], want[0])
    for name, value in want[1].items():
        if name not in FEWER:
            np.testing.assert_allclose(got[1][name], value, rtol=2e-5, atol=1e-5, err_msg=name)


# The other two sum over tokens as these do.
@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "gspo",
        "kl_and_entropy",
        pytest.param("grpo_clip", marks=pytest.mark.nightly),
        pytest.param("truncated_is", marks=pytest.mark.nightly),
    ],
)
def test_update_from_shared_prompts_is_that_of_whole_sequences(name):
    groups = groups_of(1)
    shared, apart = (update_of(config_with(shares=s, **LOSSES[name]), groups) for s in (True, False))
    assert float(apart[1]["grad_norm"]) > 0
    assert_same_update(shared, apart)
    assert shared[1]["real_tokens"] < 0.8 * apart[1]["real_tokens"]


def test_response_moves_nothing_of_another_behind_the_same_prompt():
    """What is shared is the prompt alone: the loss masks of others are off, and their tokens are changed."""
    config = config_with(row_tokens=64)
    (group,) = groups_of(2, 1, max_prompt=9)
    group = dataclasses.replace(group, prompt_tokens=np.arange(7, dtype=np.int32))
    rng, steps = np.random.default_rng(0), steps_of(config)
    params = steps.init(fresh_params()).params

    def scores(of):
        (micro,) = pack(config, [of])
        batch = micro.batch
        first = batch.segment_ids == 2  # 1 is the prompt's
        assert first.any() and batch.loss_mask[first].any()
        return np.asarray(steps.score(params, batch))[first]

    others = [
        dataclasses.replace(r, tokens=rng.integers(0, 19, r.tokens.size).astype(np.int32)) for r in group.rollouts
    ]
    changed = dataclasses.replace(group, rollouts=(group.rollouts[0], *others[1:]))
    np.testing.assert_array_equal(scores(changed), scores(group))
    first = dataclasses.replace(group, prompt_tokens=group.prompt_tokens[::-1].copy())
    assert np.abs(scores(first) - scores(group)).max() > 1e-3


@pytest.mark.heavy
def test_probe_of_shared_prompts_finds_no_difference_to_what_was_scored_apart():
    (group,) = groups_of(3, 1)
    group = dataclasses.replace(group, prompt_tokens=np.arange(6, dtype=np.int32))
    apart = config_with(shares=False)
    steps = steps_of(apart)
    (micro,) = pack(apart, [group])
    params = steps.init(fresh_params()).params
    logprobs = np.asarray(steps.score(params, micro.batch))
    rollouts = []
    for segment, rollout in enumerate(sorted(group.rollouts, key=lambda r: -r.tokens.size), start=1):
        where = np.nonzero(micro.batch.segment_ids == segment)
        own = logprobs[where][-rollout.tokens.size :]
        rollouts.append(dataclasses.replace(rollout, behavior_logprobs=np.where(rollout.loss_mask, own, 0)))
    told = dataclasses.replace(group, rollouts=tuple(rollouts))
    config = config_with()
    sharing = steps_of(config)
    assert max_abs_dlogprob(lambda b: np.asarray(sharing.score(params, b)), told, config.packing) < 1e-5


def test_packing_auto_counts_a_prompt_once():
    groups = groups_of(5, max_prompt=9)
    config = config_with(rows=8, row_tokens=64)
    config = dataclasses.replace(config, packing=dataclasses.replace(config.packing, auto=True))
    shape = AutoShape(config).choose(groups, ends_update=True)
    tokens = sum(part.size for group in groups for part in parts(group, config.packing))
    assert tokens <= shape.rows * shape.row_tokens <= 8 * 64
    micros = pack(dataclasses.replace(config, packing=shape), groups)
    assert sum((m.batch.segment_ids != 0).sum() for m in micros) == tokens


def test_told_batch_of_shared_prompts_is_refused_by_a_process_that_shares_none():
    packing = config_with().packing
    told = encode_batch(empty_batch(packing))
    assert decode_batch(told, packing).prefix_ids is not None
    with pytest.raises(ValueError, match="use one config everywhere"):
        decode_batch(told, dataclasses.replace(packing, share_prompts=False))


def test_build_steps_refuses_shared_prompts_of_a_model_with_windows():
    windowed = dataclasses.replace(MODEL, model_type="mistral", sliding_window=4, windowed_layers=(True, True))
    with pytest.raises(ValueError, match="packing.share_prompts: attention counts a window's tokens"):
        build_train_step(windowed, config_with(), make_mesh())
