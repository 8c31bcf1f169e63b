"""RollPacker's tail batching and its parts on the real system, against synchronous training.

    python -m tests.bench.tail [--small]

Lengths have the paper's shape (section 2.2): most prompts' responses are all short, some prompts' are all long, and a
few responses stray; the maximum is 8, 16 and 32 times the 75th percentile. R = U = 16, K = 8: one update a round, and
races large enough to pay (with a flat engine and free training they could give 4.2 at 32x; R = 8, K = 4 at most 2.15).
Ten rounds of each variant, two full periods of four short rounds and a long one at eta = 1.25 (Figure 4), so all train
the same number of samples, on one engine and one learner. A trained token costs the same everywhere, set so that
`serial` spends three quarters of its time on rollout. At each ratio the variants take turns, four of each, every second
turn in reverse order; a speed-up is the mean of the turns' ratios.

`speedup` compares samples/s, `tokens_speedup` response tokens trained/s: racing samples drops long responses, so the
same number of samples has fewer tokens.

Length bias is the mean trained length over the mean of the prompts' K responses each. Racing samples drops the longest
of a prompt's responses for good; racing prompts only moves prompts to a later round, so over whole periods it drops
none. `streamed` computes gradients while the round still runs, with one step at its end, on the learner's own core;
RollPacker's stream trainer, which gives engines up to them, has a bench of its own (`tests.bench.stream_trainer`).

A long round has only long responses, where serial's batch has a few, so it has most of the period's tokens to decode
and to train, on one core each. RollPacker's long rounds take about as long as a baseline's (section 6.2), since
decoding is bound by memory and training has many GPUs; the note below says what that would give.
"""

import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from absl import app

from configs.schema import Config
from configs.sections import PackingConfig, RoundsConfig
from tests.bench.harness import result, sessions
from tests.bench.harness.estimates import ratio
from tests.bench.harness.figure import COLORS, pyplot
from tests.bench.planner.measure import measure_profile
from tests.bench.rig.calibrate import calibrate
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.rig import Result
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config

K, R = 8, 16
ETA = 1.25
MAX_NUM_SEQS = 200
"""Room for a short round's eta^2 R K = 200 requests at once: tail batching wants them to race."""
MAX_RESPONSE = 448
VARIANTS = {
    # key suffix, eta_P, eta_R, train_start
    "serial": ("", 1.0, 1.0, "round_complete"),
    "prompts only": ("_prompts_only", ETA, 1.0, "round_complete"),
    "samples only": ("_samples_only", 1.0, ETA, "round_complete"),
    "tail batching": ("", ETA, ETA, "round_complete"),
    "tail batching, streamed": ("_streamed", ETA, ETA, "group_ready"),
}
AIMS = {8: 1.30, 16: 1.48, 32: 2.21}
WAITING_RATIO = (0.72, 0.78)
"""Of `serial` at 16: the share of a synchronous step that is rollout."""
COLUMNS = {
    "max / P75": "{ratio}x",
    "variant": "{variant}",
    "seconds": "{seconds:.2f}",
    "speed-up": "{speedup:.2f}",
    "speed-up in tokens": "{tokens_speedup:.2f}",
    "median round, s": "{median_round_s:.2f}",
    "longest round, s": "{longest_round_s:.2f}",
    "learner waits": "{waiting_ratio:.2f}",
    "mean trained length": "{response_tokens:.1f}",
    "length bias": "{length_bias:.3f}",
    "samples trained": "{samples}",
}


def lengths_of(max_over_p75: int) -> Lengths:
    return Lengths(
        kind="tail",
        max_tokens=MAX_RESPONSE,
        max_over_p75=max_over_p75,
        long_prompts=0.1,
        stray_samples=0.03,
        sample_sigma=0.3,
    )


