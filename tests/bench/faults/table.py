"""What became of the faults of several seeds, as a table by kind and phase."""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.bench.rig.report import Table
from tests.integration.faults.schedule import OF_ACTORS, OF_LEARNERS, SERVER

PHASES = (*OF_ACTORS, *OF_LEARNERS)
LEAST = 3
"""How often each kind of fault is to be injected in each phase that it has."""


def what(outcome: Mapping[str, Any]) -> str:
    """What was done to what, whichever of equal ones it was."""
    fault = outcome["fault"]
    target: str = SERVER if fault["target"].startswith(SERVER) else fault["target"]
    target = target.replace("learner-0", "leader").replace("learner-1", "other host")
    names: Mapping[str, str] = {"a": "actor", "b": "actor", "v": "vLLM actor", "engine": "vLLM engine"}
    return f"{fault['kind']}: {'-'.join(names.get(end, end) for end in target.split('-'))}"


def survived(outcomes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those after which the run went on, with what was hit."""
    return [o for o in outcomes if o["recovery_s"] is not None]


def injected(outcomes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose phase came, and that hit something."""
    return [o for o in outcomes if o["injected_s"] is not None]


def least(outcomes: Sequence[Mapping[str, Any]]) -> int:
    """How often the rarest kind and phase was injected, of all that were planned."""
    counts = collections.Counter({(what(o), o["fault"]["phase"]): 0 for o in outcomes})
    counts.update((what(o), o["fault"]["phase"]) for o in injected(outcomes))
    return min(counts.values(), default=0)


def table(outcomes: Sequence[Mapping[str, Any]]) -> Table:
    """A row a kind, a column a phase: survived/injected; then the recovery's median and longest, in seconds."""
    rows: list[list[str]] = []
    for kind in sorted({what(o) for o in outcomes}):
        own = [o for o in outcomes if what(o) == kind]
        cells = [_cell([o for o in own if o["fault"]["phase"] == phase]) for phase in PHASES]
        times = [o["recovery_s"] for o in survived(own)]
        rows.append([kind, *cells, f"{statistics.median(times):.0f}, {max(times):.0f}" if times else "-"])
    return Table(columns=["fault", *PHASES, "recovery s"], rows=rows)


def _cell(outcomes: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(survived(outcomes))}/{len(injected(outcomes))}" if outcomes else ""
