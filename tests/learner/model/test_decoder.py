import copy
import functools
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.param_names import flatten
from configs.model_sizes import MODEL_SIZES
from learner.model.architecture import Architecture
from learner.model.decoder import abstract_params, init_params, make_apply, output_head
from learner.model.hf_load import load
from tests.learner.model.tiny import MODELS, SHAPE, SIZES, config_of, pack, reference_of, row, save_reference
from tests.param_tensors import iter_tensors
from tests.support.lazy import torch, transformers


def random_tokens(*shape: int) -> np.ndarray:
    """The same whichever tests ran before, other ones for another shape."""
    return np.random.default_rng(shape).integers(0, 61, shape)


SEQUENCES = [random_tokens(n) for n in (7, 1, 12, 5)]
# The XLA path, and with queries in blocks that divide the row and that don't; every path: attention/test_dispatch.py.
PATHS = {
    "xla": {"attention_path": "xla"},
    "xla-chunked": {"attention_path": "xla", "attention_block": 8},
    "xla-ragged": {"attention_path": "xla", "attention_block": 5},
}


@functools.cache
def loaded(name):
    with tempfile.TemporaryDirectory() as folder:
        reference = save_reference(name, folder)
        return reference, *load(folder)


@functools.cache
def forward(config, **options):
    return jax.jit(make_apply(config, **options))


def capped(config, logits):
    cap = config.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def logits_of(config, params, batch, **options):
    return np.asarray(capped(config, forward(config, **options)(params, *batch) @ output_head(params).T))


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODELS)
def test_logits_against_transformers_agree(name):
    reference, config, params = loaded(name)
    tokens = random_tokens(2, 19)
    with torch.no_grad():
        want = reference(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params, row(tokens)), want, atol=1e-4, rtol=0)
    assert np.abs(want).max() > 1  # a scale at which 1e-4 means something


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name,path",
    [
        ("qwen2-tied", "xla"),
        ("qwen3-yarn", "xla"),
        ("moe", "xla"),
        ("qwen3-tied", "xla-chunked"),
        ("qwen2-windows", "xla-ragged"),
        ("llama-biased", "xla"),
        ("llama-llama3", "xla-chunked"),
        ("mistral-window", "xla-ragged"),
        ("gemma3-tied", "xla-ragged"),
        ("gemma3-untied", "xla"),
        ("gemma2-tied", "xla-chunked"),
        ("gemma2-biased", "xla"),
    ],
)
def test_logits_packed_row_equals_transformers_on_separate_rows(name, path):
    reference, config, params = loaded(name)
    got, start = logits_of(config, params, pack(SEQUENCES, 32), **PATHS[path])[0], 0
    for sequence in SEQUENCES:
        with torch.no_grad():
            want = reference(torch.from_numpy(sequence)[None]).logits[0].numpy()
        np.testing.assert_allclose(got[start : start + len(sequence)], want, atol=1e-4, rtol=0)
        start += len(sequence)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name,path", [*(("qwen3-tied", path) for path in PATHS), ("moe", "xla")])
def test_logits_future_token_or_other_segment_changed_moves_nothing_earlier(name, path):
    _, config, params = loaded(name)
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
        logprobs = jax.nn.log_softmax(capped(config, apply(params, *batch) @ output_head(params).T) / 0.7)
        return (jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0] * weights).sum()

    return jax.jit(jax.grad(loss))


def gradient(config, params, batch, targets, weights, **options):
    return compiled_gradient(config, **options)(params, batch, targets, weights)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name,remat",
    # Daily a family and a remat each, and the parts that few have: biases, windows, experts, caps.
    [("qwen3-tied", "none"), ("qwen3-tied", "dots"), ("qwen3-tied", "gate"), ("qwen2-windows", "full"), ("moe", "gate")]
    + [(n, "attention") for n in ("llama-biased", "mistral-window", "gemma3-untied", "gemma2-biased")]
    + [
        pytest.param(n, r, marks=pytest.mark.nightly)
        for r, names in {
            "full": ("qwen3-tied", "qwen3-biased", "moe-tied"),
            "attention": ("llama-tied", "llama-linear", "mistral-tied", "gemma3-tied", "gemma2-tied"),
        }.items()
        for n in names
    ],
)
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
    want = by_hf_name({key: p.grad.numpy() for key, p in reference.named_parameters()})
    got = dict(iter_tensors(config.param_names, grads))
    assert set(got) == set(want)
    for key, expected in want.items():
        np.testing.assert_allclose(got[key], expected, atol=1e-4 * max(1, np.abs(expected).max()), err_msg=key)


