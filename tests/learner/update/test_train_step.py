import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.sections import OptimizerConfig
from learner.distributed.sharding import AXES, make_mesh
from learner.metrics.metric_names import METRICS
from learner.model.decoder import make_apply
from learner.model.hf_load import load
from learner.update.packing import empty_batch
from learner.update.train_step import build_train_step
from tests.learner.model.tiny import save_reference
from tests.learner.streams import (
    MODEL,
    TEMPERATURE,
    config_of,
    fresh_params,
    pack,
    random_groups,
    steps_of,
    stream,
)
from tests.support.lazy import torch

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def steps():
    return steps_of(config_of())


def update(steps, state, groups, config=None):
    for micro in stream(config or config_of(), groups):
        state = steps.accumulate(state, micro.batch)
    return steps.apply(state)


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.heavy
def test_apply_advances_step_and_empties_the_accumulator(steps):
    state, metrics = update(steps, steps.init(fresh_params()), random_groups(0, 4))
    assert int(state.step) == 1 and int(state.skipped_updates) == 0
    assert_same(host(state.accumulator), host(steps.zero_accumulator()))
    assert metrics.keys() - {"real_tokens"} <= METRICS.keys()
    assert all(isinstance(v, jax.Array) and v.ndim == 0 for v in metrics.values())
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2 / 2)  # first of two warm-up steps


@pytest.mark.heavy
def test_accumulate_leaves_the_parameters_buffers_alone(steps):
    state = steps.init(fresh_params())
    held = jax.tree.leaves(state.params)
    micro = pack(config_of(), random_groups(1, 1))[0]
    later = steps.accumulate(state, micro.batch)
    assert all(a is b for a, b in zip(held, jax.tree.leaves(later.params), strict=True))
    assert not any(x.is_deleted() for x in held)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.accumulator.grads))


def test_lag_counts_from_the_step_the_tokens_are_trained_at(steps):
    state, groups = steps.init(fresh_params()), random_groups(2, 3)
    for step in range(5):
        assert int(state.step) == step
        state, metrics = update(steps, state, groups)
    ages = np.concatenate([4 - r.token_versions[r.loss_mask] for g in groups for r in g.rollouts])
    np.testing.assert_allclose(metrics["lag/mean"], ages.mean(), rtol=1e-6)
    assert int(metrics["lag/max"]) == ages.max()


@pytest.mark.parametrize("field,value", [("advantages", np.nan), ("advantages", np.inf), ("behavior_logprobs", np.nan)])
def test_apply_non_finite_batch_changes_nothing_and_is_counted(steps, field, value):
    groups = random_groups(3, 3)
    state, _ = update(steps, steps.init(fresh_params()), groups)
    before = host((state.params, state.opt_state))
    micro = pack(config_of(), groups[:1])[0]
    bad = np.array(getattr(micro.batch, field))
    bad[micro.batch.loss_mask] = value
    state = steps.accumulate(state, dataclasses.replace(micro.batch, **{field: bad}))
    state, metrics = steps.apply(state)
    assert_same(host((state.params, state.opt_state)), before)
    assert int(metrics["skipped_updates"]) == 1 and int(state.step) == 2
    assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"])
    # The next update is as if the bad one had not been: nothing of it is left in the sums.
    state, metrics = update(steps, state, groups)
    want, _ = update(steps, steps.init(fresh_params()), groups)
    want, _ = update(steps, want, groups)
    assert_same(host((state.params, state.opt_state)), host((want.params, want.opt_state)))
    assert int(metrics["skipped_updates"]) == 1 and int(state.step) == 3


def test_apply_update_without_trained_tokens_is_skipped(steps):
    state = steps.init(fresh_params())
    before = host(state.params)
    state = steps.accumulate(state, empty_batch(config_of().packing))
    state, metrics = steps.apply(state)
    assert_same(host(state.params), before)
    assert int(metrics["skipped_updates"]) == 1


def test_accumulate_extreme_behaviour_logprobs_still_train(steps):
    micro = pack(config_of(), random_groups(4, 2)[:1])[0]
    for mu in (-300.0, 0.0):
        behavior = np.where(micro.batch.loss_mask, np.float32(mu), 0)
        batch = dataclasses.replace(micro.batch, behavior_logprobs=behavior)
        _, metrics = steps.apply(steps.accumulate(steps.init(fresh_params()), batch))
        assert int(metrics["skipped_updates"]) == 0 and np.isfinite(metrics["grad_norm"])
        assert np.isfinite(metrics["ess"])


def test_score_equals_plain_log_softmax_of_each_sequence_alone(steps):
    params, groups = fresh_params(), random_groups(5, 2)
    apply, positions = jax.jit(make_apply(MODEL)), np.arange(16)[None]
    seen = 0
    for micro in pack(config_of(), groups):
        got, batch = np.asarray(steps.score(params, micro.batch)), micro.batch
        for b, row in enumerate(batch.segment_ids):
            for segment in range(1, row.max() + 1):
                where = np.nonzero(row == segment)[0]
                n, tokens = where.size, batch.tokens[b, where]
                alone = np.zeros((1, 16), np.int32)
                alone[0, :n] = tokens
                hidden = np.asarray(apply(params, alone, positions, (positions < n).astype(np.int32))[0, :n])
                logits = hidden.astype(np.float64) @ params["lm_head"]["kernel"].T / TEMPERATURE
                logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                want = np.concatenate([[0], logp[np.arange(n - 1), tokens[1:]]])
                want = np.where(batch.loss_mask[b, where], want, 0)  # only what trains is scored
                np.testing.assert_allclose(got[b, where], want, atol=1e-5)
                seen += 1
    assert seen == 6


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_compile_once_each_over_ten_varied_batches(dtype):
    config = config_of(param_dtype=dtype)
    steps = steps_of(config)
    params = jax.tree.map(lambda p: np.asarray(p, jnp.dtype(dtype)), fresh_params())
    state = steps.init(params)
    want = jax.tree.map(lambda x: x.dtype, state)
    compiled = []

    def listen(event, duration_secs, **kwargs):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for n in range(10):
            for micro in pack(config, random_groups(n, 1 + n % 4)):
                state = steps.accumulate(state, micro.batch)
            state, _ = steps.apply(state)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert steps.num_compilations == 2
    assert len(compiled) == 2, compiled  # XLA's own count: accumulate and apply
    assert jax.tree.map(lambda x: x.dtype, state) == want
    assert int(state.step) == 10 and int(state.skipped_updates) == 0


