"""What a compiled program computes, moves and sends, from its HLO text, with loops counted as often as they run.

XLA's own `cost_analysis()` counts the body of a while loop once, and a scanned decoder is nearly all body, so
everything is counted here from `Compiled.as_text()`. Of a conditional every branch is counted: an upper bound. Pure;
knows nothing of jax.
"""

from __future__ import annotations

import dataclasses
import math
import re

from learner.costs.hlo import ArrayShape, Instruction, Module, run_counts

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction and how often it runs."""

    kind: str
    """One of `COLLECTIVES`; a TPU's all-reduce whose result is at once sliced is a reduce-scatter."""
    num_bytes: int
    """The larger of its input and its result, one chip's, one run."""
    group_size: int
    """Chips that take part together."""
    group: tuple[int, ...]
    """One of the groups, by place in the program's device order."""
    runs: float
    is_async: bool
    """Whether other work is scheduled between its start and its end."""
    op_name: str
    """Where it comes from in the traced program."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that a chip sends in all runs by a ring algorithm: an all-reduce passes its buffer on twice."""
        n = self.group_size
        if self.kind == "collective-permute":
            return self.runs * self.num_bytes
        share = (n - 1) / n if n else 0.0
        return self.runs * self.num_bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One call of a Pallas kernel and how often it runs."""

    name: str
    operands: tuple[tuple[int, ...], ...]
    """Shapes of the arrays that go in."""
    results: tuple[tuple[int, ...], ...]
    runs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """A program's work on one chip."""

    matmul_flops: float
    """Of dots and convolutions; not of custom calls."""
    hbm_bytes: float
    """Read and written by every scheduled instruction, arrays in fast memory left out."""
    estimated_cycles: float
    """The compiler's own estimate of its fusions, one after the other; 0 where it gives none (CPU, GPU)."""
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    """Pallas kernels, of which the compiler estimates nothing."""
    unknown_loops: tuple[str, ...]
    """Loops whose trip count isn't in the program; taken as `dynamic_trips`."""


def costs(module: Module, *, dynamic_trips: int = 1) -> Costs:
    """Adds up what the program does, every computation as often as it runs.

    Args:
      module: the program.
      dynamic_trips: how often a loop is taken to run whose bound is data, or can't be read.
    """
    weights, scheduled, unknown = run_counts(module, dynamic_trips)
    flops = hbm = cycles = 0.0
    collectives: list[Collective] = []
    in_steps: dict[str, Collective] = {}
    kernels: list[Kernel] = []
    for name, weight in weights.items():
        body = module.computations[name]
        for instruction in body.values():
            if instruction.opcode in ("dot", "convolution"):
                flops += weight * matmul_flops(instruction, body)
            collective = _collective(instruction, name, body, weight)
            channel = instruction.attribute("channel_id")
            if collective is not None and name not in scheduled and channel is not None:
                # A TPU spreads one collective over several fusions, each of which names it again.
                in_steps[channel] = max(collective, in_steps.get(channel, collective), key=lambda c: c.runs)
            elif collective is not None:
                collectives.append(collective)
            if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
                kernels.append(_kernel(instruction, body, weight))
            if name in scheduled:
                hbm += weight * _hbm_bytes(instruction, body, module)
                found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
                cycles += weight * int(found.group(1)) if found else 0.0
    return Costs(
        matmul_flops=flops,
        hbm_bytes=hbm,
        estimated_cycles=cycles,
        collectives=(*collectives, *in_steps.values()),
        kernels=tuple(kernels),
        unknown_loops=tuple(unknown),
    )


def matmul_flops(instruction: Instruction, body: dict[str, Instruction]) -> float:
    """2 x the multiply-adds of a dot or convolution that don't meet padding."""
    left, right = (body[name].shapes[0].dims for name in instruction.operands[:2])
    out = instruction.shapes[0].dims
    if instruction.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [left[int(d)] for d in found.group(1).split(",") if d] if found else []
        return 2.0 * math.prod(out) * math.prod(contracted)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    lhs, rhs, result = labels.groups()
    macs = float(left[lhs.index("b")] * right[rhs.index("i")] * right[rhs.index("o")])
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    spatial = [c for c in result if c.isdigit()]
    window = _window(instruction.attributes, len(spatial))
    for i, c in enumerate(spatial):
        macs *= _valid_pairs(left[lhs.index(c)], right[rhs.index(c)], out[result.index(c)], window[i])
    return 2.0 * macs / batch_groups


