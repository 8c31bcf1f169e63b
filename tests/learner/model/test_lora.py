"""Adapters against float64 numpy: what they compute, what trains, what is frozen, and that meshes change nothing."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.param_names import combine, flatten, unflatten
from configs.sections import LoraConfig
from learner.distributed.sharding import make_mesh
from learner.model.decoder import make_apply
from learner.model.lora import abstract_adapters, check_lora, init_adapters, merge
from learner.update.frozen_policies import FrozenPolicies
from learner.update.train_step import build_train_step
from tests.learner.streams import MODEL, config_of, fresh_params, pack, random_groups, steps_of, stream

LORA = LoraConfig(rank=3, alpha=6.0)
ATTENTION = LoraConfig(rank=2, alpha=5.0, targets="q,v,o", rank_stabilized=True)


def with_lora(config, lora=LORA, **publish):
    return dataclasses.replace(config, lora=lora, publish=dataclasses.replace(config.publish, **publish))


def trained_adapters(lora, seed=0):
    """As after many steps: B isn't zero."""
    random = np.random.default_rng(seed)
    shapes = flatten(abstract_adapters(MODEL, lora))
    return unflatten({p: jnp.asarray(random.normal(0, 0.3, x.shape), jnp.float32) for p, x in shapes.items()})


def added(base, adapters, lora):
    """W + s B A in float64, matrix by matrix."""
    leaves, parts = dict(flatten(base)), flatten(adapters)
    scale = lora.alpha / (lora.rank**0.5 if lora.rank_stabilized else lora.rank)
    for target in lora.targets.split(","):
        a, b = (np.asarray(parts[f"layers/{target}_proj/lora_{x}"], np.float64) for x in "ab")
        kernel = f"layers/{target}_proj/kernel"
        delta = [scale * b[layer] @ a[layer] for layer in range(MODEL.num_layers)]
        leaves[kernel] = np.asarray(leaves[kernel], np.float64) + np.stack(delta)
    return unflatten({p: np.asarray(x, np.float32) for p, x in leaves.items()})


@pytest.mark.heavy
@pytest.mark.parametrize("lora", [LORA, ATTENTION], ids=["all", "rank_stabilized"])
def test_adapters_applied_are_the_matrices_with_their_product_added(lora):
    base, adapters = fresh_params(), trained_adapters(lora)
    row = np.arange(12)[None] % 19, np.arange(12)[None], np.ones((1, 12), np.int32)
    want = make_apply(MODEL)(added(base, adapters, lora), *row)
    assert np.abs(np.asarray(want - make_apply(MODEL)(base, *row))).max() > 0.1
    got = make_apply(MODEL, lora=lora)(combine(base, adapters), *row)
    np.testing.assert_allclose(got, want, atol=2e-5)
    merged = merge(base, adapters, scale=lora.scale, dtype="float32")
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), merged, added(base, adapters, lora))


@pytest.mark.heavy
def test_merge_keeps_the_arrays_of_what_has_no_adapter():
    base = jax.tree.map(jnp.asarray, fresh_params())
    merged = flatten(merge(base, trained_adapters(ATTENTION), scale=ATTENTION.scale, dtype="bfloat16"))
    adapted = {f"layers/{target}_proj/kernel" for target in "qvo"}
    for path, leaf in flatten(base).items():
        assert (merged[path] is leaf) == (path not in adapted), path
    assert all(merged[path].dtype == jnp.bfloat16 for path in adapted)


@pytest.mark.heavy
def test_fresh_adapters_change_nothing_and_begin_as_in_peft():
    adapters = init_adapters(MODEL, LORA, jax.random.key(0))
    config = with_lora(config_of())
    steps, micro = steps_of(config), pack(config, random_groups(0, 2))[0]
    got = np.asarray(steps.score(adapters, micro.batch, fresh_params()))
    np.testing.assert_array_equal(got, steps_of(config_of()).score(fresh_params(), micro.batch))
    for path, leaf in flatten(adapters).items():
        if path.endswith("lora_a"):
            bound = leaf.shape[-1] ** -0.5
            assert 0.8 * bound < np.abs(leaf).max() <= bound, path
        else:
            assert not leaf.any()


