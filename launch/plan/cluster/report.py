"""What the planner says of a run's parts, in a table and in words."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import rich.box
from rich.table import Table

from launch.plan.cluster.limits import Cluster, Limit, first_to_give_out
from launch.plan.cluster.part import Part


def parts_table(parts: Sequence[Part], *, groups_per_s: float) -> Table:
    """A part a row, the fullest first."""
    title = f"what each part is asked for at {groups_per_s:.3g} groups/s"
    table = Table(title=title, box=rich.box.SIMPLE, title_justify="left")
    table.add_column("part")
    for column in ("asked for", "can take", "used"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in sorted(parts, key=lambda p: -p.share):
        table.add_row(
            part.name, quantity(part.load, part.unit), quantity(part.capacity, part.unit), f"{part.share:.1%}"
        )
    return table


def verdict(cluster: Cluster, limit: Limit, *, groups_per_s: float) -> list[str]:
    """Lines that say what gives out first, where, and what to change; and what would be next."""
    part = limit.part
    lines = [f"gives out first: {part.name}, {_at(limit, groups_per_s)}"]
    if part.made_of:
        whole = sum(load for _, load in part.made_of)
        shares = [(name, load / whole) for name, load in sorted(part.made_of, key=lambda item: -item[1])]
        lines.append("made of: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
    lines.append(f"to change: {part.remedy}")
    after = first_to_give_out(cluster, but={part.name})
    if after.part.share >= 1:
        lines.append(f"then: {after.part.full_name}, {_at(after, groups_per_s)}")
    return lines


def _at(limit: Limit, groups_per_s: float) -> str:
    part = limit.part
    if limit.groups_per_s:
        return f"at {limit.groups_per_s:.3g} groups/s, {limit.groups_per_s / groups_per_s:.3g} times the pace above"
    return f"at any pace: {quantity(part.load, part.unit)} are asked for, it takes {quantity(part.capacity, '')}"


def publish_lines(cluster: Cluster) -> list[str]:
    """How long a version takes to the engines, in full and as a delta."""
    if (transfers := cluster.transfers) is None or transfers.way == "memory":
        return []
    hosts = f"{transfers.num_learner_hosts} learner hosts to {transfers.num_actor_hosts} actor hosts"
    way = "by the learner hosts' links" if transfers.way == "links" else "by a bucket"
    full = f"a version, {hosts} {way}: {transfers.publish_s(0, held=-1):.3g} s in full"
    delta = f", {transfers.publish_s(1, held=0):.3g} s as a delta" if transfers.full_every > 1 else ""
    return [full + delta]


def as_json(cluster: Cluster, limit: Limit, *, groups_per_s: float) -> dict[str, Any]:
    """Plain data."""
    parts = [dataclasses.asdict(p) | {"share": p.share} for p in cluster.parts(groups_per_s)]
    return {"parts": parts, "limit": dataclasses.asdict(limit)}


def quantity(value: float, unit: str) -> str:
    """A number of three digits with its unit, in thousands of it where there are many."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()
