"""Routing replay: where captured routing lands in a batch, what the model makes of it, and what is refused."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from msgspec import UNSET

from bridge.rollout_types import Group
from configs import sections
from learner.distributed.sharding import make_mesh
from learner.model.decoder import init_params, make_apply
from learner.model.routing_replay import ExpertLoad, RoutingShape, routing_shape
from learner.update.frozen_policies import FrozenPolicies, TeacherPolicy
from learner.update.loss_fn import frozen_loss_fn
from learner.update.packed_codec import decode_batch, encode_batch
from learner.update.packing import empty_batch
from learner.update.train_step import build_train_step
from tests.bridge.factories import captured
from tests.learner.streams import MODEL, config_of, model_of, pack, random_group

SHAPE = RoutingShape(num_layers=2, num_per_token=1, num_experts=3)
MOE = model_of(
    "qwen3_moe",
    "Qwen3Moe",
    num_experts=3,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)


def replaying(config):
    """The config with replay; its groups have 3 samples."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, routing_replay=True),
        actor=dataclasses.replace(config.actor, prefix_caching=True),
    )


def routed_group(seed: int, name: str = "t", *, num_samples: int = 4, experts=None):
    """A group whose routing is random, or a layer's one expert; of its last response nothing was captured."""
    rng = np.random.default_rng(seed)
    group = random_group(rng, name, max_prompt=5, max_response=8, rewards=(None,) * num_samples)
    group = dataclasses.replace(group, prompt_tokens=rng.integers(0, 19, 5).astype(np.int32))
    rollouts = []
    for rollout in group.rollouts[:-1]:
        rows = rng.integers(0, 3, (5 + rollout.tokens.size - 1, 2, 1))
        rows = rows if experts is None else np.broadcast_to(np.array(experts)[:, None], rows.shape)
        rollouts.append(dataclasses.replace(rollout, routed_experts=rows.astype(np.uint8)))
    return dataclasses.replace(group, rollouts=(*rollouts, group.rollouts[-1]))


@functools.cache
def moe_params():
    params = jax.jit(init_params, static_argnums=0)(MOE, jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x) * 4, params)


def test_every_input_token_is_packed_with_its_routing_and_others_with_none():
    config = replaying(config_of(rows=2, row_tokens=32))
    group = routed_group(0)
    seen = set()
    for micro in pack(config, [group], routing=SHAPE):
        batch = micro.batch
        for tokens, segments, routed in zip(batch.tokens, batch.segment_ids, captured(batch), strict=True):
            for segment in set(segments[segments > 0].tolist()):
                own = np.flatnonzero(segments == segment)
                (found,) = (
                    i
                    for i, r in enumerate(group.rollouts)
                    if np.array_equal(np.concatenate([group.prompt_tokens, r.tokens]), tokens[own])
                )
                seen.add(found)
                rows = group.rollouts[found].routed_experts
                want = np.full((own.size, 2, 1), -1)
                if rows is not UNSET:
                    want[:-1] = rows
                np.testing.assert_array_equal(routed[own], want)
            assert (routed[segments == 0] == -1).all()
    assert seen == {0, 1, 2, 3}


def test_shared_prompt_has_the_routing_of_a_response_and_each_response_its_own():
    config = config_of(rows=1, row_tokens=64)
    config = replaying(dataclasses.replace(config, packing=dataclasses.replace(config.packing, share_prompts=True)))
    group = routed_group(1)
    (micro,) = pack(config, [group], routing=SHAPE)
    routed, segments = captured(micro.batch)[0], micro.batch.segment_ids[0]
    np.testing.assert_array_equal(routed[segments == 1], captured(group.rollouts[2])[:4])
    for segment, rollout in enumerate(group.rollouts[:3], start=2):
        np.testing.assert_array_equal(routed[segments == segment][:-1], captured(rollout)[4:])
    assert (routed[segments == 5] == -1).all()


def test_batches_of_a_run_have_one_structure_whether_anything_was_captured():
    config = replaying(config_of(rows=1, row_tokens=64))
    bare = dataclasses.replace(routed_group(2), rollouts=routed_group(2).rollouts[-1:])
    (micro,) = pack(config, [bare], routing=SHAPE)
    empty = empty_batch(config.packing, SHAPE)
    assert jax.tree.map(np.shape, micro.batch) == jax.tree.map(np.shape, empty)
    told = encode_batch(empty)
    assert jax.tree.structure(decode_batch(told, config.packing, SHAPE)) == jax.tree.structure(empty)
    with pytest.raises(ValueError, match="expected"):
        decode_batch(told, config.packing)


