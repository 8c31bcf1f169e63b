"""Sessions of several schedules in turns on one rig, and the row of each: what every schedule bench is made of."""

import collections
import contextlib
import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from configs import overrides
from configs.schema import Config
from launch.tools.plan.sim.simulate import default_warmup
from tests.bench.harness.turns import in_turns
from tests.bench.rig.load import Steady, mean_running
from tests.bench.rig.rig import ACTOR, LEARNER_CORE, Result, Rig
from tests.bench.rig.session import Session
from tests.bench.rig.setting import tiny_model

ROUND_METRICS = (
    "rollout_to_train_end_s",
    "waiting_ratio",
    "waiting_ratio_eq4",
    "first_dispatch_s",
    "wait_s",
    "compute_s",
)
TURNS = 4
LAG_SHARES = ("0", "1", "2-3", "4-7", "8_up")


@contextlib.contextmanager
def open_rig(
    config: Config,
    *,
    actor_module: str = ACTOR,
    folder: str | None = None,
    num_engines: int = 1,
    learner_core: int = LEARNER_CORE,
) -> Generator[Rig]:
    """Starts the rig's processes with an engine of this config; its sessions are below `folder`, or on disk."""
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=folder) as root,
        Rig(
            pathlib.Path(root),
            config,
            tiny_model(),
            actor_module=actor_module,
            num_engines=num_engines,
            learner_core=learner_core,
        ) as rig,
    ):
        yield rig


def run_in_turns(
    rig: Rig, cases: Mapping[str, Session], *, turns: int = TURNS, passes_per_token: float | None = None
) -> dict[str, list[Result]]:
    """Runs all cases once per turn, in the order of `in_turns`, and returns each case's result per turn.

    The same turn of two cases is a pair (`estimates.ratio`). `passes_per_token` replaces the sessions' own.
    """
    found: dict[str, list[Result]] = collections.defaultdict(list)
    for _, name, speed in in_turns(list(cases), turns):
        session = cases[name]
        if passes_per_token is not None:
            session = dataclasses.replace(session, passes_per_token=passes_per_token)
        ran = rig.run(session)
        found[name].append(dataclasses.replace(ran, machine_speed=speed))
        print(
            f"{name}: {ran.span_s:.2f} s, {ran.tokens_per_s:.0f} tokens/s, max lag {ran.max_lag}, machine "
            f"{speed:.0f} MB/s",
            flush=True,
        )
    return {name: found[name] for name in cases}


def row_of(name: str, config: Config, results: Sequence[Result], **labels: Any) -> dict[str, Any]:
    """Returns what the sessions of a case came to: a list has a number per session, or per round; else it is a mean.

    `tokens_per_s` is of response tokens trained, which speed-ups are of. `engine_fill` is the sequences that the first
    engine runs over its places, from the end of the update with which the window has turned over twice (a round, by
    rounds) to the last update's. `lag_shares` are shares of trained tokens.
    """
    rounds, steps = [r for one in results for r in one.rounds], [s for one in results for s in one.steps]
    dropped: collections.Counter[str] = collections.Counter()
    for one in results:
        dropped.update(one.dropped)

    def mean(metric: str) -> float:
        return statistics.fmean(one.mean(metric) for one in results)

    return {
        "name": name,
        **labels,
        "seconds": [one.span_s for one in results],
        "machine_speed": [one.machine_speed for one in results],
        "num_skipped": results[0].num_skipped,
        "samples": sum(one.num_samples for one in results),
        "samples_per_s": [one.samples_per_s for one in results],
        "tokens_per_s": [one.tokens_per_s for one in results],
        "response_tokens": statistics.fmean(one.response_tokens for one in results),
        **{metric: [r[f"round/{metric}"] for r in rounds if f"round/{metric}" in r] for metric in ROUND_METRICS},
        "wait_share": sum(s["time/wait_s"] for s in steps) / sum(s["time/step_s"] for s in steps),
        "step_cpu_s": [s for one in results for s in one.step_cpu_s],
        "engine_fill": _engine_fill(config, results),
        "mean_lag": mean("lag/mean"),
        "max_lag": max(one.max_lag for one in results),
        "lag_shares": {share: mean(f"lag/fraction_{share}") for share in LAG_SHARES},
        "ess": mean("ess"),
        "mismatch_kl": mean("mismatch_kl_k3"),
        "pause_s": mean("actor/pause_s"),
        "dropped": dict(dropped),
    }


def measured(rows: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Config], names: Sequence[str]) -> list[dict]:
    """Returns the cases for the planner to predict (`tests.bench.planner.cases`): configurations, means of a row."""
    found = []
    for name, row in rows.items():
        numbers = {n: statistics.fmean(row[n]) if isinstance(row[n], list) else row[n] for n in names}
        config = json.loads(overrides.to_json(configs[name]))
        found.append({"name": name, "config": config, "measured": numbers | row.get("profile", {})})
    return found


def mean_of(row: Mapping[str, Any], metric: str) -> float:
    """Returns the mean of a row's numbers."""
    return statistics.fmean(row[metric])


def _engine_fill(config: Config, results: Sequence[Result]) -> float | None:
    """Returns None where the run is too short to have a steady state."""
    warmup = default_warmup(config)
    if config.run.num_updates <= warmup:
        return None
    running = [mean_running(one.running, Steady.of(one.events, warmup_updates=warmup)) for one in results]
    return statistics.fmean(running) / config.actor.max_num_seqs
