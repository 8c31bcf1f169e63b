"""Gradient of the embedding in bfloat16: summed over tokens in float32, whatever the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from configs.sections import MeshConfig
from learner.distributed.sharding import BATCH_AXES, make_mesh
from learner.model.activation_sharding import ActivationSharding
from tests.learner import eight_devices

NUM_WORDS = 16
MESHES: list[tuple[dict[str, Any], PartitionSpec]] = [
    (dict(data=8), PartitionSpec(None, None)),
    (dict(fsdp=8), PartitionSpec(None, ("fsdp",))),
    (dict(data=2, fsdp=2, tensor=2), PartitionSpec("tensor", ("fsdp", "sequence"))),
    (dict(fsdp=2, sequence=2, tensor=2), PartitionSpec("tensor", ("fsdp", "sequence"))),
]


def check(axes: dict[str, Any], spec: PartitionSpec) -> None:
    """Each occurrence of a word has the gradient 1, so the gradient of a row is the number of its word."""
    random = np.random.default_rng(0)
    tokens = np.where(random.random((8, 1024)) < 0.9, 3, random.integers(0, NUM_WORDS, (8, 1024))).astype(np.int32)
    table = jnp.zeros((NUM_WORDS, 16), jnp.bfloat16)
    mesh = None
    if axes:
        mesh = make_mesh(**MeshConfig(**axes).axes, devices=jax.devices())
        table = jax.device_put(table, NamedSharding(mesh, spec))
        tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence")))
    sharding = ActivationSharding(mesh=mesh, specs={"embed/embedding": spec}, compute_dtype=jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda t: sharding.embed(t, jnp.asarray(tokens)).astype(jnp.float32).sum()))(table)
    count = np.bincount(np.asarray(tokens).reshape(-1), minlength=NUM_WORDS)
    np.testing.assert_allclose(np.asarray(gradient, np.float64)[:, 0], count, rtol=2**-8, err_msg=str(axes))


def test_gradient_of_a_frequent_word_is_the_sum_over_all_of_its_places():
    check({}, PartitionSpec())


def test_gradient_of_a_frequent_word_is_that_sum_on_every_mesh():
    eight_devices.run("from tests.learner.model.test_embedding import *\nfor axes, spec in MESHES: check(axes, spec)")
