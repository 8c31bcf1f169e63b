"""Device mesh, table of partition rules, and shardings of trees.

Mesh axes, slowest links first. `data` holds whole copies of the parameters. `fsdp` splits parameters and the rows of a
batch. `expert` also splits the experts of a MoE layer. `sequence` splits the tokens of a row (context parallelism).
`tensor` splits heads, MLP width and vocabulary. The rows of a batch are split over data, fsdp and expert together. The
`FSDP` dim of a parameter is split over every axis except data that would otherwise hold copies of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

_TPU = {
    # XLA would turn the product of activations with gathered weights, and the reduce-scatter of their gradient, into
    # loops over the shards ("windowed einsums"): a contraction of D / fsdp per step, and the whole result through HBM
    # each time. Compiled for v5e-16 that takes 1.35 times as long as gathering first (1.7B, rows of 16k tokens).
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Returns options for `jax.jit(..., compiler_options=...)` and `Lowered.compile`, or None if there are none."""
    return dict(_TPU) if mesh.devices.flat[0].platform == "tpu" else None


AXES = ("data", "fsdp", "expert", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""
FSDP = ("fsdp", "expert", "sequence")
"""Axes that split a parameter of which they would otherwise hold copies."""
EXPERT_FSDP = ("fsdp", "sequence")
"""Counterpart of `FSDP` for parameters whose experts `expert` splits."""


Axes = str | tuple[str, ...] | None


RULES: dict[str, tuple[Axes, ...]] = {
    "embed/embedding": ("tensor", FSDP),
    "lm_head/kernel": ("tensor", FSDP),
    "final_norm/scale": (None,),
    "value_head/kernel": (None, None),
    "value_head/bias": (None,),
    "layers/input_norm/scale": (None, None),
    "layers/post_norm/scale": (None, None),
    "layers/attention_out_norm/scale": (None, None),
    "layers/mlp_out_norm/scale": (None, None),
    "layers/q_norm/scale": (None, None),
    "layers/k_norm/scale": (None, None),
    # [layers, out, in]: the layer dim is scanned, so it is never split. The last dim is whole if possible:
    # a TPU stores it in tiles of 128, and turns gathers of thinner slices into sums twice as large.
    "layers/q_proj/kernel": (None, ("tensor", *FSDP), None),
    "layers/k_proj/kernel": (None, ("tensor", *FSDP), None),
    "layers/v_proj/kernel": (None, ("tensor", *FSDP), None),
    "layers/o_proj/kernel": (None, FSDP, "tensor"),
    "layers/gate_proj/kernel": (None, ("tensor", *FSDP), None),
    "layers/up_proj/kernel": (None, ("tensor", *FSDP), None),
    "layers/down_proj/kernel": (None, FSDP, "tensor"),
    "layers/q_proj/bias": (None, "tensor"),
    "layers/k_proj/bias": (None, "tensor"),
    "layers/v_proj/bias": (None, "tensor"),
    "layers/o_proj/bias": (None, None),
    "layers/gate_proj/bias": (None, "tensor"),
    "layers/up_proj/bias": (None, "tensor"),
    "layers/down_proj/bias": (None, None),
    # Adapters: A [layers, rank, in], B [layers, out, rank]. The rank is small and stays whole. Inputs
    # or outputs of a matrix that `tensor` splits are also split in its adapter.
    **{f"layers/{name}_proj/lora_a": (None, None, FSDP) for name in ("q", "k", "v", "gate", "up")},
    **{f"layers/{name}_proj/lora_b": (None, ("tensor", *FSDP), None) for name in ("q", "k", "v", "gate", "up")},
    **{f"layers/{name}_proj/lora_a": (None, None, ("tensor", *FSDP)) for name in ("o", "down")},
    **{f"layers/{name}_proj/lora_b": (None, FSDP, None) for name in ("o", "down")},
    # [layers, experts, out, in], and the router's [layers, experts, in].
    "layers/router/kernel": (None, FSDP, None),
    "layers/experts_gate/kernel": (None, "expert", ("tensor", *EXPERT_FSDP), None),
    "layers/experts_up/kernel": (None, "expert", ("tensor", *EXPERT_FSDP), None),
    "layers/experts_down/kernel": (None, "expert", EXPERT_FSDP, "tensor"),
}
"""Mesh axes of each dim, by parameter path."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh of all devices in topology order, or of `devices` as given; raises ValueError if sizes differ."""
    found = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, expert, sequence, tensor), strict=True))
    if min(sizes.values()) < 1:
        raise ValueError(f"mesh axes must be >= 1, got {sizes}")
    shape = tuple(sizes.values())
    if math.prod(shape) != len(found):
        raise ValueError(f"mesh {sizes} needs {math.prod(shape)} devices, found {len(found)}")
    auto = (AxisType.Auto,) * len(AXES)
    if devices is None:
        return jax.make_mesh(shape, AXES, axis_types=auto)
    return Mesh(np.asarray(found, dtype=object).reshape(shape), AXES, axis_types=auto)


