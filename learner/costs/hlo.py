"""Reads a compiled program's HLO text: its instructions, and how often each runs.

A program is a graph of computations; a computation's weight is how often it runs, with the trip counts of loops read
from their conditions. `learner.costs.hlo_costs` adds up what the instructions do. Pure; knows nothing of jax.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.-]+)")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool
    """False where the compiler put it into the chip's fast memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without padding to tiles."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.search(r"\d+", self.dtype)
            bits = int(digits.group()) if digits else 0
        return math.prod(self.dims) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    """The result: one array, or a tuple's arrays."""
    operands: tuple[str, ...]
    attributes: str
    """Everything after the operands, as it stands there."""
    literal: str
    """What stands between the parentheses: the value of a constant, the index of a parameter."""
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """The computation or number after `name=`."""
        found = re.search(rf"\b{name}=%?([\w.-]+)", self.attributes)
        return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


def parse(text: str) -> Module:
    """Parses `Compiled.as_text()`.

    Raises:
      ValueError: there is no entry computation in it.
    """
    lines: dict[str, list[str]] = {}
    entry, current = "", None
    # A Pallas kernel's own code stands in its call, base64; nothing is read from it.
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
            current[-1] += line  # attributes of kernels have line breaks
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    parsed = {name: [_parse_instruction(line) for line in body] for name, body in lines.items()}
    return Module({name: {i.name: i for i in body} for name, body in parsed.items()}, entry)


def _parse_instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, rest = right[:end], right[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    return Instruction(
        name=left.strip().removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:opening],
        shapes=tuple(
            ArrayShape(m[1], tuple(int(d) for d in m[2].split(",") if d), "S(" not in (m[3] or ""))
            for m in _ARRAY.finditer(shape)
        ),
        operands=tuple(_NAME.findall(inside)),
        attributes=rest[closing + 1 :],
        literal=inside,
        is_root=left.strip().startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO: {text[:200]!r}")


def run_counts(module: Module, dynamic_trips: int) -> tuple[dict[str, float], set[str], list[str]]:
    """How often each computation runs; which are scheduled (not inside a fusion); loops that can't be read."""
    weights: dict[str, float] = {}
    scheduled: set[str] = set()
    unknown: list[str] = []

    def visit(name: str, weight: float, is_scheduled: bool) -> None:
        weights[name] = weights.get(name, 0.0) + weight
        if is_scheduled:
            scheduled.add(name)
        for instruction in module.computations[name].values():
            for callee, factor, inline in _callees(module, name, instruction, dynamic_trips):
                visit(callee, weight * factor, is_scheduled and not inline)
            if instruction.opcode == "while" and trip_count(module, name, instruction) is None:
                unknown.append(instruction.name)

    visit(module.entry, 1.0, True)
    return weights, scheduled, unknown


def _callees(
    module: Module, caller: str, instruction: Instruction, dynamic_trips: int
) -> Iterator[tuple[str, float, bool]]:
    """(computation, how often a run of the instruction runs it, whether it is part of that instruction)."""
    if instruction.opcode == "while":
        trips = trip_count(module, caller, instruction)
        yield instruction.attribute("body") or "", float(dynamic_trips if trips is None else trips), False
    elif instruction.opcode == "conditional":
        for names in re.findall(
            r"(?:branch|true|false)_computations?=\{?([^},]*(?:,\s*%[^},]*)*)", instruction.attributes
        ):
            for name in _NAME.findall(names):
                yield name, 1.0, False
    elif instruction.opcode == "call":
        yield instruction.attribute("to_apply") or instruction.attribute("calls") or "", 1.0, False
    elif instruction.opcode in ("fusion", "async-start"):
        callee = instruction.attribute("calls")
        if callee:
            yield callee, 1.0, instruction.opcode == "fusion"


def trip_count(module: Module, caller: str, loop: Instruction) -> int | None:
    """How often a while loop's body runs, if it counts from a constant to a constant; else None.

    The compiler's own note is taken where there is one; a TPU's programs have none.
    """
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted.group(1))
    condition = module.computations.get(loop.attribute("condition") or "", {})
    comparison = _comparison(module, condition)
    if comparison is None:
        return None
    (counter, bound), direction = comparison
    start = module.computations[caller].get(loop.operands[0])

    def value(scope: dict[str, Instruction], name: str, outer: Instruction | None) -> int | None:
        instruction = scope.get(name)
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
        if instruction.opcode in ("copy", "bitcast", "convert", "reshape"):
            return value(scope, instruction.operands[0], outer)
        if instruction.opcode == "get-tuple-element" and outer is not None and outer.opcode == "tuple":
            index = int(instruction.attribute("index") or 0)
            return value(module.computations[caller], outer.operands[index], None)
        return None

    first, last = value(condition, counter, start), value(condition, bound, start)
    if last is None:
        return None
    trips = last - (first or 0) + (direction == "LE")
    return max(trips, 0)


def _comparison(module: Module, condition: dict[str, Instruction]) -> tuple[tuple[str, str], str] | None:
    """The operands of a condition's root comparison, by their names in the condition, and its direction."""
    root = next((i for i in condition.values() if i.is_root), None)
    if root is None:
        return None
    arguments = root.operands
    if root.opcode == "fusion":
        inner = module.computations.get(root.attribute("calls") or "", {})
        root = next((i for i in inner.values() if i.is_root), None)
        if root is None or root.opcode != "compare":
            return None
        places = []
        for name in root.operands:
            parameter = inner.get(name)
            if parameter is None or parameter.opcode != "parameter":
                return None
            places.append(arguments[int(parameter.literal)])
        arguments = tuple(places)
    direction = root.attribute("direction")
    if root.opcode != "compare" or direction not in ("LT", "LE") or len(arguments) != 2:
        return None
    return (arguments[0], arguments[1]), direction
