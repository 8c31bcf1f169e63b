"""What an environment said is context alone: whatever a rollout holds at an observed token changes nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from learner.parity import max_abs_dlogprob
from learner.update.frozen_policies import FrozenPolicies
from tests.learner.streams import MODEL, config_of, fresh_params, pack, random_group, steps_of

LOSSES = {
    "grpo_clip": dict(name="grpo_clip"),
    "truncated_is": dict(name="truncated_is"),
    "gspo": dict(name="gspo"),
    "kl_and_entropy": dict(name="grpo_clip", kl_coef=0.1, entropy_coef=0.01),
    "by_turns": dict(advantage="turn_grpo", turn_discount=0.5),
}


def episode(rng, turns, reward):
    """So many (observed, sampled) tokens, and what the turns earned."""
    mask = np.concatenate([np.arange(o + s) >= o for o, s in turns])
    size = mask.size
    base = random_group(rng, "any", max_prompt=1).rollouts[0]
    return dataclasses.replace(
        base,
        tokens=rng.integers(0, MODEL.vocab_size, size).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, rng.uniform(-5, -0.5, size), 0).astype(np.float32),
        token_versions=np.full(size, 1, np.int32),
        turn_rewards=rng.normal(size=len(turns)).astype(np.float32),
        reward=reward,
    )


def groups_of(seed):
    """Six episodes, of one to three turns, that fill rows of 16 tokens with several sequences each."""
    rng = np.random.default_rng(seed)
    turns = ([(0, 1), (2, 2)], [(2, 1), (1, 1), (1, 2)], [(3, 4)])
    groups = [random_group(rng, f"t{i}", max_prompt=2) for i in range(2)]
    return [
        dataclasses.replace(g, rollouts=tuple(episode(rng, t, float(n)) for n, t in enumerate(turns))) for g in groups
    ]


def flipped(rollout, rng):
    """The same with other logprobs at the observed tokens, and other versions wherever those may be others."""
    observed = ~rollout.loss_mask
    versions = rollout.token_versions.copy()
    versions[: np.argmax(rollout.loss_mask)] = 0  # older, before the first sampled one
    logprobs = np.where(observed, rng.uniform(-90, 0, observed.size), rollout.behavior_logprobs).astype(np.float32)
    return dataclasses.replace(rollout, behavior_logprobs=logprobs, token_versions=versions)


def junk_where_masked(batch, rng):
    """The same batch with junk at all that does not train: observed tokens, prompts, padding."""
    masked = ~batch.loss_mask

    def junk(array, low, high):
        return np.where(masked, rng.uniform(low, high, array.shape), array).astype(array.dtype)

    return dataclasses.replace(
        batch,
        behavior_logprobs=junk(batch.behavior_logprobs, -90, 0),
        advantages=junk(batch.advantages, -50, 50),
        token_versions=junk(batch.token_versions, 0, 100),
    )


def gradient_and_metrics(config, steps, batches):
    state = dataclasses.replace(steps.init(fresh_params()), step=jax.device_put(np.int32(3)))
    anchors = FrozenPolicies(steps, config, load_reference=fresh_params, params=state.params)
    for batch in batches:
        state = steps.accumulate(state, batch, anchors.score(batch))
    grads = jax.tree.map(np.array, state.accumulator.grads)
    _, metrics = steps.apply(state)
    return grads, jax.tree.map(np.array, metrics)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LOSSES)
def test_observed_tokens_flipped_leave_gradient_and_every_metric_to_the_bit(name):
    config = config_of(**LOSSES[name])
    steps, groups, rng = steps_of(config), groups_of(0), np.random.default_rng(1)
    plain = [m.batch for m in pack(config, groups)]
    assert max(b.segment_ids.max() for b in plain) > 1  # several sequences a row
    other = [dataclasses.replace(g, rollouts=tuple(flipped(r, rng) for r in g.rollouts)) for g in groups]
    wild = [junk_where_masked(b, rng) for b in plain]
    changed = [m.batch for m in pack(config, other)]
    assert any((a.token_versions != b.token_versions).any() for a, b in zip(plain, changed, strict=True))
    want = gradient_and_metrics(config, steps, plain)
    assert float(want[1]["grad_norm"]) > 0 and float(want[1]["max_abs_dlogprob"]) > 0
    for batches in (changed, wild):
        got = gradient_and_metrics(config, steps, batches)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.heavy
def test_sampled_token_flipped_changes_gradient_and_metrics():
    """The test above can fail: the same change at a token that was sampled is seen."""
    config = config_of()
    steps, groups = steps_of(config), groups_of(0)
    first, *rest = groups[0].rollouts
    logprobs = first.behavior_logprobs.copy()
    logprobs[np.argmax(first.loss_mask)] -= 1
    changed = dataclasses.replace(first, behavior_logprobs=logprobs)
    other = [dataclasses.replace(groups[0], rollouts=(changed, *rest)), groups[1]]
    want = gradient_and_metrics(config, steps, [m.batch for m in pack(config, groups)])
    got = gradient_and_metrics(config, steps, [m.batch for m in pack(config, other)])
    assert not np.array_equal(got[1]["grad_norm"], want[1]["grad_norm"])
    assert not np.array_equal(got[1]["mismatch_kl"], want[1]["mismatch_kl"])


@pytest.mark.heavy
def test_observed_token_itself_is_context_and_changes_what_follows():
    config = config_of()
    steps, groups = steps_of(config), groups_of(0)
    last = groups[0].rollouts[-1]
    tokens = last.tokens.copy()
    tokens[0] = (tokens[0] + 1) % MODEL.vocab_size
    assert not last.loss_mask[0]
    other = [
        dataclasses.replace(groups[0], rollouts=(*groups[0].rollouts[:-1], dataclasses.replace(last, tokens=tokens))),
        groups[1],
    ]
    want = gradient_and_metrics(config, steps, [m.batch for m in pack(config, groups)])
    got = gradient_and_metrics(config, steps, [m.batch for m in pack(config, other)])
    assert not np.array_equal(got[1]["mismatch_kl"], want[1]["mismatch_kl"])


@pytest.mark.heavy
def test_step_counts_sampled_tokens_as_trained_and_all_as_computed():
    config = config_of()
    groups = groups_of(0)
    _, metrics = gradient_and_metrics(config, steps_of(config), [m.batch for m in pack(config, groups)])
    rollouts = [r for g in groups for r in g.rollouts]
    sampled = [int(r.loss_mask.sum()) for r in rollouts]
    assert metrics["tokens"] == sum(sampled)
    assert metrics["real_tokens"] == sum(g.num_tokens for g in groups)
    np.testing.assert_allclose(metrics["response/mean_tokens"], np.mean(sampled), rtol=1e-6)
    assert metrics["response/max_tokens"] == max(sampled)


@pytest.mark.heavy
def test_probe_does_not_compare_observed_tokens():
    config = config_of()
    steps, (group, _) = steps_of(config), groups_of(0)

    def score(batch):
        return np.asarray(steps.score(fresh_params(), batch))

    rng = np.random.default_rng(1)
    other = dataclasses.replace(group, rollouts=tuple(flipped(r, rng) for r in group.rollouts))
    want = max_abs_dlogprob(score, group, config.packing)
    assert max_abs_dlogprob(score, other, config.packing) == want > 0