@pytest.mark.heavy
def test_steps_train_adapters_alone_and_move_the_policy_as_the_whole_gradient_says():
    config = with_lora(config_of())
    steps, base = steps_of(config), fresh_params()
    state = dataclasses.replace(steps.init(trained_adapters(LORA)))
    names = set(flatten(abstract_adapters(MODEL, LORA)))
    assert set(flatten(state.params)) == set(flatten(state.accumulator.grads)) == names
    of_parameters = {x.shape for x in flatten(base).values() if x.ndim == 3}
    assert not of_parameters & {x.shape for x in jax.tree.leaves(state.opt_state)}
    micro = stream(config, random_groups(1, 3))[0]
    got = flatten(steps.accumulate(state, micro.batch, base=base).accumulator.grads)
    # dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T, with dL/dW of the merged model, trained whole.
    whole = steps_of(config_of())
    merged = added(base, trained_adapters(LORA), LORA)
    of_kernels = flatten(whole.accumulate(whole.init(merged), micro.batch).accumulator.grads)
    parts = flatten(trained_adapters(LORA))
    for module in LORA.modules:
        d_w = np.asarray(of_kernels[f"layers/{module}/kernel"], np.float64)
        a, b = (np.asarray(parts[f"layers/{module}/lora_{x}"], np.float64) for x in "ab")
        want_a, want_b = 2.0 * b.swapaxes(1, 2) @ d_w, 2.0 * d_w @ a.swapaxes(1, 2)
        tolerance = 2e-4 * np.abs(want_a).max(), 2e-4 * np.abs(want_b).max()
        np.testing.assert_allclose(got[f"layers/{module}/lora_a"], want_a, atol=tolerance[0])
        np.testing.assert_allclose(got[f"layers/{module}/lora_b"], want_b, atol=tolerance[1])


@pytest.mark.heavy
def test_accumulate_makes_no_gradient_of_the_base():
    """In the compiled program nothing but the base's own arguments has the shape of its matrices or its head."""
    model = dataclasses.replace(MODEL, vocab_size=23, intermediate_size=29)
    config = with_lora(config_of(), LoraConfig(rank=3, targets="q,k,v,o,gate,up,down"))
    mesh = make_mesh(devices=jax.devices()[:1])

    def sums(steps):
        text = steps.lower()["accumulate"].compile().as_text()
        return [
            shape for shape in ("f32[23,16]", "f32[29,16]") if re.search(rf"= {re.escape(shape)}\S* (dot|add)", text)
        ]

    assert sums(build_train_step(model, config, mesh)) == []
    assert sums(build_train_step(model, config_of(), mesh)) != []


@pytest.mark.heavy
def test_the_kl_reference_is_the_base_itself_zero_at_the_start_and_right_later():
    config = with_lora(config_of(kl_coef=0.1))
    steps, base, groups = steps_of(config), jax.tree.map(jnp.asarray, fresh_params()), random_groups(0, 2)
    state = steps.init(steps.init_adapters())
    anchors = FrozenPolicies(steps, config, load_reference=lambda: base, params=state.params, base=base)
    assert anchors._reference is base  # no second copy
    for step in range(3):
        micro = pack(config, groups)[0]
        logprobs = np.asarray(steps.score(state.params, micro.batch, base))
        reference = np.asarray(anchors.score(micro.batch).reference)
        np.testing.assert_allclose(reference, steps_of(config_of()).score(base, micro.batch), atol=1e-6)
        mask = np.asarray(micro.batch.loss_mask)
        log_ratio = (reference - logprobs)[mask].astype(np.float64)
        want = np.mean(np.exp(log_ratio) - log_ratio - 1)  # k3
        state = steps.accumulate(state, micro.batch, anchors.score(micro.batch), base)
        state, metrics = steps.apply(state)
        assert float(metrics["reference_kl"]) == pytest.approx(want, rel=1e-3, abs=1e-9)
        assert (want == 0) == (step == 0)


def test_check_lora_of_experts_is_refused():
    moe = dataclasses.replace(
        MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_token=2, moe_intermediate_size=8
    )
    with pytest.raises(ValueError, match="gate,up,down of a mixture of experts"):
        check_lora(LORA, moe, publishes_adapters=False)
    check_lora(ATTENTION, moe, publishes_adapters=False)
    with pytest.raises(ValueError, match="publish.lora=merged"):
        check_lora(ATTENTION, moe, publishes_adapters=True)
