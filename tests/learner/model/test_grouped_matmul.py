import jax
import numpy as np
import pytest

from learner.model.moe import grouped_matmul, megablox, ragged

SIZES = {"even": [8, 8, 8], "one empty": [13, 0, 7], "rows left over": [5, 3, 1], "none": [0, 0, 0]}


def interpreted(rows, kernels, sizes):
    return megablox(rows, kernels, sizes, tile=(16, 128, 128), interpret=True)


@pytest.mark.heavy
@pytest.mark.parametrize("multiply", [ragged, interpreted], ids=["ragged", "megablox"])
@pytest.mark.parametrize("name", SIZES)
def test_grouped_matmul_values_and_gradients_equal_a_loop_over_the_groups(name, multiply):
    rng, sizes = np.random.default_rng(0), np.array(SIZES[name], np.int32)
    rows, kernels, d_out = (
        rng.normal(size=shape).astype(np.float32) for shape in [(24, 128), (3, 256, 128), (24, 256)]
    )
    d_out[sizes.sum() :] = 0  # what is after the last run is not used
    out, pullback = jax.vjp(lambda r, k: multiply(r, k, sizes), rows, kernels)
    d_rows, d_kernels = pullback(jax.numpy.asarray(d_out))
    start = 0
    for e, size in enumerate(sizes):
        here = slice(start, start + size)
        np.testing.assert_allclose(out[here], rows[here] @ kernels[e].T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(d_rows[here], d_out[here] @ kernels[e], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(d_kernels[e], d_out[here].T @ rows[here], rtol=1e-4, atol=1e-4)
        start += size


def test_grouped_matmul_is_the_kernel_on_a_tpu_and_xlas_operation_elsewhere():
    assert grouped_matmul("tpu") is megablox and grouped_matmul("cpu") is grouped_matmul("gpu") is ragged
