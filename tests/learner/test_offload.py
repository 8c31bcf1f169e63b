"""Arrays that leave the devices and come back."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from learner.offload import to_device, to_host


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
