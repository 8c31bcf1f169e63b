"""The cases, what each of their runs showed, and what the page says of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.bench.real_model.watched import training_s
from tests.bench.rig import report

RECIPE = "arithmetic_smollm2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A preset with what is wanted of it."""

    preset: str
    minutes: float
    """Of training."""
    aim_gain: float


CASES = (
    Case(preset="pipelinerl", minutes=15, aim_gain=0.7),
    Case(preset="rolloutpipe", minutes=20, aim_gain=0.6),
)
AIM_PARITY = 1e-4
"""Nats; at which an actor of float32 is fenced, unless a run says otherwise."""

OVERRIDES: Mapping[str, object] = {
    "run.num_updates": 10_000,  # minutes end it
    "publish.probe_every_n_publishes": 1,
    # Nothing of it is used: neither a restart nor the memory of a save.
    "checkpoint.every_n_steps": 10_000,
    "checkpoint.on_stop": False,
}
"""What differs from the recipe."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the page says of one run; of its steps, those within the minutes."""

    preset: str
    seed: int
    held_out: list[tuple[int, float, float]]
    """Step, minutes of training, mean reward of each evaluation that ended within the minutes."""
    num_steps: int
    num_samples: int
    engine_tokens_per_s: float
    """Response tokens that were trained, a second of training: what the engine made beside the learner."""
    learner_tokens_per_s: float
    """Prompt and response tokens trained, a second of the learner's computing."""
    update_s: float
    """Of training, a step."""
    lag_mean: float
    ess: float
    pause_s: float
    num_probes: int
    max_abs_dlogprob: float
    """Largest |log pi of the engine - log pi of the learner| of any probe: after every publish."""
    learner_peak_bytes: float
    actor_peak_bytes: float
    wall_s: float

    @property
    def gain(self) -> float:
        return self.held_out[-1][2] - self.held_out[0][2]


def run_of(case: Case, seed: int, rows: list[dict[str, Any]], seen: Mapping[str, float]) -> Run:
    """From a run's metrics and what was seen of it.

    An evaluation counts if the newest weights that answered it were made within the minutes.
    """
    bound_s = case.minutes * 60
    until = training_s(rows)
    steps = [row for row in rows if row["kind"] == "step" and until[row["step"]] <= bound_s]
    evals = [row for row in rows if row["kind"] == "eval"]
    counted = [row for row in evals if until.get(int(row["eval/last_version"]), bound_s + 1) <= bound_s]
    probes = [row["parity/max_abs_dlogprob"] for row in rows if row["kind"] == "probe"]
    if len(counted) < 2 or not steps or not probes:
        raise RuntimeError(
            f"{case.preset}: {len(steps)} steps, {len(counted)} evaluations and {len(probes)} probes within "
            f"{case.minutes} minutes of training; wanted one, two and one at least"
        )
    total_s = until[steps[-1]["step"]]

    def mean(name: str) -> float:
        values = [row[name] for row in steps if row.get(name) is not None]
        return sum(values) / len(values) if values else float("nan")

    return Run(
        preset=case.preset,
        seed=seed,
        held_out=[(row["step"], until[int(row["eval/last_version"])] / 60, row["eval/reward"]) for row in counted],
        num_steps=len(steps),
        num_samples=round(sum(row["sequences"] for row in steps)),
        engine_tokens_per_s=sum(row["tokens"] for row in steps) / total_s,
        learner_tokens_per_s=sum(row["real_tokens"] for row in steps) / sum(row["time/train_s"] for row in steps),
        update_s=total_s / len(steps),
        lag_mean=mean("lag/mean"),
        ess=mean("ess"),
        pause_s=mean("actor/pause_s"),
        num_probes=len(probes),
        max_abs_dlogprob=max(probes),
        learner_peak_bytes=seen["learner_peak_bytes"],
        actor_peak_bytes=seen["actor_peak_bytes"],
        wall_s=seen["wall_s"],
    )


def table_of(runs: list[Run]) -> report.Table:
    """A line a run."""
    columns = ["preset", "seed", "start", "end", "gain", "by minute of training", "updates", "samples", "s an update"]
    columns += ["engine tokens/s", "learner tokens/s", "lag", "ESS", "pause, s", "probes", "max dlogprob, nats"]
    columns += ["learner GiB", "actor GiB", "wall, min"]
    lines = [
        [
            run.preset,
            str(run.seed),
            f"{run.held_out[0][2]:.3f}",
            f"{run.held_out[-1][2]:.3f}",
            f"{run.gain:+.3f}",
            ", ".join(f"{minute:.1f}: {reward:.2f}" for _, minute, reward in run.held_out),
            str(run.num_steps),
            str(run.num_samples),
            f"{run.update_s:.1f}",
            f"{run.engine_tokens_per_s:.1f}",
            f"{run.learner_tokens_per_s:.0f}",
            f"{run.lag_mean:.2f}",
            f"{run.ess:.3f}",
            f"{run.pause_s:.2f}",
            str(run.num_probes),
            f"{run.max_abs_dlogprob:.1e}",
            f"{run.learner_peak_bytes / 2**30:.2f}",
            f"{run.actor_peak_bytes / 2**30:.2f}",
            f"{run.wall_s / 60:.1f}",
        ]
        for run in runs
    ]
    return report.Table(columns=columns, rows=lines)


def values_of(runs: list[Run]) -> dict[str, float]:
    """Each preset's smallest gain over its seeds; the largest difference and the longest run of all."""
    presets = dict.fromkeys(run.preset for run in runs)
    return {
        **{f"gain_{preset}": min(run.gain for run in runs if run.preset == preset) for preset in presets},
        "max_abs_dlogprob": max(run.max_abs_dlogprob for run in runs),
        "wall_min": max(run.wall_s for run in runs) / 60,
    }


def aims_of(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """What was wanted."""
    gains = {f"gain_{case.preset}": case.aim_gain for case in CASES}
    return {
        **{key: report.Aim(value=values.get(key), aim=aim).to_json() for key, aim in gains.items()},
        "max_abs_dlogprob": report.Aim(value=values["max_abs_dlogprob"], aim=AIM_PARITY, at_least=False).to_json(),
    }
