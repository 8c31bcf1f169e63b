"""RollPacker's tail batching and its parts on the real system, against `serial`.

    python -m tests.bench.tail [--small]

Lengths have the paper's shape (section 2.2): most prompts' responses are all short, some prompts' are all long, and a
few responses stray; the maximum is 8, 16 and 32 times the 75th percentile. R = U: one update a round. Ten rounds of
each variant, two full periods of four short rounds and a long one at eta = 1.25 (Figure 4), so all train the same
number of samples, on one engine and one learner. A trained token costs the same everywhere, set so that `serial`
spends three quarters of its time on rollout.

Writes `results/tail.{json,md,png}`.
"""

import dataclasses
import pathlib
import statistics
import tempfile

from absl import app

from configs.schema import Config
from configs.sections import PackingConfig, RoundsConfig
from tests.bench.rig import report
from tests.bench.rig.calibrate import calibrate_passes
from tests.bench.rig.figures import COLORS, pyplot
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.measure import measure_profile
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config, tiny_model

K, R = 4, 8
"""Small enough that the engine's step takes about as long for a short round's requests as for a few long ones: on this
core 4.0 ms for one sequence, 5.0 for 32, 6.7 for 64. On a GPU decoding is bound by memory at the paper's sizes, and a
step hardly depends on how many run."""
ETA = 1.25
MAX_NUM_SEQS = 56
"""Room for a short round's eta^2 R K = 50 requests at once: tail batching wants them to race."""
MAX_RESPONSE = 448
VARIANTS = {
    # eta_P, eta_R, train_start
    "serial": (1.0, 1.0, "round_complete"),
    "prompts only": (ETA, 1.0, "round_complete"),
    "samples only": (1.0, ETA, "round_complete"),
    "tail batching": (ETA, ETA, "round_complete"),
    "tail batching, streamed": (ETA, ETA, "group_ready"),
}
AIMS = {8: 1.30, 16: 1.48, 32: 2.21}
"""Table 2 of the paper, the row of tail batching alone."""
WAITING_RATIO = 0.75
"""Of `serial` at 16: the share of a synchronous step that is rollout."""


def lengths_of(ratio: int) -> Lengths:
    return Lengths(
        kind="tail", max_tokens=MAX_RESPONSE, max_over_p75=ratio, long_prompts=0.1, stray_samples=0.03, sample_sigma=0.3
    )