def by_hf_name(arrays):
    """transformers' parameters as its files name them: experts one by one."""
    found = {}
    for key, x in arrays.items():
        prefix, _, kind = key.rpartition(".")
        if kind == "gate_up_proj":
            for j, (gate, up) in enumerate(np.split(expert, 2) for expert in x):
                found |= {f"{prefix}.{j}.gate_proj.weight": gate, f"{prefix}.{j}.up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            found |= {f"{prefix}.{j}.down_proj.weight": down for j, down in enumerate(x)}
        else:
            found[key] = x
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen3-tied", "moe"])
def test_gradient_rows_of_padding_only_is_finite_and_zero(name):
    _, config, params = loaded(name)
    zeros = np.zeros((1, 32), np.int32)
    grads = gradient(config, params, (zeros, zeros, zeros), zeros, np.zeros((1, 32), np.float32))
    for path, grad in flatten(grads).items():
        np.testing.assert_array_equal(grad, 0, err_msg=path)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen3-tied", "moe"])
def test_gradient_padding_in_row_is_finite_and_blind_to_padding_tokens(name):
    _, config, params = loaded(name)
    batch = pack(SEQUENCES, 32)
    weights = (batch[2] > 0).astype(np.float32)
    targets = np.roll(batch[0], -1, 1)
    before = flatten(gradient(config, params, batch, targets, weights))
    other = np.where(batch[2] > 0, batch[0], 9)
    after = flatten(gradient(config, params, (other, *batch[1:]), targets, weights))
    for path in before:
        assert np.isfinite(before[path]).all(), path
        np.testing.assert_array_equal(before[path], after[path], err_msg=path)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["qwen3-untied", "qwen2-untied", "moe", "llama-biased", "mistral-window", "gemma3-tied", "gemma2-tied"]
)
def test_apply_bfloat16_compute_is_as_close_to_float32_as_transformers_own(name):
    reference, config, params = loaded(name)
    batch = pack(SEQUENCES, 32)
    hidden = forward(config, compute_dtype=jnp.bfloat16)(params, *batch)
    assert hidden.dtype == jnp.bfloat16 and all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    got = np.asarray(capped(config, np.asarray(hidden, np.float32)[0] @ np.asarray(output_head(params)).T))
    errors, torch_errors, start = [], [], 0
    half = copy.deepcopy(reference).bfloat16()
    for sequence in SEQUENCES:
        with torch.no_grad():
            exact, rounded = (m(torch.from_numpy(sequence)[None]).logits[0].float().numpy() for m in (reference, half))
        errors.append(np.abs(got[start : start + len(sequence)] - exact).ravel())
        torch_errors.append(np.abs(rounded - exact).ravel())
        start += len(sequence)
    # Medians: a router that picks another expert for one token is off by a lot, in either.
    error, torch_error = (np.median(np.concatenate(e)) for e in (errors, torch_errors))
    assert 0 < error < 1.5 * torch_error < 0.2


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen3-biased", "qwen2-untied", "moe", "llama-biased", "gemma3-tied"])
def test_init_params_matches_abstract_and_named_paths(name):
    config = config_of(name)
    params = flatten(jax.jit(init_params, static_argnums=(0, 2))(config, jax.random.key(0), jnp.bfloat16))
    specs = flatten(abstract_params(config, jnp.bfloat16))
    assert set(params) == set(config.param_names.paths())
    assert {p: (x.shape, x.dtype) for p, x in params.items()} == {p: (x.shape, x.dtype) for p, x in specs.items()}
    kernel = np.asarray(
        params["layers/experts_up/kernel" if config.num_experts else "layers/up_proj/kernel"], np.float32
    )
    assert 0.018 < kernel.std() < 0.022 and len({layer.tobytes() for layer in kernel}) == 3


