"""ROLL Flash's async ratio on the real system: alpha in {0, 1, 2, 4, 8} against `serial`, rollout the bottleneck.

    python -m tests.bench.async_ratio [--small]

Two measurements for each alpha and for `serial` with one update a round (R = U), what a synchronous system does:

* throughput and lag: replayed long-tailed lengths, and training at the tiny model's own cost, which is a fraction of
  the rollout's: most of a synchronous step is a few long responses;
* reward reached: the real tiny task with its real verifier and natural lengths, the same number of samples for all;
  held-out reward before and after. Responses are a few tokens long there, so its times say nothing.

Publishing every step; running requests are aborted and resumed (section 4 of the paper). Writes
`results/async_ratio.{json,md,png}`.
"""

import dataclasses
import pathlib
import tempfile
from typing import Any

from absl import app

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from tests.bench.rig import report
from tests.bench.rig.figures import bars
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.measure import measure_profile
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session
from tests.bench.rig.setting import TRUNCATED, make_config, tiny_model

ALPHAS = (0, 1, 2, 4, 8)
SERIAL = "serial"
K, U = 8, 8
MAX_NUM_SEQS = 64
MAX_RESPONSE = 256
LENGTHS = Lengths(kind="lognormal", max_tokens=MAX_RESPONSE, median=20, prompt_sigma=0.8, sample_sigma=0.8)
AIM = 2.24
"""ROLL Flash on RLVR tasks, against a synchronous baseline on as many GPUs."""
TASK_RESPONSE, TASK_LEARNING_RATE, NUM_EVAL_PROBLEMS = 6, 4e-4, 256
LAG_SHARES = ("lag/fraction_0", "lag/fraction_1", "lag/fraction_2-3", "lag/fraction_4-7", "lag/fraction_8_up")


def config_of(name: str, num_updates: int, *, task: bool) -> Config:
    """A run of `serial` or of an alpha (its number as text): of the real task, or for throughput."""
    if name == SERIAL:
        admission, publish = AdmissionConfig(policy="fifo"), PublishConfig(when="round_end")
    else:
        admission = AdmissionConfig(policy="window", async_ratio=float(name))
        publish = PublishConfig(when="every", at_publish="abort_and_resume")
    return make_config(
        name if name == SERIAL else "roll_flash",
        num_updates=num_updates,
        rounds=RoundsConfig(
            groups_per_round=U,
            samples_per_group=K,
            groups_per_update=U,
            train_start="round_complete" if name == SERIAL else "group_ready",
        ),
        admission=admission,
        publish=publish,
        max_response_tokens=TASK_RESPONSE if task else MAX_RESPONSE,
        max_tokens=MAX_RESPONSE + 24,  # one engine for both
        max_num_seqs=MAX_NUM_SEQS,
        packing=PackingConfig(rows=4, row_tokens=320),
        loss=TRUNCATED,
        **({"learning_rate": TASK_LEARNING_RATE, "num_eval_problems": NUM_EVAL_PROBLEMS} if task else {}),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """`serial` or an alpha."""

    samples_per_s: list[float]
    tokens_per_s: list[float]
    """Response tokens trained."""
    mean_length: float
    """Of the trained responses, in tokens."""
    lag_mean: float
    lag_max: int
    lag_shares: dict[str, float]
    wait_share: float
    """Of the time, what the learner waited."""
    dropped: dict[str, int]
    reward_start: float
    reward_end: float

    @classmethod
    def of(cls, speed: list[Result], task: Result) -> "Row":
        def mean(name: str) -> float:
            return report.mean_std([r.mean(name) for r in speed])[0]

        dropped: dict[str, int] = {}
        for one in speed:
            for reason, count in one.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        steps = [row for r in speed for row in r.steps]
        return cls(
            samples_per_s=[r.samples_per_s for r in speed],
            tokens_per_s=[r.tokens_per_s for r in speed],
            mean_length=report.mean_std([r.response_tokens for r in speed])[0],
            lag_mean=mean("lag/mean"),
            lag_max=max(r.max_lag for r in speed),
            lag_shares={name.removeprefix("lag/fraction_"): mean(name) for name in LAG_SHARES},
            wait_share=sum(s["time/wait_s"] for s in steps) / sum(s["time/step_s"] for s in steps),
            dropped=dropped,
            reward_start=task.evals[0]["eval/reward"],
            reward_end=task.evals[-1]["eval/reward"],
        )

    @property
    def rate(self) -> float:
        """Response tokens trained a second, which speed-ups are of (`Result.tokens_per_s`)."""
        return report.mean_std(self.tokens_per_s)[0]

    @property
    def sample_rate(self) -> float:
        """Samples trained a second."""
        return report.mean_std(self.samples_per_s)[0]


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = report.SMALL.value
    names = [SERIAL, *(str(a) for a in (ALPHAS[:2] if small else ALPHAS))]
    num_updates, task_updates, passes_over = (6, 6, 1) if small else (30, 80, 2)
    speed: dict[str, list[Result]] = {name: [] for name in names}
    task: dict[str, Result] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sluice-async-") as folder,
        Rig(pathlib.Path(folder), config_of(SERIAL, 1, task=False), tiny_model()) as rig,
    ):
        rig.run(Session(config=config_of("0", 2, task=False), lengths=LENGTHS))  # compiles, warms up
        # What the planner may know: sessions of their own, warm, of both ways to train.
        costs = [rig.run(Session(config=config_of(n, 6, task=False), lengths=LENGTHS)) for n in (SERIAL, "1")]
        for _ in range(passes_over):
            for name in names:
                result = rig.run(Session(config=config_of(name, num_updates, task=False), lengths=LENGTHS))
                speed[name].append(result)
                print(f"alpha {name}: {result.tokens_per_s:.0f} tokens/s, max lag {result.max_lag}", flush=True)
        profile = measure_profile(
            rig,
            config_of(SERIAL, 1, task=False),
            results=costs,
            lengths=LENGTHS,
            num_groups=(num_updates + 2 + max(ALPHAS)) * U,
        )
        for name in names:
            task[name] = rig.run(Session(config=config_of(name, task_updates, task=True), rewards="task"))
            rewards = [row["eval/reward"] for row in task[name].evals]
            print(f"alpha {name}: held-out reward {rewards[0]:.3f} -> {rewards[-1]:.3f}", flush=True)
    rows = {name: Row.of(speed[name], task[name]) for name in names}
    values = values_of(rows)
    folder = report.results_folder()
    if folder is not None:
        draw(folder / "async_ratio.png", rows)
    best = values["best_speedup"]
    report.finish(
        "async_ratio",
        title="The async ratio against synchronous training",
        about=[
            f"`python -m tests.bench.async_ratio`: K = {K}, U = {U}, an engine of {MAX_NUM_SEQS} sequences; `serial` "
            f"has one update a round. Throughput: {passes_over} runs of {num_updates} updates each, lognormal lengths "
            f"(median {LENGTHS.median:.0f}, sigma {LENGTHS.prompt_sigma} between prompts and {LENGTHS.sample_sigma} "
            f"within, at most {MAX_RESPONSE}). Reward: the tiny task with its verifier, {task_updates} updates of "
            f"{U * K} samples, {NUM_EVAL_PROBLEMS} held-out problems (a value's standard error is about 0.03)."
        ],
        table=table_of(rows),
        remarks=[
            f"Best speed-up {best:.2f}. A synchronous step ends with its longest response while most places of the "
            "engine are empty; from alpha = 1 on, the next update's groups fill them. Beyond the alpha at which the "
            "engine is always full, more of it only adds lag. Rates and speed-ups are of response tokens trained a "
            "second: a run ends with groups in progress, more of them the larger alpha, and those are the long ones. A "
            "lag is of a token, from the step of the weights behind it to the step that trains it."
        ],
        values=values,
        aims={"best_speedup": report.Aim(value=best, aim=AIM).to_json()},
        data={
            "profile": profile,
            "measured": [
                report.measured(
                    f"alpha_{name}",
                    config_of(name, num_updates, task=False),
                    tokens_per_s=row.rate,
                    samples_per_s=row.sample_rate,
                    lag_mean=row.lag_mean,
                    lag_max=row.lag_max,
                )
                for name, row in rows.items()
            ],
            "rows": {name: dataclasses.asdict(row) for name, row in rows.items()},
        },
    )


