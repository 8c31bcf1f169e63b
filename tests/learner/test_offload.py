"""Arrays that leave the devices and come back."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.sections import LoraConfig
from learner.model.lora import LoraBase
from learner.offload import to_device, to_host
from learner.policy_trainer import EpochCache, PolicyTrainer
from learner.update.frozen_policies import FrozenPolicies
from tests.learner.streams import MODEL, config_of, fresh_params, pack, random_groups, steps_of


def test_arrays_come_back_as_they_were_where_they_were():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())
    values = {"a": np.arange(8, dtype=np.float32), "b": np.ones((2, 3), jnp.bfloat16), "c": np.int32(7)}
    tree = {
        "a": jax.device_put(values["a"], split),
        "b": jax.device_put(values["b"], whole),
        "c": jax.device_put(values["c"], whole),
        "none": None,
    }
    offloaded = to_host(tree)
    assert all(array.is_deleted() for array in (tree["a"], tree["b"], tree["c"]))
    back = to_device(offloaded)
    assert back["none"] is None and back["a"].sharding == split and back["b"].dtype == jnp.bfloat16
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(back[name]), value)


def test_array_that_two_parts_share_stays_one():
    shared = jnp.arange(3.0)
    offloaded = to_host((shared, {"reference": shared}))
    first, second = to_device(offloaded)
    assert first is second["reference"]


def on_devices():
    return jax.tree.map(jnp.asarray, fresh_params())


@pytest.mark.parametrize("rank", [0, 3])
def test_trainer_goes_on_after_its_state_was_in_host_memory(rank):
    """With a frozen proximal policy and, of adapters, a base that is also the reference."""
    config = dataclasses.replace(
        config_of(name="decoupled_ppo", proximal="round", kl_coef=0.1), lora=LoraConfig(rank=rank)
    )
    steps, groups = steps_of(config), random_groups(0, 2)

    def trained(*, is_offloaded: bool):
        base = None if rank == 0 else LoraBase(params=on_devices(), metadata={})
        state = steps.init(fresh_params() if base is None else steps.init_adapters())
        frozen = None if base is None else base.params
        anchors = FrozenPolicies(
            steps,
            config,
            load_reference=lambda: frozen or on_devices(),
            params=state.params,
            base=frozen,
        )
        nothing: Any = None
        trainer = PolicyTrainer(
            config=config,
            architecture=MODEL,
            steps=steps,
            anchors=anchors,
            kept=EpochCache(steps, epochs=1),
            state=state,
            publisher=nothing,
            checkpoints=nothing,
            base=base,
        )
        for micro in pack(config, groups):
            if is_offloaded:
                trainer.offload()
                trainer.reload()
            trainer.accumulate(micro)
        return trainer.optimizer_step(0), trainer.state.params

    (metrics, params), (wanted, wanted_params) = trained(is_offloaded=True), trained(is_offloaded=False)
    assert metrics["loss"] == wanted["loss"] and metrics["grad_norm"] == wanted["grad_norm"]
    jax.tree.map(np.testing.assert_array_equal, params, wanted_params)
