"""XLA options that the learner's programs are compiled with, by platform."""

from jax.sharding import Mesh

_TPU = {
    # XLA would turn the product of activations with gathered weights, and the reduce-scatter of their gradient, into
    # loops over the shards ("windowed einsums"): a contraction of D / fsdp a step, and the whole result through HBM
    # each time. Compiled for v5e-16 that takes 1.35 times as long as gathering first (1.7B, rows of 16k tokens).
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """For `jax.jit(..., compiler_options=...)` and `Lowered.compile`; None where there is nothing to set."""
    return dict(_TPU) if mesh.devices.flat[0].platform == "tpu" else None
