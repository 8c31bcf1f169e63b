import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from learner.model.attention.dispatch import _over_mesh
from tests.learner import eight_devices

EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from learner.distributed.sharding import BATCH_AXES, make_mesh
from learner.model.attention.dispatch import attention
from tests.learner.model.attention.attention_cases import example

MESHES = [dict(tensor=2), dict(sequence=2), dict(data=2, fsdp=2, tensor=2), dict(expert=2)]
ALL_AT_ONCE = dict(fsdp=2, sequence=2, tensor=2)
# 259 tokens don't divide over anything; 600 are six blocks of 128, of which splash skips those that don't meet.
if DAILY:
    CASES = [("xla", 9, ALL_AT_ONCE, 259), ("xla", None, dict(expert=2), 259)]
    CASES += [("xla", None, MESHES[2], 259), ("splash", 100, ALL_AT_ONCE, 600)]
else:
    CASES = [(path, None, axes, 259) for path in ("xla", "splash") for axes in MESHES]
    CASES += [("splash", 9, ALL_AT_ONCE, 259), ("splash", None, dict(sequence=2), 600)]
# More tensor shards than key heads.
CASES += [("xla", None, dict(tensor=4), 259)]
BATCHES = {
    length: [np.concatenate(x) for x in zip(example(0, length=length), example(1, length=length))]
    for length in {case[-1] for case in CASES}
}

def layers(q, k, v, segments, **options):
    # As the decoder calls it: inside a checkpointed body of a scan, under jit and grad.
    def layer(x, _):
        return attention(x, k, v, segments, scale=0.3, **options), None
    return jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0]

def run(**options):
    def f(q, k, v, segments, d_out):
        out, pull = jax.vjp(lambda q, k, v: layers(q, k, v, segments, **options), q, k, v)
        return out, *pull(d_out)
    return jax.jit(f)

want = {
    (window, length): run(path="xla", window=window)(*BATCHES[length])
    for window, length in {(window, length) for _, window, _, length in CASES}
}
for path, window, axes, length in CASES:
    mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    rows = NamedSharding(mesh, P(BATCH_AXES))
    block = 128 if path == "splash" else None
    got = run(path=path, window=window, mesh=mesh, interpret=path != "xla", block=block)(
        *jax.device_put(BATCHES[length], rows))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want[window, length], strict=True):
        scale = np.abs(b).max()
        assert scale > 0.1
        np.testing.assert_allclose(a, b, atol=1e-5 * scale, err_msg=f"{path} {window} {axes} {length} {name}")
    print("equal", path, window, axes, length)
print(len(CASES), "cases")
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("is_daily", "num_cases"), [(True, 5), pytest.param(False, 11, marks=pytest.mark.nightly)], ids=["daily", "nightly"]
)
def test_attention_on_every_mesh_equals_one_device(is_daily: bool, num_cases: int):
    out = eight_devices.run(f"DAILY = {is_daily}\n{EIGHT_DEVICES}")
    assert out.splitlines()[-1] == f"{num_cases} cases"


# Stands for a mesh of which this process has no devices.
def a_mesh(**axes: int) -> Any:
    return types.SimpleNamespace(shape=dict(data=1, fsdp=1, expert=1, sequence=1, tensor=1) | axes)


def test_heads_that_do_not_divide_over_tensor_are_refused():
    with pytest.raises(ValueError, match="28 query heads do not divide over tensor=8: make tensor a divisor"):
        _over_mesh(lambda: jnp.zeros(0), a_mesh(tensor=8), None, num_heads=28)


def test_rows_that_do_not_divide_over_the_batch_axes_are_refused():
    call = _over_mesh(lambda: jnp.zeros(0), a_mesh(data=2, fsdp=2), None, num_heads=4)
    with pytest.raises(ValueError, match=r"3 rows do not divide over \('data', 'fsdp', 'expert'\) = 4 devices"):
        call(np.zeros((3, 8, 4, 4)), None, None, None, None)
