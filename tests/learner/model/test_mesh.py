"""On eight forced host devices an update of adapters is the one of a single device, whatever the mesh and the remat."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.sections import LoraConfig, MeshConfig
from learner.model.decoder import init_params
from learner.model.lora import init_adapters, merge
from learner.update.frozen_policies import FrozenPolicies
from tests.learner import eight_devices
from tests.learner.streams import config_of, random_groups, stream

MODEL = dict(vocab_size=20, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)
LORA = LoraConfig(rank=3, alpha=6.0)
MESHES = [(dict(fsdp=2, sequence=2, tensor=2), "attention")]
MORE_MESHES = [(dict(data=2, fsdp=2, tensor=2), "dots"), (dict(fsdp=8), "full"), (dict(fsdp=4, tensor=2), "none")]


def trained(axes, remat, model):
    """The merged weights and the adapters after an update, its loss, and how much of the adapters a device holds."""
    from learner.distributed.sharding import make_mesh
    from learner.update.train_step import build_train_step

    mesh = MeshConfig(**axes)
    config = config_of(rows=8, mesh=mesh, kl_coef=0.1)
    config = dataclasses.replace(config, lora=LORA, model=dataclasses.replace(config.model, remat=remat))
    steps = build_train_step(model, config, make_mesh(**mesh.axes, devices=jax.devices()[: mesh.num_devices]))
    params = jax.tree.map(lambda x: x * (1 if x.ndim < 3 else 5), init_params(model, jax.random.key(0)))
    base = jax.device_put(params, jax.tree.map(lambda x: x.sharding, steps.abstract_base()))
    random = np.random.default_rng(0)
    fresh = init_adapters(model, LORA, jax.random.key(1))
    state = steps.init(jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), fresh))
    anchors = FrozenPolicies(steps, config, load_reference=lambda: base, params=state.params, base=base)
    for micro in stream(config, random_groups(2, 4)):
        state = steps.accumulate(state, micro.batch, anchors.score(micro.batch), base)
    state, metrics = steps.apply(state)
    merged = merge(base, state.params, scale=LORA.scale, dtype="float32")
    kept = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params))
    whole = sum(x.size for x in jax.tree.leaves(state.params))
    told = jax.tree.map(np.asarray, (merged, state.params, metrics["loss"], metrics["reference_kl"]))
    return told, kept / whole


def check(meshes):
    """Runs with eight devices."""
    from tests.learner.streams import MODEL as SMALL

    model = dataclasses.replace(SMALL, **MODEL)
    want, _ = trained({}, "none", model)
    assert want[3] > 1e-4
    for axes, remat in meshes:
        got, share = trained(axes, remat, model)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=3e-4, atol=3e-5, err_msg=str(axes))
        assert share < 0.6, (axes, share)
        print(axes, remat, f"a device holds {share:.2f} of the adapters")


@pytest.mark.integration
@pytest.mark.parametrize("meshes", ["MESHES", pytest.param("MORE_MESHES", marks=pytest.mark.nightly)])
def test_an_update_on_a_mesh_is_the_one_of_a_device(meshes):
    print(eight_devices.run(f"from tests.learner.model import test_mesh as t; t.check(t.{meshes})"))