def config_of(variant: str, num_rounds: int) -> Config:
    _, eta_prompts, eta_samples, train_start = VARIANTS[variant]
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


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    ratios, num_rounds, turns = ((16,), 5, 1) if result.SMALL.value else ((8, 16, 32), 10, sessions.TURNS)
    keys = {f"{variant}, {x}x": (variant, x) for x in ratios for variant in VARIANTS}
    cases = {name: Session(config=config_of(v, num_rounds), lengths=lengths_of(x)) for name, (v, x) in keys.items()}
    found: dict[str, list[Result]] = {}
    with sessions.open_rig(config_of("serial", 1)) as rig:
        rig.run(Session(config=config_of("serial", 1), lengths=lengths_of(32)))  # compiles, warms up
        serial = Session(config=config_of("serial", 3), lengths=lengths_of(16))
        calibration = calibrate(rig, {"serial": serial}, bounds=WAITING_RATIO, tries=3)
        for x in ratios:
            of_ratio = {name: case for name, case in cases.items() if keys[name][1] == x}
            found |= sessions.run_in_turns(rig, of_ratio, turns=turns, passes_per_token=calibration.passes_per_token)
        profiles: dict[str, Any] = {}
        for x in ratios:
            profiles[f"{x}x"] = measure_profile(
                rig,
                config_of("tail batching", num_rounds),
                results=list(calibration.results.values()),
                lengths=lengths_of(x),
                num_groups=2 * num_rounds * R,
                engine=next(iter(profiles.values()))["engine"] if profiles else None,
            )
    rows: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, (variant, x) in keys.items():
        row = sessions.row_of(name, cases[name].config, found[name], variant=variant, ratio=x)
        rows[name] = row
        # Of the prompts that serial trained: K responses each.
        trained = profiles[f"{x}x"]["response_tokens"]["groups"][: num_rounds * R]
        rounds_s = row["rollout_to_train_end_s"]
        serial_row = rows[f"serial, {x}x"]
        speedup = ratio(serial_row["seconds"], row["seconds"])
        tokens_speedup = ratio(row["tokens_per_s"], serial_row["tokens_per_s"])
        row |= {
            "speedup": speedup.value,
            "tokens_speedup": tokens_speedup.value,
            "length_bias": row["response_tokens"] / statistics.fmean(n for group in trained for n in group[:K]),
            "median_round_s": statistics.median(rounds_s),
            "longest_round_s": max(rounds_s),
            "seconds_per_round": statistics.fmean(rounds_s),
            "profile": {"profile": f"{x}x"},
        }
        if variant != "serial":
            suffix = VARIANTS[variant][0]
            values |= {
                f"speedup_{x}x{suffix}": speedup,
                f"tokens_speedup_{x}x{suffix}": tokens_speedup,
                f"length_bias_{x}x{suffix}": row["length_bias"],
            }
    if (folder := result.results_folder()) is not None:
        draw(folder / "tail.png", rows, ratios)
    numbers = ("seconds", "seconds_per_round", "response_tokens")
    result.finish(
        "tail",
        __doc__,
        values=values | calibration.values(),
        aims={
            f"tokens_speedup_{x}x": result.at_least(AIMS[x], "RollPacker, Table 2, tail batching alone") for x in ratios
        }
        | {
            f"tokens_speedup_{x}x_streamed": result.at_least(2.56, "RollPacker, Table 2, all parts")
            for x in (32,)
            if x in ratios
        },
        rows=list(rows.values()),
        columns=COLUMNS,
        notes=[
            *calibration.notes(),
            what_bounds(rows[f"serial, {ratios[-1]}x"], rows[f"tail batching, {ratios[-1]}x"]),
        ],
        figure=True,
        profile=next(iter(profiles.values())),
        profiles=profiles,
        measured=sessions.measured(rows, {name: case.config for name, case in cases.items()}, numbers),
    )


def what_bounds(serial: Mapping[str, Any], tail: Mapping[str, Any]) -> str:
    """Returns what is left of the time under tail batching, and what long rounds as short as serial's would give."""
    usual, short, long = serial["median_round_s"], tail["median_round_s"], tail["longest_round_s"]
    return (
        f"At {tail['ratio']}x a short round takes {short:.2f} s, {usual / short:.1f} times less than serial's "
        f"{usual:.2f} s, and a long one {long:.2f} s, {long / usual:.1f} times more. Were it as long as serial's, the "
        f"speed-up would be {5 * usual / (4 * short + usual):.1f}."
    )


def draw(file: pathlib.Path, rows: Mapping[str, Mapping[str, Any]], ratios: tuple[int, ...]) -> None:
    """Writes speed-ups by ratio, and each variant's rounds one after the other at the largest ratio."""
    plt = pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for n, variant in enumerate(VARIANTS):
        speedups = [rows[f"{variant}, {x}x"]["speedup"] for x in ratios]
        left.bar([i + (n - 2) * 0.17 for i in range(len(ratios))], speedups, 0.16, label=variant, color=COLORS[n])
        rounds_s = rows[f"{variant}, {ratios[-1]}x"]["rollout_to_train_end_s"]
        right.plot(range(1, len(rounds_s) + 1), rounds_s, marker=".", label=variant, color=COLORS[n])
    left.set_xticks(range(len(ratios)), [f"max / P75 = {x}" for x in ratios])
    left.set_ylabel("speed-up over serial")
    right.set_xlabel(f"round (max / P75 = {ratios[-1]})")
    right.set_ylabel("seconds")
    fig.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=len(VARIANTS), frameon=False)
    fig.savefig(file, dpi=130)
    plt.close(fig)


if __name__ == "__main__":
    app.run(main)
