"""Draws schedules by seed and runs them; a schedule's seed alone says what happens in it."""

import dataclasses
import pathlib
import random
import tempfile
from collections.abc import Iterable
from typing import Any

from configs import schema, sections
from tests.bench.schedules.world import Findings, World

NUM_UPDATES = 8
MEMORY = pathlib.Path("/dev/shm")
"""A store's file is synced at each commit, which costs nothing here."""
EVERY = sections.PublishConfig(when="every")


def draw_config(rng: random.Random) -> schema.Config:
    """A configuration of few, small groups in which everything that a schedule may ask for occurs."""
    K, U = rng.choice([2, 3]), rng.choice([1, 2, 3])
    rounds: dict[str, Any] = dict(groups_per_update=U, groups_per_round=U * rng.choice([1, 2]), samples_per_group=K)
    rounds["filter_zero_variance"] = rng.random() < 0.2
    rounds["overprovision_samples"] = rng.choice([1.0, 1.0, 1.5, 2.0])
    unit: Any = rng.choice(["group", "sample"])
    fields: dict[str, Any] = {}
    kind = rng.choice(["rounds", "frontier", "window", *["alpha"] * 4, *["lag"] * 2, "ring"])
    may_race = kind not in ("frontier", "rounds") or unit == "group"
    if may_race and kind != "frontier":
        rounds["overprovision_prompts"] = rng.choice([1.0, 1.0, 1.5, 2.0])
    match kind:
        case "rounds":
            rounds["train_start"] = rng.choice(["round_complete", "group_ready"])
            fields["admission"] = sections.AdmissionConfig(unit=unit)
        case "frontier":
            fields["admission"] = sections.AdmissionConfig(policy="frontier", width=rng.choice([1, 2, 4]), unit=unit)
        case "alpha":
            ratio = rng.choice([0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0])
            fields["admission"] = sections.AdmissionConfig(policy="window", async_ratio=ratio, unit=unit)
            fields["publish"] = EVERY
        case _:
            fields["admission"] = sections.AdmissionConfig(
                policy="window",
                unit=unit,
                queue_groups=rng.choice([0, 1, 3]),
                when_full="drop_oldest" if kind == "ring" else "block",
            )
            fields["publish"] = dataclasses.replace(EVERY, every_n_steps=rng.choice([1, 1, 2]))
            if kind != "window":
                rounds["max_lag_steps"] = rng.choice([1, 2, 3, 6])
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=NUM_UPDATES),
        model=sections.ModelConfig(max_tokens=16),
        sampling=sections.SamplingConfig(max_response_tokens=8),
        rounds=sections.RoundsConfig(**rounds),
        packing=sections.PackingConfig(rows=4, row_tokens=16),
        actor=sections.ActorConfig(max_num_seqs=rng.choice([3, 8, 24])),
        **fields,
    )


def run_schedule(seed: int) -> tuple[Findings, str]:
    """Runs the schedule of a seed; returns what was found, and the configuration in a line."""
    rng = random.Random(seed)
    while True:
        try:
            config = draw_config(rng)
        except ValueError:  # what two fields can't do together
            continue
        break
    crashes = rng.choice([0.0, 0.003, 0.01])
    ess_stops = rng.choice([0.0, 0.0, 0.2]) if config.publish.when == "every" else 0.0
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        world = World(folder, config, seed, crashes=crashes, ess_stops=ess_stops)
        try:
            world.run(NUM_UPDATES)
        except AssertionError:
            world.findings.stood_still += 1
        finally:
            world.shared.close()
    about = f"seed={seed} {config.admission} {config.rounds} every={config.publish.every_n_steps} crashes={crashes}"
    return world.findings, about


def fuzz(seeds: Iterable[int]) -> tuple[Findings, list[str]]:
    """Runs schedules; returns the sum of what was found, and a line for each schedule that broke a rule."""
    total, problems = Findings(), list[str]()
    for seed in seeds:
        found, about = run_schedule(seed)
        broken = {n: v for n, v in dataclasses.asdict(found).items() if v and n in RULES}
        if broken:
            problems.append(f"{broken} {about}")
        total.add(found)
    return total, problems


RULES = (
    "trained_twice",
    "lost",
    "abandoned_groups",
    "over_lag_bound",
    "wrong_groups",
    "fenced_groups",
    "stood_still",
    "doomed_restarts",
    "stale_groups",
)
"""Of `Findings`: what must not occur."""
