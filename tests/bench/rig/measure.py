"""The planner's input, measured in the rig: so the planner can be checked against what the bench measured.

Nothing of the measured sessions goes in but their configs and lengths, which were drawn before.
"""

import statistics
from typing import Any

import numpy as np

from actor.loop import CLAIM_POLL_S
from configs.schema import Config
from launch.profile_machine.engine import counts_up_to
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.rig import Result, Rig


def measure_profile(
    rig: Rig,
    config: Config,
    *,
    results: list[Result],
    lengths: Lengths,
    num_groups: int,
    engine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A profile as `launch/plan/profiles.py` reads it.

    Training and publishing are taken from sessions that ran beside the engine as the measured ones do, but none of
    those: what the planner is to predict must not be in its input. A token's seconds are the training spans' over the
    real tokens, padding and all.

    Args:
      rig: has run a session.
      config: a session's.
      results: of the calibration, or of other warm sessions before the measured ones, at their training cost.
      lengths: what the measured sessions replay.
      num_groups: prompts whose lengths the profile lists, in the order of their tickets.
      engine: its part of the profile, if it was measured before.
    """
    if engine is None:
        counts = counts_up_to(config.actor.max_num_seqs)
        engine = rig.profile_engine(counts, num_tokens=min(64, config.sampling.max_response_tokens))
    steps = [row for r in results for row in r.steps]
    events = [e for r in results for e in r.events]
    prompts = [np.asarray(p, np.int32) for p in rig.prompts(config, num_groups)]
    num_requests = config.rounds.requests_per_group
    train_s = sum(e["dur"] for e in events if e["name"] == "train") / 1e6
    return {
        "engine": engine,
        "response_tokens": {
            "kind": "groups",
            "groups": [[lengths.tokens(p, i) for i in range(num_requests)] for p in prompts],
        },
        "prompt_tokens": {"kind": "groups", "groups": [[p.size] for p in prompts]},
        "learner": {
            "seconds_per_token": train_s / sum(r.real_tokens for r in results),
            "optimizer_step_s": statistics.median(e["dur"] / 1e6 for e in events if e["name"] == "apply"),
        },
        "publish": {
            "export_s": statistics.median(s for r in results for s in _export_s(r)),
            "prefetch_s": _median(steps, "actor/prefetch_s"),
            "pause_s": _median(steps, "actor/pause_s"),
        },
        "claim_s": CLAIM_POLL_S / 2,
    }


def _export_s(result: Result) -> list[float]:
    """Seconds of a run's publishes, but the first, which maps cold memory, where there are others."""
    times = list(dict.fromkeys(row["time/publish_s"] for row in result.steps))
    return times[1:] or times


def _median(rows: list[dict[str, Any]], name: str) -> float:
    known = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(known) if known else 0.0
