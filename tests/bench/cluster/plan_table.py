"""The table of `docs/planning.md`, from the profile beside it: what gives out first as engines are added."""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from tests.bench.cluster.figure import CHIPS, ENGINES, Cell, Variant, counts_up_to, name_in_figure, scale, variants

COMPUTE = ("generation", "learner compute")
"""What one pays for: where that is what bounds a run, nothing gives out."""
_HEAD = "| Change | First bottleneck, from this number of engines | No pace is possible from |\n|---|---|---|"
_TABLE = re.compile(re.escape(_HEAD) + r"(\n\|.*)*")


def table(profile: dict[str, Any]) -> str:
    """Returns Markdown, a variant a row, with all the figure's learner chips; numbers of engines are exact."""
    lines = [_HEAD]
    for variant in variants(profile):

        def cell(num_engines: int, variant: Variant = variant) -> Cell:
            return scale(variant.config, variant.profile, engines=[num_engines], learner_chips=[CHIPS])[0][0]

        parts = changes(lambda n, cell=cell: name_in_figure(cell(n).limit.part))
        ends = changes(lambda n, cell=cell: not cell(n).limit.groups_per_s)
        said = ", ".join(f"{name} {n:,}" for n, name in parts if name not in COMPUTE) or "-"
        never = next((f"{n:,}" for n, is_out in ends if is_out), "-")
        lines.append(f"| {variant.title.removeprefix('... ')} | {said} | {never} |")
    return "\n".join(lines)


def changes(of: Callable[[int], Any]) -> list[tuple[int, Any]]:
    """(number of engines, what is so from there on), the first from 1 on; what changes twice nearby may be missed."""
    of, counts = functools.cache(of), counts_up_to(ENGINES)
    first = (counts[0], of(counts[0]))
    return [first, *(c for low, high in zip(counts, counts[1:], strict=False) for c in _between(of, low, high))]


def _between(of: Callable[[int], Any], low: int, high: int) -> list[tuple[int, Any]]:
    if of(low) == of(high):
        return []
    if high - low == 1:
        return [(high, of(high))]
    middle = (low + high) // 2
    return _between(of, low, middle) + _between(of, middle, high)


def keep(profile: dict[str, Any], path: pathlib.Path, page: pathlib.Path, *, load: float, num_cores: int) -> str:
    """Writes profile and table, unless the machine was busy when the measurement began; returns what was done.

    Raises ValueError if the page has no such table.
    """
    if load > num_cores:
        return f"{path.name} stays as it was: load average {load:.1f} on {num_cores} cores at the start."
    text, found = _TABLE.subn(lambda _: table(profile), page.read_text())
    if found != 1:
        raise ValueError(f"{page} has {found} tables that begin with {_HEAD!r}, wanted one")
    path.write_text(json.dumps(profile, indent=1) + "\n")
    page.write_text(text)
    return f"{path.name} and the table of {page.name} are written anew: load average {load:.1f} at the start."
