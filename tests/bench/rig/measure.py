"""The planner's input, measured in the rig: so the planner can be checked against what the bench measured."""

import dataclasses
import statistics
from typing import Any

from configs.schema import Config
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.rig import Result, Rig


def measure_profile(
    rig: Rig, config: Config, *, passes_per_token: float, results: list[Result], lengths: Lengths | None
) -> dict[str, Any]:
    """The engine's speed, the training cost and what a publish takes.

    Training and publishing are taken from the sessions themselves, as they ran beside the engine.
    """
    limit = config.actor.max_num_seqs
    counts = [h for h in (1, 2, 4, 8, 16, 32, 64, 128, 256) if h < limit] + [limit]
    engine = rig.profile_engine(counts, num_tokens=min(64, config.sampling.max_response_tokens))
    steps = [row for r in results for row in r.steps]
    applies = [e["dur"] / 1e6 for r in results for e in r.events if e["name"] == "apply"]
    trains = [e["dur"] / 1e6 for r in results for e in r.events if e["name"] == "train"]
    return {
        "tokens_per_s": [list(row) for row in engine],
        "seconds_per_train_token": sum(trains) / sum(r.real_tokens for r in results),
        "apply_s": statistics.median(applies),
        "publish_export_s": statistics.median(row["time/publish_s"] for row in steps),
        "prefetch_s": _median(steps, "actor/prefetch_s"),
        "pause_s": _median(steps, "actor/pause_s"),
        "passes_per_token": passes_per_token,
        "learner": rig.profile_learner(config),
        "lengths": dataclasses.asdict(lengths) if lengths else None,
    }


def _median(rows: list[dict[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(known) if known else None
