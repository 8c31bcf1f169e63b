import dataclasses

import jax
import numpy as np
import pytest

from learner.model import hf_save
from learner.restore import WeightLoader, frozen_policies
from learner.update.frozen_policies import FrozenLogprobs, FrozenPolicies
from tests.learner.streams import MODEL, config_of, fresh_params, pack, random_groups, steps_of


def trained(steps, state, anchors, micro):
    return steps.apply(steps.accumulate(state, micro.batch, anchors.score(micro.batch)))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "setting", [dict(proximal="round"), dict(proximal="published", publish_every=3)], ids=["round", "published"]
)
def test_anchors_keep_the_reference_and_the_published_policy_while_the_learner_moves_on(setting):
    config = config_of(name="decoupled_ppo", kl_coef=0.1, **setting)
    steps, micro = steps_of(config), pack(config, random_groups(0, 2))[0]
    reference = jax.tree.map(lambda x: x * 0.9, fresh_params())
    state = steps.init(fresh_params())
    anchors = FrozenPolicies(steps, config, load_reference=lambda: reference, params=state.params)
    want_reference = np.asarray(steps.score(reference, micro.batch))
    want_round = np.asarray(steps.score(fresh_params(), micro.batch))
    assert np.abs(want_reference - want_round).max() > 0.01
    for step in range(3):
        scores = anchors.score(micro.batch)
        np.testing.assert_array_equal(scores.reference, want_reference)
        np.testing.assert_array_equal(scores.proximal, want_round)
        state, metrics = trained(steps, state, anchors, micro)
        assert np.isfinite(metrics["loss"]) and metrics["reference_kl"] > 0, step
    anchors.publish(state.params)
    now = np.asarray(steps.score(state.params, micro.batch))
    assert np.abs(now - want_round).max() > 1e-3
    np.testing.assert_array_equal(anchors.score(micro.batch).proximal, now)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "setting",
    [
        dict(name="masked_is"),
        dict(name="decoupled_ppo", epochs=2),
        # One update for each published version: the version published is the one that the batch starts from.
        dict(name="decoupled_ppo", epochs=2, publish_every=1, proximal="published"),
    ],
)
def test_anchors_keep_no_copy_where_the_policy_itself_is_the_proximal_one(setting):
    def load():
        raise AssertionError("the reference was loaded")

    config = config_of(**setting)
    steps, micro = steps_of(config), pack(config, random_groups(0, 2))[0]
    anchors = FrozenPolicies(steps, config, load_reference=load, params=fresh_params())
    assert anchors.score(micro.batch) == FrozenLogprobs()
    _, metrics = trained(steps, steps.init(fresh_params()), anchors, micro)
    assert np.isfinite(metrics["loss"]) and int(metrics["skipped_updates"]) == 0


@pytest.mark.heavy
@pytest.mark.parametrize(("param", "compute"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_reference_is_exactly_the_policy_that_starts_from_the_same_folder(tmp_path, param, compute):
    config = config_of(kl_coef=0.1, param_dtype=param)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=compute))
    uneven = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.asarray(x) * uneven.uniform(0.5, 1.5, x.shape).astype("float32"), fresh_params())
    hf_save.save(tmp_path, MODEL, params)
    steps, micro, weights = steps_of(config), pack(config, random_groups(0, 2))[0], WeightLoader(config, MODEL)
    policy = weights.load(tmp_path, param)
    anchors = frozen_policies(steps, weights, tmp_path, params=policy, base=None)
    np.testing.assert_array_equal(anchors.score(micro.batch).reference, steps.score(policy, micro.batch))


def test_accumulate_without_the_logprobs_that_the_loss_needs_is_refused():
    config = config_of(kl_coef=0.1)
    steps, micro = steps_of(config), pack(config, random_groups(0, 2))[0]
    with pytest.raises(ValueError, match="reference=True, teacher=False, top=False and proximal=False"):
        steps.accumulate(steps.init(fresh_params()), micro.batch)
