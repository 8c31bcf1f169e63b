"""On eight forced host devices every mesh gives what one device gives: losses, metrics, parameters, scores."""

import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import pytest

from configs.sections import CorrectionConfig, MeshConfig
from learner.distributed.sharding import AXES, make_mesh, param_spec
from learner.model import hf_load as hf_io
from learner.model import hf_save
from learner.model.decoder import init_params
from learner.update.frozen_policies import FrozenLogprobs, TeacherPolicy
from learner.update.loss_fn import frozen_loss_fn
from learner.update.train_step import build_train_step
from tests.learner import eight_devices
from tests.learner.streams import config_of, model_of, random_groups, stream

# All that a mesh splits is divisible by what it is split by.
SHAPE: dict[str, Any] = dict(
    vocab_size=20, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
# Tied and biased, as Qwen2.5; the mixture of experts below is neither.
DENSE = model_of("qwen2", "Qwen2", **SHAPE, tie_word_embeddings=True)
MESHES = {
    "data 2 x fsdp 2 x tensor 2": dict(data=2, fsdp=2, tensor=2),
    "fsdp 2 x sequence 2 x tensor 2": dict(fsdp=2, sequence=2, tensor=2),
}
MORE_MESHES = {"fsdp 4 x tensor 2": dict(fsdp=4, tensor=2), "fsdp 8": dict(fsdp=8), "sequence 2": dict(sequence=2)}
"""For the nightly tests: fewer axes."""
OF_WHOLE_ROWS = {"data 2 x fsdp 2 x tensor 2": dict(data=2, fsdp=2, tensor=2)}
"""A mesh that splits no row, as shared prompts want it."""
MOE = model_of(
    "qwen3_moe",
    "Qwen3Moe",
    **SHAPE,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
)
MOE_MESHES = {
    "fsdp 2 x expert 2 x tensor 2": dict(fsdp=2, expert=2, tensor=2),
    "data 2 x expert 2 x sequence 2": dict(data=2, expert=2, sequence=2),
}
MORE_MOE_MESHES = {"expert 4": dict(expert=4)}
# Biases wherever there may be some; norms, windows, rotations and caps of the families that have such.
_GEMMA: dict[str, Any] = SHAPE | dict(
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=11,
    final_logit_softcapping=3.0,
    tie_word_embeddings=True,
)
OTHERS = {
    "gemma3": model_of("gemma3_text", "Gemma3", **_GEMMA, rope_local_base_freq=10.0),
}
MORE_OTHERS = {
    "llama": model_of("llama", "Llama", **SHAPE, attention_bias=True, mlp_bias=True),
    "gemma2": model_of("gemma2", "Gemma2", **_GEMMA, attn_logit_softcapping=2.0),
}
OTHER_MESHES = {"fsdp 2 x sequence 2 x tensor 2": dict(fsdp=2, sequence=2, tensor=2)}
# What asks most of a mesh: the mean over a sequence, whose tokens may be split, frozen policies, and the entropy.
LOSS: dict[str, Any] = dict(
    name="gspo",
    clip_low=0.9,
    clip_high=9.0,
    normalization="sequence",
    kl_coef=0.1,
    entropy_coef=0.1,
    correction=CorrectionConfig(reject="turn", min_ratio=0.2, max_ratio=5.0, veto="group", veto_ratio=0.1),
    whole_groups=True,
    teacher_coef=0.3,
    teacher_path="the reference",
)


def fresh_params(model):
    """Large enough that no part of the gradient is negligible."""
    params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x) * (1 if x.ndim < 3 else 5), params)


