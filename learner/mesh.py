"""The device mesh, and one table that says how every parameter is split over it.

Axes: `data` holds whole copies of the parameters, `fsdp` splits parameters and batch, `tensor` splits heads,
MLP width and vocabulary. The batch is split over data and fsdp together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, tuple[str | None, ...]] = {
    "embed/embedding": ("tensor", "fsdp"),
    "lm_head/kernel": ("tensor", "fsdp"),
    "final_norm/scale": (None,),
    "layers/input_norm/scale": (None, None),
    "layers/post_norm/scale": (None, None),
    "layers/q_norm/scale": (None, None),
    "layers/k_norm/scale": (None, None),
    # [layers, out, in]: the layer dim is scanned, so it is never split.
    "layers/q_proj/kernel": (None, "tensor", "fsdp"),
    "layers/k_proj/kernel": (None, "tensor", "fsdp"),
    "layers/v_proj/kernel": (None, "tensor", "fsdp"),
    "layers/o_proj/kernel": (None, "fsdp", "tensor"),
    "layers/gate_proj/kernel": (None, "tensor", "fsdp"),
    "layers/up_proj/kernel": (None, "tensor", "fsdp"),
    "layers/down_proj/kernel": (None, "fsdp", "tensor"),
    "layers/q_proj/bias": (None, "tensor"),
    "layers/k_proj/bias": (None, "tensor"),
    "layers/v_proj/bias": (None, "tensor"),
    "layers/o_proj/bias": (None, None),
}
"""Parameter path -> mesh axis of each dim."""


def make_mesh(data: int, fsdp: int, tensor: int, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x fsdp x tensor devices (all of them, unless `devices` names some).

    Raises:
      ValueError: an axis is not positive, or the product isn't the number of devices.
    """
    found = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    if min(sizes.values()) < 1:
        raise ValueError(f"mesh axes must be >= 1, got {sizes}")
    if data * fsdp * tensor != len(found):
        raise ValueError(f"mesh {sizes} needs {data * fsdp * tensor} devices, found {len(found)}")
    # make_mesh orders the devices after the machine's own links; a chosen list is taken as it is.
    auto = (AxisType.Auto,) * len(AXES)
    if devices is None:
        return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=auto)
    return Mesh(np.asarray(found, dtype=object).reshape(data, fsdp, tensor), AXES, axis_types=auto)


def param_spec(path: str, shape: tuple[int, ...], mesh: Mesh, *, strict: bool = False) -> PartitionSpec:
    """How one parameter is split.

    Args:
      path: as in `RULES`; leading parts are ignored, so `mu/layers/q_proj/kernel` is the kernel's.
      shape: its shape; a scalar is replicated whatever its path.
      mesh: the mesh.
      strict: refuse a dim that its axis doesn't divide, instead of leaving that dim whole.

    Raises:
      ValueError: no rule for the path, another number of dims, or (strict) a dim that doesn't divide.
    """
    if not shape:
        return PartitionSpec()
    parts = path.split("/")
    axes = next((RULES[p] for i in range(len(parts)) if (p := "/".join(parts[i:])) in RULES), None)
    if axes is None:
        raise ValueError(f"no sharding rule for parameter {path!r}, wanted one of {sorted(RULES)}")
    if len(axes) != len(shape):
        raise ValueError(f"{path}: got shape {shape}, wanted {len(axes)} dims")
    kept: list[str | None] = []
    for dim, axis in zip(shape, axes, strict=True):
        divides = axis is None or dim % mesh.shape[axis] == 0
        if not divides and strict:
            raise ValueError(f"{path}: dim {dim} of {shape} doesn't divide by {axis}={mesh.shape[axis]}")
        kept.append(axis if divides else None)
    return PartitionSpec(*kept)


def param_shardings(params: Any, mesh: Mesh, *, strict: bool = False) -> Any:
    """The sharding of every leaf: same tree as `params` (arrays or ShapeDtypeStruct).

    Optimizer states work too: a moment is split like its parameter, a counter is replicated.

    Raises:
      ValueError: see `param_spec`.
    """

    def one(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        path = "/".join(str(k.key) for k in key_path if isinstance(k, jax.tree_util.DictKey))
        return NamedSharding(mesh, param_spec(path, leaf.shape, mesh, strict=strict))

    return jax.tree_util.tree_map_with_path(one, params)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Splits the first dim (rows of a batch, or tokens of a flattened one) over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