def _window(attributes: str, num_dims: int) -> list[dict[str, int]]:
    """stride, low padding, base and window dilation of each spatial dim."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(f.split("=", 1) for f in found.group(1).split()) if found else {}

    def column(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * num_dims

    return [
        {"stride": int(s), "pad": int(p.split("_")[0]), "base": int(b), "window": int(w)}
        for s, p, b, w in zip(
            column("stride", "1"),
            column("pad", "0_0"),
            column("lhs_dilate", "1"),
            column("rhs_dilate", "1"),
            strict=True,
        )
    ]


def _valid_pairs(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """Pairs of output and kernel positions that meet an input element, not padding or a hole of the dilation."""
    valid = 0
    for k in range(kernel):
        for o in range(out):
            place = o * window["stride"] + k * window["window"] - window["pad"]
            valid += 0 <= place < (size - 1) * window["base"] + 1 and place % window["base"] == 0
    return valid


def _collective(
    instruction: Instruction, computation: str, body: dict[str, Instruction], weight: float
) -> Collective | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    results = sum(s.num_bytes for s in instruction.shapes if s.dims)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # The result of a start holds the inputs beside the outputs, and a permute's also two flags.
        sizes = [s.num_bytes for s in instruction.shapes if s.dims]
        results = max(sum(sizes[: len(instruction.operands)]), sum(sizes[len(instruction.operands) :]))
    inputs = sum(s.num_bytes for name in instruction.operands if name in body for s in body[name].shapes)
    group = _first_group(instruction.attributes)
    op_name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return Collective(
        kind=kind,
        num_bytes=max(results, inputs),
        group_size=len(group),
        group=group,
        runs=weight,
        is_async=instruction.opcode.endswith("-start") or computation.startswith("async_collective"),
        op_name=op_name.group(1) if op_name else "",
    )


def _first_group(attributes: str) -> tuple[int, ...]:
    """The first replica group, in any of HLO's notations; of a permute the first pair."""
    found = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,\s]*)\}", attributes)
    if found:
        return tuple(int(x) for x in found.group(1).split(",") if x.strip())
    found = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if found:
        dims = [int(x) for x in found.group(3).split(",")]
        order = [int(x) for x in found.group(4).split(",")] if found.group(4) else list(range(len(dims)))
        return tuple(_transposed_iota(dims, order, int(found.group(2))))
    found = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? ?\{([^}]*)\}", attributes)
    if found:
        axes = re.findall(r"'([^']+)'=(\d+)", found.group(1))
        return tuple(
            _mesh_group([(n, int(s)) for n, s in axes], re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found.group(2)))
        )
    return ()


def _transposed_iota(dims: list[int], order: list[int], count: int) -> list[int]:
    """The first `count` entries of iota(prod(dims)) reshaped to dims and transposed by order."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    shape, steps = [dims[i] for i in order], [strides[i] for i in order]
    found = []
    for n in range(count):
        place = 0
        for size, step in zip(reversed(shape), reversed(steps), strict=True):
            n, index = divmod(n, size)
            place += index * step
        found.append(place)
    return found


def _mesh_group(axes: list[tuple[str, int]], grouped: list[tuple[str, str, str]]) -> list[int]:
    """Devices whose places differ only in the grouped axes (an axis may be split: 'x':(before)size)."""
    group = [0]
    for name, before, part in grouped:
        at = next(i for i, (axis, _) in enumerate(axes) if axis == name)
        size, step = axes[at][1], math.prod(s for _, s in axes[at + 1 :])
        if part:
            step *= size // (int(before) * int(part))
            size = int(part)
        group = [place + i * step for place in group for i in range(size)]
    return sorted(group)


def _kernel(instruction: Instruction, body: dict[str, Instruction], weight: float) -> Kernel:
    operands = [s.dims for name in instruction.operands if name in body for s in body[name].shapes]
    name = re.sub(r"\.\d+$", "", instruction.name)
    return Kernel(name=name, operands=tuple(operands), results=tuple(s.dims for s in instruction.shapes), runs=weight)


_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all")


def _hbm_bytes(instruction: Instruction, body: dict[str, Instruction], module: Module) -> float:
    """What one run of a scheduled instruction reads from and writes to HBM; slices count as slices."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0.0
    reads = {i: _bytes(body[name].shapes) for i, name in enumerate(instruction.operands) if name in body}
    writes = _bytes(instruction.shapes)
    inner = module.computations.get(instruction.attribute("calls") or "", {}) if instruction.opcode == "fusion" else {}
    for parameter in inner.values():
        if parameter.opcode != "parameter" or not reads.get(int(parameter.literal)):
            continue
        users = [i for i in inner.values() if parameter.name in i.operands]
        if users and all(u.opcode in ("dynamic-slice", "slice", "gather") for u in users):
            reads[int(parameter.literal)] = sum(s.num_bytes for u in users for s in u.shapes)
        elif users and all(u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name for u in users):
            # Updated in place: only the slice is written, and what was there isn't read.
            changed = sum(inner[u.operands[1]].shapes[0].num_bytes for u in users)
            writes -= max(reads[int(parameter.literal)] - changed, 0)
            reads[int(parameter.literal)] = 0.0
    if instruction.opcode == "dynamic-slice":
        reads = {0: writes}
    if instruction.opcode == "dynamic-update-slice":
        reads, writes = {}, 2 * _bytes(body[instruction.operands[1]].shapes)
    if instruction.opcode.endswith("-start"):
        return writes  # its result holds both sides
    return sum(reads.values()) + max(writes, 0.0)


def _bytes(shapes: tuple[ArrayShape, ...]) -> float:
    return float(sum(s.num_bytes for s in shapes if s.in_hbm))
