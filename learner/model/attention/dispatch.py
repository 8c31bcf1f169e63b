"""Packed, causal, grouped-query attention behind one function with several implementations (paths).

A token sees the tokens of its own segment up to itself and, with a window, fewer than `window` tokens back. A segment's
tokens are contiguous and in sequence, so this is causal by position. Segment 0 is padding: it sees nothing, is seen by
nothing, and its output and gradients are exactly zero. No path allocates an [S, S] array. On the xla path segments may
share a prefix: they also see the tokens of one earlier segment (packing.share_prompts).

| path | runs on | file |
|---|---|---|
| `splash` | TPU | `splash.py`: JAX's Pallas kernel |
| `cudnn` | NVIDIA Hopper or newer, bf16 or fp16 | `gpu.py` |
| `xla` | everywhere | `xla.py`; the path for CPUs, other GPUs and other dtypes |

`auto` selects the first path that supports the platform of the mesh's devices, so a CPU machine compiles for a TPU
slice what the slice will run. Every path must pass tests/learner/model/attention/test_dispatch.py.

On a mesh each device computes its rows, heads and share of a row's queries, and gathers keys and values over
`sequence`. It is not a ring. Grouped keys are small (Qwen2.5-7B: 4 of 28 heads, 64 MiB per row of 32k tokens in bf16),
so one gather is cheap and works with every kernel, while a causal ring needs its own balancing. The gradient of the
gather is a reduce-scatter. Causal work is not rebalanced: the first shard of a row has less of it than the last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from learner.distributed.sharding import BATCH_AXES
from learner.model.attention import splash
from learner.model.attention.gpu import cudnn_attention, cudnn_refusal
from learner.model.attention.xla import CPU_BLOCK, DEFAULT_BLOCK, xla_attention

PATHS = ("splash", "cudnn", "xla")
"""Paths in the order in which `auto` tries them."""


def attention(
    q: Float[Array, "B S H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    segment_ids: Int[Array, "B S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    path: str = "auto",
    block: int | None = None,
    mesh: Mesh | None = None,
    max_segments: int = 64,
    interpret: bool = False,
    prefix_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S H hd"]:
    """Returns softmax(scale q k^T + mask) v within each segment, with the softmax in float32.

    Raises ValueError if the path is unknown or does not support the call (names the supported ones), a number is out of
    range, or shapes do not match or do not divide over the mesh.

    Args:
      q: queries, after the rotation.
      k: keys, after the rotation; query head h reads key head h // (H / K).
      segment_ids: 0 for padding; equal ids in a row are one sequence, its tokens contiguous.
      window: a query at i sees keys j with i - j < window (Hugging Face's sliding window); None means no limit.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap) before the mask (Gemma 2); None disables it.
      block: tile of the xla and splash paths, in tokens; None uses the path's default.
      mesh: mesh that splits rows, tokens and heads; None runs on one device, or under GSPMD's own choice.
      max_segments: cudnn only: a row with more segments gives NaN (packing.max_row_sequences keeps rows below it).
      interpret: run the splash kernel interpreted on any platform, for tests.
      prefix_ids: segment that a token sees in addition to its own, 0 for none; that segment is directly before all
        segments that see it. None disables shared prefixes.
    """
    _check(q, k, v, segment_ids, window=window, block=block, max_segments=max_segments)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be > 0, got {soft_cap}")
    split = {"sequence": 1, "tensor": 1} if mesh is None else dict(mesh.shape)
    path = choose_path(
        path,
        device=jax.devices()[0] if mesh is None else mesh.devices.flat[0],
        dtype=q.dtype,
        head_dim=q.shape[-1],
        window=window,
        soft_cap=soft_cap,
        sequence=split["sequence"],
        interpret=interpret,
        has_prefixes=prefix_ids is not None,
    )
    length = q.shape[1]
    row = splash.row_multiple(length, split["sequence"]) if path == "splash" else split["sequence"]
    # Pad rows with segment 0 to a length that the kernel and the mesh can split.
    q, k, v, segments = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (0, -length % row)] + [(0, 0)] * (x.ndim - 2)),
        (q, k, v, _Segments(segment_ids, prefix_ids)),
    )
    kernel: Any = None
    if path == "splash":
        kernel = splash.splash_kernel(
            q.shape[1],
            shards=split["sequence"],
            window=window,
            soft_cap=soft_cap,
            block=block,
            interpret=interpret,
        )
        local: Callable[..., Array] = splash.splash_attention
    elif path == "xla":
        on_cpu = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform == "cpu"
        block = block or (CPU_BLOCK if on_cpu else DEFAULT_BLOCK)
        local = functools.partial(xla_attention, window=window, soft_cap=soft_cap, block=block)
    else:
        local = functools.partial(cudnn_attention, window=window, max_segments=max_segments)
    local = functools.partial(_one_device, functools.partial(local, scale=scale), path, split["sequence"])
    if mesh is not None and mesh.size > 1:
        local = _over_mesh(local, mesh, kernel, num_heads=q.shape[2])
        copies = math.lcm(k.shape[2], split["tensor"]) // k.shape[2]
        k, v = jnp.repeat(k, copies, 2), jnp.repeat(v, copies, 2)
    return local(q, k, v, segments, kernel)[:, :length]


def choose_path(
    path: str,
    *,
    device: Any,
    dtype: Any,
    head_dim: int,
    window: int | None,
    soft_cap: float | None = None,
    sequence: int,
    interpret: bool = False,
    has_prefixes: bool = False,
) -> str:
    """Returns `path`, or for "auto" the first of `PATHS` that supports the call on `device`.

    `sequence` is the number of devices that share a row. `interpret` allows the splash kernel on any platform. Raises
    ValueError if the path is unknown or does not support the call.
    """
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    rows = "it takes whole rows, and the mesh splits them over sequence" if sequence > 1 else None
    capped = "it knows no soft cap" if soft_cap is not None else None
    shared = "it knows no shared prompts (packing.share_prompts)" if has_prefixes else None
    reasons: dict[str, str | None] = {
        "splash": (None if device.platform == "tpu" or interpret else "it needs a TPU") or shared,
        # AMD devices also have this attribute, in the form gfx942.
        "cudnn": cudnn_refusal(
            dtype=dtype,
            head_dim=head_dim,
            compute_capability=capability if capability and capability[0].isdigit() else None,
        )
        or capped
        or rows
        or shared,
        "xla": _refusal_of_prefixes(window, sequence) if has_prefixes else None,
    }
    able = [name for name in PATHS if reasons[name] is None]
    if path == "auto" and able:
        return able[0] if not interpret else "xla"
    if path == "auto":
        raise ValueError(f"packing.share_prompts: attention {reasons['xla']}; disable it")
    if path not in reasons:
        raise ValueError(f"attention path: expected 'auto' or one of {PATHS}, got {path!r}")
    if path not in able:
        raise ValueError(f"attention path {path!r} on {device.platform}: {reasons[path]}; take 'auto' or one of {able}")
    return path


def _refusal_of_prefixes(window: int | None, sequence: int) -> str | None:
    """Returns why the xla path does not support shared prefixes for this call, or None."""
    if window is not None:
        return "counts a window's tokens along the row, where a shared prompt is further away than it is"
    if sequence > 1:
        return "requires whole rows for shared prompts, and the mesh splits them over sequence"
    return None


class _Segments(NamedTuple):
    """Ids that mask the tokens of each row."""

    ids: Int[Array, "B S"]
    prefix_ids: Int[Array, "B S"] | None


def _one_device(local: Callable[..., Array], path: str, shards: int, q, k, v, segments: _Segments, kernel) -> Array:
    """Runs a path on one device's rows, heads and queries; gathers keys from the devices that share the row."""
    segment_ids = segments.ids
    if path == "cudnn":
        return local(q, k, v, segment_ids)
    if segments.prefix_ids is not None:
        return local(q, k, v, segment_ids, segment_ids, prefixes=segments.prefix_ids)
    keys, values, key_segments = k, v, segment_ids
    if shards > 1:
        keys, values, key_segments = (lax.all_gather(x, "sequence", axis=1, tiled=True) for x in (k, v, segment_ids))
    if path == "splash":
        return local(q, keys, values, segment_ids, key_segments, kernel=kernel)
    offset = lax.axis_index("sequence") * q.shape[1] if shards > 1 else 0
    return local(q, keys, values, segment_ids, key_segments, query_offset=offset)


def _over_mesh(local: Callable[..., Array], mesh: Mesh, kernel: Any, *, num_heads: int) -> Callable[..., Array]:
    """Returns the function for arrays of the whole mesh; key heads must divide over `tensor`."""
    if num_heads % mesh.shape["tensor"]:
        raise ValueError(
            f"{num_heads} query heads do not divide over tensor={mesh.shape['tensor']}: "
            "make tensor a divisor of the heads, and use fsdp or sequence for the rest"
        )
    heads, tokens = P(BATCH_AXES, "sequence", "tensor", None), P(BATCH_AXES, "sequence")
    tables = kernel and kernel.manual_sharding_spec(NamedSharding(mesh, P(None, "sequence")))

    def checked(q, k, v, segments, kernel):
        rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        if q.shape[0] % rows:
            raise ValueError(f"{q.shape[0]} rows do not divide over {BATCH_AXES} = {rows} devices")
        # The loops of the xla path start from constants, which vma checking rejects as a change of type.
        return jax.shard_map(
            local, mesh=mesh, in_specs=(heads, heads, heads, tokens, tables), out_specs=heads, check_vma=False
        )(q, k, v, segments, kernel)

    return checked


def _check(q, k, v, segment_ids, **at_least_one: int | None) -> None:
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention shapes: got q {q.shape}, k {k.shape}, v {v.shape}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention shapes: {q.shape[2]} query heads do not divide by {k.shape[2]} key heads")
    if segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids: expected [B, S] = {q.shape[:2]}, got {segment_ids.shape}")
