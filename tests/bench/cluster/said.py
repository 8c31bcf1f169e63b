"""The table of `docs/cluster_plan.md`, from the profile beside it: what gives out first as engines are added."""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from configs import overrides
from configs.schema import Config
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.profile import Profile
from tests.bench.cluster.figure import CHIPS, ENGINES, OVERRIDES, PRESET, variants
from tests.bench.cluster_plan import Cell, counts_up_to, name_in_figure, scale, variant_of

COMPUTE = ("generation", "learner compute")
"""What one pays for: where that is what bounds a run, nothing gives out."""
_HEAD = "| changed, one after the other | gives out first, from so many engines on | at any pace, from |\n|---|---|---|"
_TABLE = re.compile(re.escape(_HEAD) + r"(\n\|.*)*")


def table(profile: dict[str, Any]) -> str:
    """In markdown, a variant a row, with all the figure's learner chips; numbers of engines are exact."""
    config = overrides.apply(overrides.load_preset(PRESET), OVERRIDES)
    lines = [_HEAD]
    for text in variants(profile["store"]):
        title, its_config, its_profile = variant_of(text, config, plan_profile.from_dict(profile))
        parts = changes(functools.partial(_part, its_config, its_profile))
        ends = changes(functools.partial(_is_out, its_config, its_profile))
        said = ", ".join(f"{name} {n:,}" for n, name in parts if name not in COMPUTE) or "-"
        never = next((f"{n:,}" for n, is_out in ends if is_out), "-")
        lines.append(f"| {title.removeprefix('... ')} | {said} | {never} |")
    return "\n".join(lines)


def _part(config: Config, profile: Profile, num_engines: int) -> str:
    return name_in_figure(_cell(config, profile, num_engines).limit.part)


def _is_out(config: Config, profile: Profile, num_engines: int) -> bool:
    return not _cell(config, profile, num_engines).limit.groups_per_s


def _cell(config: Config, profile: Profile, num_engines: int) -> Cell:
    return scale(config, profile, engines=[num_engines], learner_chips=[CHIPS])[0][0]


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
    """Writes profile and table, unless the machine was busy; in a line, what was done.

    Args:
      profile: with the store as measured.
      path: of the JSON file.
      page: has the table.
      load: the load average when the measurement began.
      num_cores: of the machine; with more load than that a store's seconds are others' too.

    Raises:
      ValueError: the page has no such table.
    """
    if load > num_cores:
        return f"{path.name} stays as it was: load average {load:.1f} on {num_cores} cores at the start."
    text, found = _TABLE.subn(lambda _: table(profile), page.read_text())
    if found != 1:
        raise ValueError(f"{page} has {found} tables that begin with {_HEAD!r}, wanted one")
    path.write_text(json.dumps(profile, indent=1) + "\n")
    page.write_text(text)
    return f"{path.name} and the table of {page.name} are written anew: load average {load:.1f} at the start."