def values_of(rows: dict[str, Row]) -> dict[str, Any]:
    """Everything compared, flat."""
    serial = rows[SERIAL]
    values: dict[str, Any] = {
        "tokens_per_s_serial": serial.rate,
        "samples_per_s_serial": serial.sample_rate,
        "reward_end_serial": serial.reward_end,
    }
    for name, row in rows.items():
        if name != SERIAL:
            values |= {
                f"speedup_alpha_{name}": row.rate / serial.rate,
                f"samples_speedup_alpha_{name}": row.sample_rate / serial.sample_rate,
                f"mean_length_alpha_{name}": row.mean_length,
                f"lag_mean_alpha_{name}": row.lag_mean,
                f"lag_max_alpha_{name}": row.lag_max,
                f"reward_end_alpha_{name}": row.reward_end,
            }
    values["best_speedup"] = max(v for k, v in values.items() if k.startswith("speedup_"))
    return values


def table_of(rows: dict[str, Row]) -> report.Table:
    lines = []
    for name, row in rows.items():
        (mean, std), (samples, _) = report.mean_std(row.tokens_per_s), report.mean_std(row.samples_per_s)
        shares = " / ".join(f"{100 * share:.0f}" for share in row.lag_shares.values())
        dropped = ", ".join(f"{count} {reason}" for reason, count in row.dropped.items()) or "0"
        speedup = row.rate / rows[SERIAL].rate
        cells = [f"{mean:.0f} ± {std:.0f}", f"{speedup:.2f}", f"{samples:.1f}", f"{row.mean_length:.1f}"]
        cells += [f"{row.lag_mean:.2f}", f"{row.lag_max}"]
        label = name if name == SERIAL else f"alpha = {name}"
        reward = f"{row.reward_start:.3f} -> {row.reward_end:.3f}"
        lines.append([label, *cells, shares, f"{row.wait_share:.2f}", dropped, reward])
    columns = [
        "",
        "tokens/s",
        "speed-up",
        "samples/s",
        "mean length",
        "mean lag",
        "max lag",
        "% of tokens at lag 0 / 1 / 2-3 / 4-7 / 8+",
    ]
    return report.Table(columns=[*columns, "learner waits", "groups dropped", "held-out reward"], rows=lines)


def draw(file: pathlib.Path, rows: dict[str, Row]) -> None:
    """Writes the PNG."""
    names = list(rows)
    panels = {
        "response tokens trained a second": [report.mean_std(rows[n].tokens_per_s) for n in names],
        "mean lag, steps": [(rows[n].lag_mean, 0.0) for n in names],
        "held-out reward at the end": [(rows[n].reward_end, 0.0) for n in names],
    }
    bars(file, [n if n == SERIAL else f"α = {n}" for n in names], panels)


if __name__ == "__main__":
    app.run(main)