@pytest.mark.heavy
@pytest.mark.parametrize("size", SIZES)
def test_logits_of_a_published_size_shrunk_agree_with_transformers(size):
    fields = {k: v for k, v in MODEL_SIZES[size].items() if k != "model_type"}
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    # The same ratios of heads and the same kind of everything else, at a width that a test can afford.
    small = dict(num_attention_heads=heads // kv_heads, num_key_value_heads=1) | {
        k: SHAPE[k] for k in SHAPE if "heads" not in k
    }
    small |= dict(hidden_size=8 * (heads // kv_heads), num_hidden_layers=2)
    # Windows that the test's few tokens fill, and a layer of each kind.
    shorter = dict(max_window_layers=2, sliding_window_pattern=2, sliding_window=6)
    small |= {k: v for k, v in shorter.items() if fields.get(k) is not None}
    small |= {"head_dim": 8} if "head_dim" in fields else {}
    if "num_experts" in fields:
        small |= dict(num_experts=16, moe_intermediate_size=8)
    with tempfile.TemporaryDirectory() as folder:
        model = reference_of(transformers.AutoConfig.for_model(MODEL_SIZES[size]["model_type"], **(fields | small)))
        model.save_pretrained(folder)
        config, params = load(folder)
    tokens = random_tokens(2, 13)
    with torch.no_grad():
        want = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params, row(tokens)), want, atol=1e-4, rtol=0)
    packed = logits_of(config, params, pack(tokens, 32))
    np.testing.assert_allclose(packed[0, :26], want.reshape(26, -1), atol=1e-4, rtol=0)
    # In bfloat16 as close to that as transformers itself comes (medians, as above).
    hidden = forward(config, compute_dtype=jnp.bfloat16)(params, *pack(tokens, 32))
    half = np.asarray(capped(config, np.asarray(hidden, np.float32)[0, :26] @ np.asarray(output_head(params)).T))
    with torch.no_grad():
        rounded = copy.deepcopy(model).bfloat16()(torch.from_numpy(tokens)).logits.float().numpy()
    error, torch_error = np.median(np.abs(half - want.reshape(26, -1))), np.median(np.abs(rounded - want))
    assert 0 < error < 2 * torch_error
    whole = Architecture.from_hf(MODEL_SIZES[size])
    alike = ("model_type", "tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "rope", "rms_norm_eps")
    alike += ("query_pre_attn_scalar", "attention_soft_cap", "logit_soft_cap", "num_experts_per_token")
    for name in (*alike, "norm_topk_prob"):
        assert getattr(config, name) == getattr(whole, name), name
    assert set(config.windowed_layers) == set(whole.windowed_layers)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen2-windows", "qwen3-window"])
def test_logits_token_outside_every_window_moves_nothing_later(name):
    _, config, params = loaded(name)
    tokens = random_tokens(1, 19)
    other = tokens.copy()
    other[0, 0] = (other[0, 0] + 1) % 61
    moved = [(a != b).any(-1)[0] for a, b in [(logits_of(config, params, row(t)) for t in (tokens, other))]][0]
    # One full layer in qwen2-windows lets a token see everything; with a window of 4 in all 3 layers, 9 tokens back.
    np.testing.assert_array_equal(moved, np.arange(19) < (19 if name == "qwen2-windows" else 10))


@pytest.mark.heavy
def test_apply_layers_alike_has_no_branch_and_mixed_layers_have_one():
    def text(name):
        config = config_of(name)
        return (
            jax.jit(make_apply(config, attention_path="xla"))
            .lower(abstract_params(config), *row(np.zeros((1, 8))))
            .as_text()
        )

    assert "stablehlo.case" in text("qwen2-windows") and "stablehlo.case" in text("gemma3-tied")
    for name in ("qwen3-window", "qwen3-tied", "mistral-window", "llama-tied"):
        assert "stablehlo.case" not in text(name)


def test_make_apply_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat: expected .*, got 'half'"):
        make_apply(config_of("qwen2-tied"), remat="half")


def test_rope_theta_from_config_reaches_the_rotation():
    _, config, params = loaded("qwen3-tied")
    raw = json.loads(config.hf_json) | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    batch = row(random_tokens(1, 19))
    moved = logits_of(Architecture.from_hf(raw), params, batch) - logits_of(config, params, batch)
    assert np.abs(moved).max() > 1e-2