def train(model, folder, axes, *, shares):
    """Two updates and a score; everything on the host."""
    compares: dict[str, Any] = dict(teacher_divergence="forward_kl", teacher_top_k=5) if shares else {}
    config = config_of(rows=8, row_tokens=48 if shares else 16, mesh=MeshConfig(**axes), **LOSS | compares)
    config = dataclasses.replace(config, packing=dataclasses.replace(config.packing, share_prompts=shares))
    size = int(np.prod(list(axes.values())))
    mesh = make_mesh(**axes, devices=jax.devices()[:size] if size < 8 else None)
    steps = build_train_step(model, config, mesh)

    def load():
        return hf_io.load(folder, sharding_fn=lambda p, s: jax.NamedSharding(mesh, param_spec(p, s, mesh)))[1]

    state, reference, rows = steps.init(load()), load(), []
    loss_fn = frozen_loss_fn(model, config, mesh)
    score = functools.partial(loss_fn.top_tokens, k=5, num_words=model.vocab_size) if compares else loss_fn.score
    teacher = TeacherPolicy(jax.tree.map(lambda x: 0.9 * x, reference), score, mesh)
    groups = random_groups(0, 12)
    for _ in range(2):
        for micro in stream(config, groups, teachers=(0, 1)):
            batch = steps.put(micro.batch)
            of_teacher = {"top" if compares else "teacher": teacher.score(batch, 1)}
            scores = FrozenLogprobs(reference=steps.score(reference, batch), **of_teacher)
            state = steps.accumulate(state, batch, scores)
        state, metrics = steps.apply(state)
        rows.append(jax.device_get(metrics))
    assert steps.num_compilations == 2
    for grad, param in zip(*map(jax.tree.leaves, (state.accumulator.grads, state.params)), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, param.ndim)
    kernel = state.params["layers"]["q_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size * size // axes.get("data", 1) == kernel.size
    logprobs = steps.score(state.params, stream(config, groups)[0].batch)
    return rows, jax.device_get(state.params), jax.device_get(logprobs)


def compare(model, meshes, *, shares=False):
    """Runs in the subprocess of the tests below."""
    assert len(jax.devices()) == 8
    folder = pathlib.Path(tempfile.mkdtemp()) / "model"
    hf_save.save(folder, model, fresh_params(model))
    rows, params, score = train(model, folder, {}, shares=shares)
    assert all(0 < rows[0][f"correction/{name}"] < 1 for name in ("rejected_tokens", "vetoed_groups")), rows[0]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, fresh_params(model))
    assert min(jax.tree.leaves(moved)) > 5e-4  # two steps of 1e-2
    for name, axes in meshes.items():
        got_rows, got_params, got_score = train(model, folder, axes, shares=shares)
        for got, want in zip(got_rows, rows, strict=True):
            assert got.keys() == want.keys()
            for key in want:
                np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-5, err_msg=f"{name} {key}")
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got_params, params)
        np.testing.assert_allclose(got_score, score, atol=1e-5)
        print("equal on", name, flush=True)


def on_eight_devices(code: str) -> str:
    return eight_devices.run(f"from tests.learner.update import test_sharded_steps as t; {code}")


def daily_and_nightly(daily: str, nightly: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the names of two tables of this module."""
    return pytest.mark.parametrize("cases", [daily, pytest.param(nightly, marks=pytest.mark.nightly)])


@pytest.mark.integration
@daily_and_nightly("MESHES", "MORE_MESHES")
def test_two_updates_of_a_dense_model_on_every_mesh_equal_one_device(cases):
    assert {axis for axes in (*MESHES.values(), *MOE_MESHES.values()) for axis in axes} == set(AXES)
    assert on_eight_devices(f"t.compare(t.DENSE, t.{cases})").count("equal on") == len(globals()[cases])


@pytest.mark.integration
@daily_and_nightly("MOE_MESHES", "MORE_MOE_MESHES")
def test_two_updates_of_a_mixture_of_experts_on_every_mesh_equal_one_device(cases):
    assert on_eight_devices(f"t.compare(t.MOE, t.{cases})").count("equal on") == len(globals()[cases])


@pytest.mark.integration
@daily_and_nightly("OTHERS", "MORE_OTHERS")
def test_two_updates_of_every_kind_of_family_on_a_mesh_equal_one_device(cases):
    code = f"[t.compare(m, t.OTHER_MESHES) for m in t.{cases}.values()]"
    assert on_eight_devices(code).count("equal on") == len(globals()[cases])


@pytest.mark.integration
def test_two_updates_from_shared_prompts_and_a_teachers_distributions_on_a_mesh_equal_one_device():
    assert on_eight_devices("t.compare(t.DENSE, t.OF_WHOLE_ROWS, shares=True)").count("equal on") == len(OF_WHOLE_ROWS)
