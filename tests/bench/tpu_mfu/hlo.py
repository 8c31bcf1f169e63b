"""What a compiled TPU program does, from its HLO text, each instruction as often as it runs.

XLA's `cost_analysis()` counts the body of a loop once, and a scanned decoder is nearly all body. A TPU's HLO states the
compiler's own estimate of cycles beside each fusion; of Pallas kernels and collectives it states nothing, so those are
returned with their shapes and bytes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and dims of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.dims) * _BYTES.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """The result's."""
    operands: tuple[str, ...]
    inside: str
    """Text between the parentheses: a constant's value, a parameter's number."""
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str:
        """Returns the computation or number after `name=`, or ""."""
        found = re.search(rf"\b{name}=%?([\w.-]+)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]


class Kernel(NamedTuple):
    """A Pallas kernel."""

    name: str
    operands: tuple[tuple[int, ...], ...]
    """Dims of the arrays that go in."""
    results: tuple[tuple[int, ...], ...]
    runs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a program on one chip."""

    cycles: float
    """XLA's estimate for its fusions, one after another."""
    sent_bytes: float
    """Bytes that a chip sends in collectives by ring algorithms."""
    kernels: tuple[Kernel, ...]
    unknown_loops: tuple[str, ...]
    """Loops without a constant number of trips; counted once."""


def work(text: str) -> Work:
    """Returns the work of `Compiled.as_text()`."""
    computations, entry = parse(text)
    cycles = sent = 0.0
    kernels: list[Kernel] = []
    unknown: list[str] = []
    channels: dict[str, float] = {}
    for name, runs, is_scheduled in _runs(computations, entry, unknown):
        body = computations[name]
        for one in body.values():
            if is_scheduled and (found := re.search(r'"estimated_cycles":"(\d+)"', one.attributes)):
                cycles += runs * int(found[1])
            if one.opcode == "custom-call" and "tpu_custom_call" in one.attributes:
                operands = tuple(a.dims for o in one.operands if o in body for a in body[o].arrays)
                kernels.append(Kernel(one.name.split(".")[0], operands, tuple(a.dims for a in one.arrays), runs))
            if one.opcode.removesuffix("-start") in _COLLECTIVES:
                num_bytes = runs * _sent_bytes(one, name, body)
                if channel := one.attribute("channel_id"):  # several fusions may name one collective
                    channels[channel] = max(num_bytes, channels.get(channel, 0.0))
                else:
                    sent += num_bytes
    sent += sum(channels.values())
    return Work(cycles=cycles, sent_bytes=sent, kernels=tuple(kernels), unknown_loops=tuple(unknown))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations by name, and the entry's name."""
    lines: dict[str, list[str]] = {}
    entry, current = "", None
    # A Pallas kernel's own code stands in its call, in base64.
    for line in re.sub(r'"body":"[^"]*"', '"body":""', text).splitlines():
        if current is None:
            if line.endswith("{") and not line[0].isspace() and "->" in line:
                name = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
                current = lines.setdefault(name, [])
                entry = name if line.startswith("ENTRY ") else entry
        elif line.startswith("}") and not line.startswith("}}"):
            current = None
        elif line.startswith(" ") and " = " in line:
            current.append(line)
        elif current:
            current[-1] += line  # a kernel's attributes may have line breaks
    if not entry:
        raise ValueError("expected the text of a compiled HLO module, got one without an ENTRY computation")
    return {name: {i.name: i for i in map(_instruction, body)} for name, body in lines.items()}, entry


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, rest = right[:end], right[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        name=left.strip().removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:opening],
        arrays=tuple(Array(m[1], tuple(int(d) for d in m[2].split(",") if d)) for m in _ARRAY.finditer(shape)),
        operands=tuple(re.findall(r"%([\w.-]+)", rest[opening + 1 : closing])),
        inside=rest[opening + 1 : closing],
        attributes=rest[closing + 1 :],
        is_root=left.strip().startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses: {text[:200]!r}")


def _runs(
    computations: dict[str, Computation], name: str, unknown: list[str], runs: float = 1.0, is_scheduled: bool = True
) -> Iterator[tuple[str, float, bool]]:
    """Yields each computation (of a conditional: all branches), its number of runs, and False if part of a fusion."""
    yield name, runs, is_scheduled
    for one in computations[name].values():
        times, inner = 1.0, is_scheduled
        if one.opcode == "while":
            trips, callees = num_trips(computations, name, one), [one.attribute("body")]
            times = float(1 if trips is None else trips)
            if trips is None:
                unknown.append(one.name)
        elif one.opcode == "conditional":
            lists = re.findall(r"(?:branch|true|false)_computations?=\{?([^}=]*)", one.attributes)
            callees = [c for one_list in lists for c in re.findall(r"%([\w.-]+)", one_list)]
        elif one.opcode in ("fusion", "async-start", "call"):
            callees, inner = [one.attribute("calls") or one.attribute("to_apply")], inner and one.opcode != "fusion"
        else:
            continue
        for callee in (c for c in callees if c in computations):
            yield from _runs(computations, callee, unknown, runs * times, inner)


def num_trips(computations: dict[str, Computation], caller: str, loop: Instruction) -> int | None:
    """Returns how often a loop runs its body, if it counts from a constant to a constant; else None."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(noted[1])
    condition = computations.get(loop.attribute("condition"), {})
    root = next((i for i in condition.values() if i.is_root), None)
    if root is None:
        return None
    names, compare = root.operands, root
    if root.opcode == "fusion":
        fused = computations.get(root.attribute("calls"), {})
        compare = next((i for i in fused.values() if i.is_root), root)
        parameters = [fused.get(operand) for operand in compare.operands]
        if any(p is None or p.opcode != "parameter" for p in parameters):
            return None
        names = tuple(root.operands[int(p.inside)] for p in parameters if p is not None)
    if compare.opcode != "compare" or compare.attribute("direction") not in ("LT", "LE") or len(names) != 2:
        return None
    outer = computations[caller]
    start = outer.get(loop.operands[0])

    def value(scope: Computation, name: str) -> int | None:
        one = scope.get(name)
        if one is None:
            return None
        if one.opcode == "constant":
            return int(one.inside) if re.fullmatch(r"-?\d+", one.inside) else None
        if one.opcode in ("copy", "bitcast", "convert", "reshape"):
            return value(scope, one.operands[0])
        if one.opcode == "get-tuple-element" and scope is condition and start is not None and start.opcode == "tuple":
            return value(outer, start.operands[int(one.attribute("index"))])
        return None

    first, last = (value(condition, name) for name in names)
    if last is None:
        return None
    return max(last - (first or 0) + (compare.attribute("direction") == "LE"), 0)


def _sent_bytes(one: Instruction, computation: str, body: Computation) -> float:
    """Returns the bytes that a chip sends in one run: a ring passes (n - 1) / n of the buffer on, a sum twice that."""
    kind, sizes = one.opcode.removesuffix("-start"), [a.num_bytes for a in one.arrays if a.dims]
    if one.opcode.endswith("-start") and kind != "all-reduce":  # it returns its inputs too
        sizes = sizes[len(one.operands) :]
    inputs = sum(a.num_bytes for name in one.operands if name in body for a in body[name].arrays)
    num_bytes = max(sum(sizes), inputs)
    if kind == "collective-permute":
        return num_bytes
    is_sum = kind == "all-reduce" and not computation.startswith("all-reduce-scatter")
    size = _group_size(one.attributes)
    return num_bytes * (2 if is_sum else 1) * (1 - 1 / size if size else 1)


def _group_size(attributes: str) -> int:
    if found := re.search(r"replica_groups=\{\{([\d,\s]*)\}", attributes):
        return len(found[1].split(","))
    found = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
    return int(found[1]) if found else 0
