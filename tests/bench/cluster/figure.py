"""Which part gives out first, to 4,096 engines and 1,024 chips: one remedy after the other."""

import os
from typing import Any

from configs import overrides
from launch.tools.plan import profile as plan_profile
from tests.bench.cluster_plan import counts_up_to, plot_scale, scale, variant_of

ENGINES, CHIPS = 4096, 1024
PRESET = "pipelinerl"
OVERRIDES = {"publish.serve": "https"}
_CONNECTIONS = "profile.store.max_connections=20000"
_DELTAS = f"{_CONNECTIONS}, publish.full_every=20"


def variants(store: dict[str, Any]) -> list[str]:
    """Each as `tests.bench.cluster_plan --variant` takes it."""
    faster = ", ".join(f"profile.store.{name}={value / 10!r}" for name, value in store.items() if name.endswith("_s"))
    return [
        "PostgreSQL as it comes, weights in full: publish.full_every=1",
        f"... 20,000 connections: {_CONNECTIONS}, publish.full_every=1",
        f"... deltas, 19 versions of 20: {_DELTAS}",
        f"... a store ten times as fast: {_DELTAS}, {faster}",
    ]


def draw(profile: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a PNG."""
    config = overrides.apply(overrides.load_preset(PRESET), OVERRIDES)
    cells = {
        title: scale(its_config, its_profile, engines=counts_up_to(ENGINES), learner_chips=counts_up_to(CHIPS))
        for title, its_config, its_profile in (
            variant_of(text, config, plan_profile.from_dict(profile)) for text in variants(profile["store"])
        )
    }
    plot_scale(cells, path)