def test_abstract_state_describes_the_real_one(steps):
    state, abstract = steps.init(fresh_params()), steps.abstract_state()
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


@pytest.mark.parametrize(
    "axes,message",
    [
        ({"data": 2}, r"packing.rows \(3\) must be a multiple of 2"),
        ({"sequence": 3}, r"packing.row_tokens \(16\) must be a multiple of 3"),
        ({"tensor": 4}, r"num_attention_heads \(2\) must be a multiple of 4"),
        ({"tensor": 2}, r"vocab_size \(19\) must be a multiple of 2"),
    ],
)
def test_build_steps_mesh_that_does_not_divide_is_refused(axes, message):
    mesh: Any = SimpleNamespace(shape=dict.fromkeys(AXES, 1) | axes)
    with pytest.raises(ValueError, match=message):
        build_train_step(MODEL, config_of(rows=3), mesh)


@pytest.mark.heavy
def test_accumulate_never_holds_the_logits_of_all_tokens():
    rows, row_tokens, words = 4, 256, 32768
    config = config_of(rows=rows, row_tokens=row_tokens)
    steps = build_train_step(dataclasses.replace(MODEL, vocab_size=words), config, make_mesh(devices=jax.devices()[:1]))
    memory = steps.lower()["accumulate"].compile().memory_analysis()
    assert memory is not None
    all_logits = rows * row_tokens * words * 4
    # The head's gradient and a chunk's logits, exponentials and their gradient are there; one buffer of all is not.
    assert memory.temp_size_in_bytes < 0.8 * all_logits
    whole = dataclasses.replace(config, model=dataclasses.replace(config.model, logit_chunk_tokens=rows * row_tokens))
    steps = build_train_step(dataclasses.replace(MODEL, vocab_size=words), whole, make_mesh(devices=jax.devices()[:1]))
    memory = steps.lower()["accumulate"].compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes > all_logits  # the measure sees it where it is


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_steps_with_an_optimizer_of_one_moment_train_and_keep_no_second(name):
    config = config_of()
    config = dataclasses.replace(config, optimizer=OptimizerConfig(name=name, learning_rate=1e-2))
    steps, groups = steps_of(config), random_groups(6, 3)
    state, before = steps.init(fresh_params()), fresh_params()
    num_moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert num_moments < 1.2 * sum(x.size for x in jax.tree.leaves(before))
    losses = []
    for _ in range(4):
        state, metrics = update(steps, state, groups, config)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] and int(metrics["skipped_updates"]) == 0


@pytest.mark.heavy
def test_score_of_a_model_with_soft_caps_is_transformers_own(tmp_path):
    reference = save_reference("gemma3-untied", tmp_path)
    model, params = load(tmp_path)
    assert model.logit_soft_cap is not None
    steps = build_train_step(model, config_of(), make_mesh(devices=jax.devices()[:1]))
    batch = stream(config_of(), random_groups(0, 4))[0].batch
    scores, num_scored = np.asarray(steps.score(params, batch)), 0
    for row, segment in {(r, s) for r, ids in enumerate(batch.segment_ids) for s in ids if s}:
        here = np.flatnonzero(batch.segment_ids[row] == segment)
        tokens = torch.from_numpy(batch.tokens[row, here].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(tokens[None]).logits[0] / TEMPERATURE, -1)
        want = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        scored = batch.loss_mask[row, here[1:]]
        np.testing.assert_allclose(scores[row, here[1:]][scored], want[scored], atol=1e-4)
        num_scored += scored.sum()
    assert num_scored == batch.loss_mask.sum() > 10


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("own", "built_in", "fields"),
    [
        ("of_sequences", "gspo", dict(normalization="sequence")),
        ("clipped_from_proximal", "decoupled_ppo", dict(epochs=2, clip_high=0.28)),
    ],
)
def test_loss_of_ones_own_that_names_its_inputs_trains_as_the_built_in(own, built_in, fields):
    grads = []
    for name in (f"tests.learner.objective.test_check_custom:{own}", built_in):
        config = config_of(name=name, advantage="mean_baseline", **fields)
        steps = steps_of(config)
        assert steps.keeps_logprobs == (built_in == "decoupled_ppo")
        state = steps.init(fresh_params())
        for micro in pack(config, random_groups(3, 2)):
            state = steps.accumulate(state, micro.batch)
        grads.append(state.accumulator.grads)
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads[1]))
    assert largest > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), *grads)


@pytest.mark.parametrize(("dtype", "is_exact"), [("float32", True), ("bfloat16", False)])
def test_products_of_float32_are_asked_for_in_full_precision(dtype, is_exact):
    config = config_of()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))
    before = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    try:
        text = build_train_step(MODEL, config, make_mesh(devices=jax.devices()[:1])).lower()["accumulate"].as_text()
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert ("HIGHEST" in text) == is_exact
