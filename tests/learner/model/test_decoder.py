import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge.names import flatten
from learner.model.config import ModelConfig
from learner.model.decoder import abstract_params, init_params, make_apply, output_head
from learner.model.hf_io import load
from learner.model.logprobs import token_logprobs
from tests.learner.model.tiny import MODELS, config_of, pack, row, save_reference

RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, 61, n) for n in (7, 1, 12, 5)]
# Every attention path, and the XLA path with queries in blocks that divide the row and that don't.
PATHS = {"xla": {}, "xla-chunked": {"attention_block": 8}, "xla-ragged": {"attention_block": 5}}


@functools.cache
def loaded(name):
    with tempfile.TemporaryDirectory() as folder:
        reference = save_reference(name, folder)
        return reference, *load(folder)


@functools.cache
def forward(config, **options):
    return jax.jit(make_apply(config, **options))


def logits_of(config, params, batch, **options):
    return np.asarray(forward(config, **options)(params, *batch) @ output_head(params).T)


@pytest.mark.parametrize("name", MODELS)
def test_logits_against_transformers_agree(name):
    reference, config, params = loaded(name)
    tokens = RNG.integers(0, 61, (2, 19))
    with torch.no_grad():
        want = reference(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params, row(tokens)), want, atol=1e-4, rtol=0)
    assert np.abs(want).max() > 1  # a scale at which 1e-4 means something


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-tied"])
def test_logits_packed_row_equals_transformers_on_separate_rows(name, path):
    reference, config, params = loaded(name)
    got, start = logits_of(config, params, pack(SEQUENCES, 32), **PATHS[path])[0], 0
    for sequence in SEQUENCES:
        with torch.no_grad():
            want = reference(torch.from_numpy(sequence)[None]).logits[0].numpy()
        np.testing.assert_allclose(got[start : start + len(sequence)], want, atol=1e-4, rtol=0)
        start += len(sequence)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("path", PATHS)
def test_logits_future_token_or_other_segment_changed_moves_nothing_earlier(path):
    _, config, params = loaded("qwen3-tied")
    batch = pack(SEQUENCES, 32)
    before = logits_of(config, params, batch, **PATHS[path])[0]
    for changed in (6, 7, 14, 24, 30):  # ends, a segment of one token, a middle, padding
        tokens = batch[0].copy()
        tokens[0, changed] = (tokens[0, changed] + 7) % 61
        moved = np.abs(logits_of(config, params, (tokens, *batch[1:]), **PATHS[path])[0] - before).max(-1) > 0
        segments = batch[2][0]
        may_move = (segments == segments[changed]) & (np.arange(32) >= changed)
        assert moved[changed]
        if segments[changed] == 0:  # padding sees only itself
            may_move = np.arange(32) == changed
        np.testing.assert_array_equal(moved & ~may_move, False)


@functools.cache
def compiled_gradient(config, **options):
    apply = make_apply(config, **options)

    def loss(params, batch, targets, weights):
        hidden = apply(params, *batch).reshape(-1, config.hidden_size)
        head = output_head(params)
        logprobs, _ = token_logprobs(hidden, head, targets.reshape(-1), temperature=0.7, chunk=6)
        return (logprobs * weights.reshape(-1)).sum()

    return jax.jit(jax.grad(loss))


def gradient(config, params, batch, targets, weights, **options):
    return compiled_gradient(config, **options)(params, batch, targets, weights)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-biased", "qwen2-untied"])
def test_gradient_of_summed_logprobs_packed_equals_torch_autograd_separate(name, remat):
    reference, config, params = loaded(name)
    batch = pack(SEQUENCES, 32)
    targets, weights = np.roll(batch[0], -1, 1), np.zeros((1, 32), np.float32)
    reference.zero_grad()
    total, start = torch.zeros(()), 0
    for sequence in SEQUENCES:
        end = start + len(sequence)
        weights[0, start : end - 1] = 1
        logp = torch.log_softmax(reference(torch.from_numpy(sequence)[None]).logits[0] / 0.7, -1)
        total = total + logp[:-1].gather(1, torch.from_numpy(sequence[1:, None])).sum()
        start = end
    total.backward()
    grads = flatten(gradient(config, params, batch, targets, weights, remat=remat, attention_block=8))
    want = dict(reference.named_parameters())
    compared = 0
    for hf_name, got in config.param_names.iter_tensors(grads):
        expected = want[hf_name].grad.numpy()
        np.testing.assert_allclose(got, expected, atol=1e-4 * max(1, np.abs(expected).max()), err_msg=hf_name)
        compared += 1
    assert compared == len(want)


def test_gradient_rows_of_padding_only_is_finite_and_zero():
    _, config, params = loaded("qwen3-tied")
    zeros = np.zeros((1, 32), np.int32)
    grads = gradient(config, params, (zeros, zeros, zeros), zeros, np.zeros((1, 32), np.float32))
    for path, grad in flatten(grads).items():
        np.testing.assert_array_equal(grad, 0, err_msg=path)


def test_gradient_padding_in_row_is_finite_and_blind_to_padding_tokens():
    _, config, params = loaded("qwen3-tied")
    batch = pack(SEQUENCES, 32)
    weights = (batch[2] > 0).astype(np.float32)
    targets = np.roll(batch[0], -1, 1)
    before = flatten(gradient(config, params, batch, targets, weights))
    other = np.where(batch[2] > 0, batch[0], 9)
    after = flatten(gradient(config, params, (other, *batch[1:]), targets, weights))
    for path in before:
        assert np.isfinite(before[path]).all(), path
        np.testing.assert_array_equal(before[path], after[path], err_msg=path)


def test_apply_bfloat16_compute_keeps_float32_parameters_and_is_close():
    _, config, params = loaded("qwen3-untied")
    batch = pack(SEQUENCES, 32)
    hidden = forward(config, compute_dtype=jnp.bfloat16)(params, *batch)
    exact = forward(config)(params, *batch)
    assert hidden.dtype == jnp.bfloat16 and exact.dtype == jnp.float32
    real = batch[2] > 0
    error = np.abs(np.asarray(hidden, np.float32) - np.asarray(exact))[real]
    assert 0 < error.mean() < 0.03 * np.abs(np.asarray(exact))[real].mean()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", MODELS)
def test_init_params_matches_abstract_and_named_paths(name):
    config = config_of(name)
    params = flatten(jax.jit(init_params, static_argnums=(0, 2))(config, jax.random.key(0), jnp.bfloat16))
    specs = flatten(abstract_params(config, jnp.bfloat16))
    assert set(params) == set(config.param_names.paths())
    assert {p: (x.shape, x.dtype) for p, x in params.items()} == {p: (x.shape, x.dtype) for p, x in specs.items()}
    kernel = np.asarray(params["layers/up_proj/kernel"], np.float32)
    assert 0.018 < kernel.std() < 0.022 and len({layer.tobytes() for layer in kernel}) == 3


def test_make_apply_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat: got 'half'"):
        make_apply(config_of("qwen2-tied"), remat="half")


def test_rope_theta_from_config_reaches_the_rotation():
    _, config, params = loaded("qwen3-tied")
    raw = config.to_hf() | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    batch = row(RNG.integers(0, 61, (1, 19)))
    moved = logits_of(ModelConfig.from_hf(raw), params, batch) - logits_of(config, params, batch)
    assert np.abs(moved).max() > 1e-2