def config_of(variant: str, num_rounds: int) -> Config:
    eta_prompts, eta_samples, train_start = VARIANTS[variant]
    return make_config(
        variant,
        num_updates=num_rounds,
        rounds=RoundsConfig(
            groups_per_round=R,
            samples_per_group=K,
            groups_per_update=R,
            train_start=train_start,  # pyright: ignore[reportArgumentType]
            overprovision_prompts=eta_prompts,
            overprovision_samples=eta_samples,
        ),
        max_response_tokens=MAX_RESPONSE,
        max_num_seqs=MAX_NUM_SEQS,
        packing=PackingConfig(rows=1, row_tokens=512),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A variant at a ratio, over its sessions."""

    seconds: list[float]
    """Of a session's rounds, from the first tickets to the last step."""
    round_s: list[float]
    response_tokens: float
    """Mean trained length."""
    waiting_ratio: float
    num_samples: int

    @classmethod
    def of(cls, results: list[Result]) -> "Row":
        rounds = [row for r in results for row in r.rounds]
        return cls(
            seconds=[r.span_s for r in results],
            round_s=[row["round/rollout_to_train_end_s"] for row in rounds],
            response_tokens=statistics.fmean(r.response_tokens for r in results),
            waiting_ratio=statistics.fmean(row["round/waiting_ratio"] for row in rounds),
            num_samples=sum(r.num_samples for r in results),
        )

    @property
    def mean_s(self) -> float:
        return report.mean_std(self.seconds)[0]


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = report.SMALL.value
    ratios, num_rounds, passes_over = ((16,), 5, 1) if small else ((8, 16, 32), 10, 2)
    results: dict[tuple[int, str], list[Result]] = {(x, v): [] for x in ratios for v in VARIANTS}
    population: dict[int, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sluice-tail-") as folder,
        Rig(pathlib.Path(folder), config_of("serial", 1), tiny_model()) as rig,
    ):
        rig.run(Session(config=config_of("serial", 1), lengths=lengths_of(32)))  # compiles, warms up
        calibrated = calibrate_passes(
            rig,
            lambda p: Session(config=config_of("serial", 3), lengths=lengths_of(16), passes_per_token=p),
            waiting_ratio=WAITING_RATIO,
            tolerance=0.03,
            tries=2,
        )
        passes = calibrated.passes_per_token
        print(f"gradient passes per 1000 tokens: {1000 * passes:.1f}", flush=True)
        for _ in range(passes_over):
            for ratio, variant in results:
                session = Session(
                    config=config_of(variant, num_rounds), lengths=lengths_of(ratio), passes_per_token=passes
                )
                result = rig.run(session)
                results[ratio, variant].append(result)
                print(f"{ratio}x {variant}: {result.span_s:.2f} s", flush=True)
        profiles = {}
        for ratio in ratios:
            profile = measure_profile(
                rig,
                config_of("tail batching", num_rounds),
                results=[calibrated.result],
                lengths=lengths_of(ratio),
                num_groups=2 * num_rounds * R,
                engine=next(iter(profiles.values()))["engine"] if profiles else None,
            )
            profiles[ratio] = profile
            # Of the prompts that serial trained: K responses each.
            trained = profile["response_tokens"]["groups"][: num_rounds * R]
            population[ratio] = statistics.fmean(length for group in trained for length in group[:K])
    rows = {key: Row.of(of_one) for key, of_one in results.items()}
    values = values_of(rows, population)
    keys = {8: "speedup_8x", 16: "speedup_16x", 32: "speedup_32x"}
    folder = report.results_folder()
    if folder is not None:
        draw(folder / "tail.png", rows)
    report.finish(
        "tail",
        calibration=calibrated,
        title="Tail batching and its parts against synchronous training",
        about=[
            f"`python -m tests.bench.tail`: R = U = {R}, K = {K}, eta = {ETA}, an engine of {MAX_NUM_SEQS} sequences, "
            f"responses of at most {MAX_RESPONSE} tokens. {passes_over} runs of {num_rounds} rounds each (two periods "
            "of four short rounds and a long one); all variants train the same number of samples. Training cost "
            f"{1000 * passes:.1f} gradient passes per 1000 tokens, set so that `serial` waits "
            f"{100 * WAITING_RATIO:.0f}% at 16x."
        ],
        table=table_of(rows, population),
        remarks=[
            "Length bias is the mean trained length over the mean of the prompts' K responses each. Racing samples "
            "drops the longest of a prompt's responses for good; racing prompts only moves prompts to a later round, "
            "so over whole periods it drops none. `streamed` computes gradients while the round still runs, with "
            "one step at its end, on the learner's own core; RollPacker's stream trainer, which gives engines up to "
            "them, is not built.",
            what_bounds(rows[ratios[-1], "serial"], rows[ratios[-1], "tail batching"]),
        ],
        values=values,
        aims={keys[x]: report.Aim(value=values[keys[x]], aim=AIMS[x]).to_json() for x in ratios},
        data={
            "profile": profiles[ratios[0]],
            "profiles": {f"{x}x": p for x, p in profiles.items()},
            "measured": [
                report.measured(
                    f"{variant}, {ratio}x",
                    config_of(variant, num_rounds),
                    seconds=row.mean_s,
                    seconds_per_round=report.mean_std(row.round_s)[0],
                    response_tokens=row.response_tokens,
                    profile=f"{ratio}x",
                )
                for (ratio, variant), row in rows.items()
            ],
            "rows": {f"{variant}, {ratio}x": dataclasses.asdict(row) for (ratio, variant), row in rows.items()},
        },
    )


def what_bounds(serial: Row, tail: Row) -> str:
    """What is left of the time under tail batching, from the rounds at the largest ratio."""
    usual, short, long = statistics.median(serial.round_s), statistics.median(tail.round_s), max(tail.round_s)
    return (
        f"What bounds it at the largest ratio: a short round takes {short:.2f} s, {usual / short:.1f} times less than "
        f"serial's {usual:.2f} s, but a long one {long:.2f} s, {long / usual:.1f} times more. All of its responses are "
        "long, where serial's batch has a few, so it has most of the period's tokens to decode and to train, on one "
        "core each. RollPacker's long rounds take about as long as a baseline's (section 6.2), since decoding is bound "
        "by memory and training has many GPUs; with that, these rounds' times would give "
        f"{5 * usual / (4 * short + usual):.1f}."
    )


def values_of(rows: dict[tuple[int, str], Row], population: dict[int, float]) -> dict[str, float]:
    """Everything compared, flat."""
    suffixes = {
        "prompts only": "_prompts_only",
        "samples only": "_samples_only",
        "tail batching": "",
        "tail batching, streamed": "_streamed",
    }
    values = {}
    for ratio in population:
        serial = rows[ratio, "serial"]
        for variant, suffix in suffixes.items():
            row = rows[ratio, variant]
            values[f"speedup_{ratio}x{suffix}"] = serial.mean_s / row.mean_s
            values[f"length_bias_{ratio}x{suffix}"] = row.response_tokens / population[ratio]
    return values


def table_of(rows: dict[tuple[int, str], Row], population: dict[int, float]) -> report.Table:
    lines = []
    for (ratio, variant), row in rows.items():
        mean, std = report.mean_std(row.seconds)
        speedup = rows[ratio, "serial"].mean_s / mean
        bias = row.response_tokens / population[ratio]
        cells = [f"{mean:.2f} ± {std:.2f}", f"{speedup:.2f}", f"{statistics.median(row.round_s):.2f}"]
        cells += [f"{max(row.round_s):.2f}", f"{row.waiting_ratio:.2f}", f"{row.response_tokens:.1f}", f"{bias:.3f}"]
        lines.append([f"{ratio}x", variant, *cells, str(row.num_samples)])
    columns = ["max / P75", "variant", "seconds", "speed-up", "median round, s", "longest round, s", "learner waits"]
    return report.Table(columns=[*columns, "mean trained length", "length bias", "samples trained"], rows=lines)


def draw(file: pathlib.Path, rows: dict[tuple[int, str], Row]) -> None:
    """Writes the PNG: speed-ups by ratio, and each variant's rounds one after the other at the largest ratio."""
    plt = pyplot()
    ratios = sorted({ratio for ratio, _ in rows})
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for n, variant in enumerate(VARIANTS):
        speedups = [rows[x, "serial"].mean_s / rows[x, variant].mean_s for x in ratios]
        left.bar([i + (n - 2) * 0.17 for i in range(len(ratios))], speedups, 0.16, label=variant, color=COLORS[n])
        rounds = rows[ratios[-1], variant].round_s
        right.plot(range(1, len(rounds) + 1), rounds, marker=".", label=variant, color=COLORS[n])
    left.set_xticks(range(len(ratios)), [f"max / P75 = {x}" for x in ratios])
    left.set_ylabel("speed-up over serial")
    left.legend(frameon=False, fontsize=7)
    right.set_xlabel(f"round (max / P75 = {ratios[-1]})")
    right.set_ylabel("seconds")
    fig.savefig(file, dpi=130)
    plt.close(fig)


if __name__ == "__main__":
    app.run(main)