def test_model_with_one_replayed_expert_a_layer_is_the_model_of_those_experts():
    # With k = 1 and normalized weights the router has no say but for the choice.
    chosen = (2, 1)
    layers = dict(moe_params()["layers"])
    for part in ("experts_gate", "experts_up", "experts_down"):
        kernel = layers[part]["kernel"]
        layers[part] = {"kernel": np.stack([kernel[layer, e : e + 1] for layer, e in enumerate(chosen)])}
    layers["router"] = {"kernel": layers["router"]["kernel"][:, :1]}
    only = dataclasses.replace(MOE, num_experts=1)
    tokens = np.random.default_rng(0).integers(0, 19, (2, 8)).astype(np.int32)
    positions, segments = np.tile(np.arange(8, dtype=np.int32), (2, 1)), np.ones((2, 8), np.int32)
    routed = np.tile(np.array(chosen, np.int16)[:, None], (2, 8, 1, 1))
    want = make_apply(only)(moe_params() | {"layers": layers}, tokens, positions, segments)
    apply = make_apply(MOE)
    got = apply(moe_params(), tokens, positions, segments, None, routed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    assert np.abs(apply(moe_params(), tokens, positions, segments) - want).max() > 0.1


@pytest.mark.heavy
def test_policies_replay_the_engines_experts_and_the_reference_routes_by_itself():
    config = replaying(config_of(rows=1, row_tokens=64, name="decoupled_ppo", kl_coef=0.1, proximal="round"))
    steps = build_train_step(MOE, config, make_mesh())
    (micro,) = pack(config, [routed_group(3, experts=(2, 1))], routing=SHAPE)
    anchors = FrozenPolicies(steps, config, load_reference=moe_params, params=moe_params())
    scores = anchors.score(steps.put(micro.batch))
    bare = dataclasses.replace(micro.batch, routed_experts=np.full_like(micro.batch.routed_experts, -1))
    own, replayed = (np.asarray(steps.score(moe_params(), batch)) for batch in (bare, micro.batch))
    np.testing.assert_array_equal(scores.reference, own)
    np.testing.assert_array_equal(scores.proximal, replayed)
    of_last = np.asarray(micro.batch.segment_ids) == _segment_without_capture(micro.batch)
    assert np.abs(own - replayed)[~of_last].max() > 0.1
    np.testing.assert_allclose(own[of_last], replayed[of_last], atol=1e-6)
    state = steps.accumulate(steps.init(moe_params()), micro.batch, scores)
    router = np.asarray(state.accumulator.grads["layers"]["router"]["kernel"])
    assert np.isfinite(router).all()


@pytest.mark.heavy
@pytest.mark.parametrize("teacher", [MOE, MODEL], ids=["experts", "dense"])
def test_teacher_routes_by_itself(teacher):
    config = replaying(config_of(rows=1, row_tokens=64, name="reinforce"))
    mesh = make_mesh()
    params = init_params(teacher, jax.random.key(1))
    loss_fn = frozen_loss_fn(teacher, config, mesh)
    policy = TeacherPolicy(params, loss_fn.score, mesh)
    (micro,) = pack(config, [routed_group(3, experts=(2, 1))], routing=SHAPE, teachers=(1,))
    bare = dataclasses.replace(micro.batch, routed_experts=None)
    np.testing.assert_array_equal(policy.score(micro.batch, 1), policy.score(bare, 1))


def _segment_without_capture(batch) -> int:
    (segment,) = {
        int(s) for s in np.unique(batch.segment_ids) if s and (batch.routed_experts[batch.segment_ids == s] == -1).all()
    }
    return segment


def test_replay_is_refused_where_it_can_not_work():
    config = replaying(config_of())
    assert routing_shape(config_of(), MOE) is None
    assert routing_shape(config, MOE) == SHAPE
    with pytest.raises(ValueError, match="dense"):
        routing_shape(config, MODEL)
    with pytest.raises(ValueError, match=r"model.routing_replay requires actor.prefix_caching"):
        dataclasses.replace(config, actor=sections.ActorConfig())


def test_group_whose_message_would_be_too_large_is_refused_unless_each_sample_is_a_ticket():
    big = dataclasses.replace(MOE, num_layers=48, num_experts=128, num_experts_per_token=8)
    config = replaying(config_of(row_tokens=32768))
    config = dataclasses.replace(config, rounds=sections.RoundsConfig(samples_per_group=16))
    with pytest.raises(ValueError, match="admission.unit=sample"):
        routing_shape(config, big)  # 16 * 32768 * 400 bytes
    single = dataclasses.replace(config, admission=sections.AdmissionConfig(unit="sample", policy="fifo"))
    assert routing_shape(single, big) == RoutingShape(48, 8, 128)
    assert RoutingShape(48, 8, 128).token_bytes == 384 and RoutingShape(48, 8, 512).token_bytes == 768


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        (UNSET, True),
        ([[[0, 2], [1, 0]]], True),
        ([[[0, 3], [1, 0]]], False),  # no such expert
        ([[[0, 2], [1, 1]]], False),  # twice, as where nothing was captured
        ([[[0, 2]]], False),  # other layers
        ([[[0, 2, 1], [1, 0, 2]]], False),  # other k
    ],
)
def test_routing_fits_a_model_or_not(rows: Any, fits: bool):
    routed = rows if rows is UNSET else np.array(rows, np.uint8)
    assert RoutingShape(2, 2, 3).fits(routed) == fits


def test_expert_load_is_that_of_each_layer():
    load = ExpertLoad(SHAPE)
    group = routed_group(5, num_samples=2)
    rows = np.zeros((len(captured(group.rollouts[0])), 2, 1), np.uint8)
    rows[:, 1, 0] = np.arange(len(rows)) % 3  # one expert has all of the first layer; the second is even
    rows = rows[: len(rows) // 3 * 3]
    # A group would refuse rows that are not of all its tokens.
    load.add(cast(Group, SimpleNamespace(rollouts=(SimpleNamespace(routed_experts=rows), group.rollouts[1]))))
    found = load.metrics
    assert found["routing/captured"] == 0.5
    assert found["routing/max_load"] == pytest.approx(3.0)
    assert found["routing/load_entropy"] == pytest.approx(0.5)  # mean of 0 and 1
    load.clear()
    assert load.metrics == {"routing/captured": 0.0}