def axes_size(mesh: Mesh, axes: Axes) -> int:
    """Returns the number of parts into which the axes split a dim."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)


def param_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec of a parameter; scalars are replicated.

    Leading parts of the path are ignored, so `mu/layers/q_proj/kernel` has the kernel's rule. Raises ValueError if no
    rule exists for the path, or the number of dims differs.
    """
    if not shape:
        return PartitionSpec()
    axes = rule(path)
    if len(axes) != len(shape):
        raise ValueError(f"{path}: expected {len(axes)} dims, got shape {shape}")
    kept: list[Axes] = []
    for dim, wanted in zip(shape, axes, strict=True):
        found = _dividing(dim, wanted, mesh)
        kept.append(found)
    return PartitionSpec(*kept)


def rule(path: str) -> tuple[Axes, ...]:
    """Returns the entry of `RULES` for a path, ignoring leading parts; raises ValueError if there is none."""
    parts = path.split("/")
    for i in range(len(parts)):
        if (found := RULES.get("/".join(parts[i:]))) is not None:
            return found
    raise ValueError(f"no sharding rule for parameter {path!r}; expected one of {sorted(RULES)}")


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every leaf: same tree as `params` (arrays or ShapeDtypeStruct).

    Optimizer states and statistics are supported. A moment is split like its parameter. Leaves without a parameter
    (counters, histograms) are replicated, and so are rows and columns of factored moments, which are 1 / dim of the
    parameter's size. Raises ValueError as `param_spec`.
    """

    def one(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        path = "/".join(str(k.key) for k in key_path if isinstance(k, jax.tree_util.DictKey))
        is_whole = not path or _is_factor(key_path, leaf)
        spec = PartitionSpec() if is_whole else param_spec(path, leaf.shape, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, params)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding with a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of `[rows, tokens]`: rows over `BATCH_AXES`, tokens over `sequence`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))


def _dividing(dim: int, wanted: Axes, mesh: Mesh) -> Axes:
    """Returns the longest prefix of the axes whose product divides the dim."""
    if wanted is None or isinstance(wanted, str):
        return wanted if wanted is not None and dim % mesh.shape[wanted] == 0 else None
    for n in range(len(wanted), 0, -1):
        if dim % axes_size(mesh, wanted[:n]) == 0:
            return wanted[:n]
    return None


def _is_factor(key_path: tuple[Any, ...], leaf: Any) -> bool:
    """Returns True for a row, column or unused placeholder of a factored second moment (optax's `FactoredState`)."""
    names = {key.name for key in key_path if isinstance(key, jax.tree_util.GetAttrKey)}
    return bool(names & {"v_row", "v_col"}) or ("v" in names and leaf.shape == (1,))


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def placed(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of shapes with shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def shardings(tree: Any) -> Any:
    """Returns the shardings of a tree of arrays or `placed` shapes."""
    return jax.tree.map(lambda x: x.sharding, tree)


def put(x: "np.ndarray | OwnShards | Array", sharding: NamedSharding) -> Array:
    """Returns the host array, the same in all processes, or the `OwnShards` as a mesh array."""
    if isinstance(x, jax.Array):
        return x
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


class OwnShards:
    """Host copies of the shards of a global array that are local to this process."""

    def __init__(self, x: Array) -> None:
        """Copies the shards; waits for the array."""
        self.shape, self.dtype = x.shape, x.dtype
        self._parts = {_place(shard.index, x.shape): np.asarray(shard.data) for shard in x.addressable_shards}

    def __getitem__(self, index: Any) -> np.ndarray:
        """Returns the shard at an index of the array's original sharding."""
        return self._parts[_place(index, self.shape)]

    @property
    def nbytes(self) -> int:
        """Total size of the shards, in bytes."""
        return sum(part.nbytes for part in self._parts.values())


def own_on_host(x: np.ndarray | OwnShards | Array) -> np.ndarray | OwnShards:
    """Returns the array, or this process's shards if it spans processes, in host memory. `put` accepts the result."""
    if not isinstance(x, jax.Array):
        return x
    return np.asarray(x) if x.is_fully_addressable else OwnShards(x)


def whole_on_host(x: Array) -> np.ndarray:
    """Returns the whole array in host memory; a collective call if the array spans processes."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    assert isinstance(x.sharding, NamedSharding)
    return np.asarray(_gather(x.sharding.mesh)(x))


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _place(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True))


class BatchBroadcast:
    """Broadcast of trees of one structure over one mesh. All processes call it in the same order relative to steps."""

    def __init__(self, shapes: Any, mesh: Mesh) -> None:
        """Builds the programs; the first call compiles them. Process 0 has the arrays.

        `shapes` describes the global arrays, with shardings over the mesh (`sharding.placed`). The mesh has the same
        number of devices of each process, in any order.
        """
        self._shapes = shapes
        first = next(device for device in mesh.devices.flat if device.process_index == 0)
        self._source = first if jax.process_index() == 0 else None
        self._axes = mesh.axis_names
        self._apart = NamedSharding(mesh, PartitionSpec(self._axes))
        """Sharding of the summands: one whole array per device."""
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), _bits(x.dtype)), shapes),
            out_shardings=self._apart,
        )
        self._sum = jax.jit(
            jax.shard_map(
                lambda tree: jax.tree.map(self._own_shard, tree, shapes),
                mesh=mesh,
                in_specs=PartitionSpec(self._axes),
                out_specs=jax.tree.map(lambda sharding: sharding.spec, shardings(shapes)),
            )
        )

    def __call__(self, tree: Any) -> Any:
        """Returns the leader's host arrays `tree`, sharded over the mesh; other processes' trees are ignored.

        Raises ValueError if an array differs from the agreed shape or dtype.
        """
        summed = self._zeros()
        if self._source is not None:
            summed = jax.tree.map(self._with, summed, tree, self._shapes)
        return self._sum(summed)

    def _with(self, zeros: Array, x: np.ndarray, shape: jax.ShapeDtypeStruct) -> Array:
        """Returns the zeros with the array in the slot of the leader's device."""
        if x.shape != shape.shape or x.dtype != shape.dtype:
            raise ValueError(f"broadcast array: expected {shape.dtype}{shape.shape}, got {x.dtype}{x.shape}")
        bits = np.ascontiguousarray(x).reshape(1, *x.shape).view(_bits(x.dtype))
        parts = [
            jax.device_put(bits, self._source) if shard.device == self._source else shard.data
            for shard in zeros.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(zeros.shape, self._apart, parts)

    def _own_shard(self, x: Array, shape: jax.ShapeDtypeStruct) -> Array:
        assert isinstance(shape.sharding, NamedSharding)
        total, left = x[0], set(self._axes)
        for dim, axes in enumerate(shape.sharding.spec):
            if axes is not None:
                total = jax.lax.psum_scatter(total, axes, scatter_dimension=dim, tiled=True)
                left -= {axes} if isinstance(axes, str) else set(axes)
        total = jax.lax.psum(total, tuple(axis for axis in self._axes if axis in left))
        if shape.dtype == jnp.bool_:
            return total != 0
        return jax.lax.bitcast_convert_type(total, shape.dtype)


@functools.cache
def _bits(dtype: Any) -> np.dtype:
    return np.dtype(f"u{np.dtype(dtype).itemsize}")
