"""Muon: momentum orthogonalized by Newton-Schulz, for the matrices of layers; Adam for all other parameters.

optax.contrib's `scale_by_muon` merges the leading dims of stacked kernels, which a mesh splits, and multiplies matrices
of which each device has a part: XLA then gathers them 15 times per step. Here the axes that split a matrix split the
layers instead while it is orthogonalized: an all-to-all of a device's share per split dim, before and after.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from configs.sections.model import OptimizerConfig
from learner.distributed.sharding import Axes, axes_size, param_spec
from learner.update.optimizer import scale_by_adam

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
"""Newton-Schulz coefficients and iterations of Jordan et al., 2024: singular values end between 0.7 and 1.2."""
UPDATE_RMS = 0.2
"""Root mean square of an update at a learning rate of 1. AdamW's is 0.2 to 0.4 (Liu et al., 2025, section 2.2)."""
_MATRIX = re.compile(r"layers/(\w+_proj|experts_\w+)/(kernel|lora_[ab])$")


def scale_by_muon(config: OptimizerConfig, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al., 2024) with the update scale of Liu et al. (2025, equation 4).

    M_t = momentum M_{t-1} + G_t;  O_t = NewtonSchulz(G_t + momentum M_t);  update = 0.2 sqrt(max(out, in)) O_t.

    The scale gives every matrix the root mean square of AdamW's updates, so both share a learning rate and a decay.
    Each [out, in] matrix of a kernel [layers, out, in] or [layers, experts, out, in] is orthogonalized alone. The
    projections of all heads are one matrix, as in both papers, and so is each factor of an adapter. Embeddings, output
    head, router, norms and biases have Adam.
    """

    def kinds(params: optax.Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if is_matrix(_name(path)) else "adam", params)

    def update(path: jax.tree_util.KeyPath, x: Float[Array, "*stack out in"]) -> Float[Array, "*stack out in"]:
        return _update(x, _name(path), eps=config.eps, mesh=mesh)

    orthogonalized = optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(update, updates))
    return optax.partition(
        {
            "muon": optax.chain(optax.trace(config.momentum, nesterov=True), orthogonalized),
            "adam": scale_by_adam(config),
        },
        kinds,
    )


def is_matrix(path: str) -> bool:
    """Returns True for a kernel or adapter factor of layers, given its path in the parameters."""
    return _MATRIX.search(path) is not None


def newton_schulz(x: Float[Array, "*stack out in"], *, eps: float) -> Float[Array, "*stack out in"]:
    """Returns nearly U V^T of each matrix's singular value decomposition U S V^T (Jordan et al., 2024).

    X_0 = X / (|X|_F + eps);  X_{k+1} = a X_k + (b A + c A^2) X_k with A = X_k X_k^T, on the smaller side. Zero stays
    zero.
    """
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, eps=eps).mT
    a, b, c = COEFFICIENTS
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _update(
    x: Float[Array, "layers *experts out in"], path: str, *, eps: float, mesh: Mesh | None
) -> Float[Array, "layers *experts out in"]:
    scale = UPDATE_RMS * max(x.shape[-2:]) ** 0.5
    if mesh is None or mesh.size == 1:
        return scale * newton_schulz(x, eps=eps)
    layers, *experts, out, num_in = param_spec(path, x.shape, mesh)
    rows, columns = _axes(out), _axes(num_in)
    split = NamedSharding(mesh, PartitionSpec(layers, *experts, out, num_in))
    by_columns = NamedSharding(mesh, PartitionSpec(rows, *experts, None, num_in))
    whole = NamedSharding(mesh, PartitionSpec(rows + columns, *experts, None, None))
    # XLA exchanges one split dim for the layers at a time, if it divides them evenly, and gathers the kernel otherwise.
    padding = -x.shape[0] % axes_size(mesh, rows + columns)
    moved = jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)])
    for sharding in (by_columns, whole):
        moved = jax.lax.with_sharding_constraint(moved, sharding)
    moved = scale * newton_schulz(moved, eps=eps)
    for sharding in (whole, by_columns, split):
        moved = jax.lax.with_sharding_constraint(moved, sharding)
    return moved[: x.shape[0]]


def _axes(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
