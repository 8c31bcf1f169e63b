"""RolloutPipe's evaluation on the real system: serial, cgp and rolloutpipe on an engine and a learner, a core each.

    python -m tests.bench.overlap [--small]

R = 32, 64, 96 groups a round, K = 8, U = 2, two rounds of each. Response lengths are drawn beforehand from a
long-tailed distribution and are the same for all modes; a trained token costs the same real computation in all of them,
set so that `serial` waits half of its time, as in the paper (section 5.3). Writes `results/overlap.{json,md,png}`.

What the frontier brings depends on the engine. It keeps F_w K = 16 requests in service, so it can only gain on an
engine that would hold more, and only if that engine serves 16 about as fast as more of them: then others' requests slow
the next update's groups down, and holding them back costs nothing. On an engine that is faster the more it runs, they
cost it little, and holding them back leaves it idle. So there are three engines (`tests.bench.overlap.setups`):

* the real one with 8 places, fewer than 16: the frontier's second group fills what the first one's short responses
  leave;
* the real one with 32 places: on this machine its speed still rises from 16 to 32 sequences. `fgd_over_cgp_pct_R*` is
  of this one, and is held against the paper's least gain;
* a paced one with 32 places (`tests.bench.rig.paced_engine`; actor, store, bridge and learner are the real ones) whose
  speed rises up to 8 sequences and is constant from there on. That is what the paper's own numbers say of its engine:
  at R = 96 the round that 16 requests at most were in service for took 642 s, and the serial rollout, with all requests
  sent at once, 509 to 543 s, so 16 were served at 0.79 of the full speed or more (section 5.2). Fewer than 16 run while
  a group's last responses end, 11 or 12 on average; an engine proportional up to 16 would do 0.7, so it is constant
  from 8 on, the next power of two. It shows that the paper's gain follows from its engine; since that engine is made
  from the paper's numbers, `fgd_over_cgp_pct_paced_R*` has no aim.
"""

import dataclasses
import pathlib
import tempfile

from absl import app

from tests.bench.overlap import rows as of_rows
from tests.bench.overlap.figure import draw, round_timeline
from tests.bench.overlap.rows import SERIAL_WAIT, Row
from tests.bench.overlap.setups import FEW_PLACES, FLAT, LENGTHS, MANY_PLACES, MAX_RESPONSE, ROUNDS, SIZES, K, Setup, U
from tests.bench.rig import report
from tests.bench.rig.calibrate import Calibration, baseline_within, calibrate_passes
from tests.bench.rig.measure import limited, measure_profile
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.setting import tiny_model

Results = dict[tuple[str, str, int], Result]


def calibrate(rig: Rig, setup: Setup, groups: int) -> Calibration:
    """The training cost at which `serial` waits half of its time on an engine."""
    found = calibrate_passes(
        rig,
        lambda p: setup.session("serial", groups, passes_per_token=p),
        waiting_ratio=sum(SERIAL_WAIT) / 2,
    )
    print(f"{setup.name}: {1000 * found.passes_per_token:.1f} gradient passes per 1000 tokens", flush=True)
    return found


def measure(rig: Rig, setup: Setup, groups: int, passes_per_token: float) -> Results:
    """A session of each mode but `serial`, at one size."""
    found = {}
    for mode in (m for m in setup.modes if m != "serial"):
        result = found[setup.name, mode, groups] = rig.run(
            setup.session(mode, groups, passes_per_token=passes_per_token)
        )
        seconds = ", ".join(f"{r['round/rollout_to_train_end_s']:.2f}" for r in result.rounds)
        print(f"{setup.name}, R={groups} {mode}: {seconds} s", flush=True)
    return found


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    sizes = (8, 16) if report.SMALL.value else SIZES
    setups = (FEW_PLACES, MANY_PLACES, FLAT)
    with (
        tempfile.TemporaryDirectory(prefix="sluice-overlap-") as folder,
        Rig(pathlib.Path(folder), MANY_PLACES.config("serial", sizes[0]), tiny_model()) as rig,
    ):
        rig.run(FEW_PLACES.session("cgp", sizes[0], 1))  # compiles, warms up
        calibrations = {setup.name: calibrate(rig, setup, sizes[0]) for setup in setups}
        few = calibrations[FEW_PLACES.name]
        baseline = baseline_within(
            rig,
            {r: lambda p, r=r: FEW_PLACES.session("serial", r, passes_per_token=p) for r in sizes},
            passes_per_token=few.passes_per_token,
            bounds=SERIAL_WAIT,
        )
        passes = {name: c.passes_per_token for name, c in calibrations.items()}
        passes[FEW_PLACES.name] = baseline.passes_per_token
        results: Results = {(FEW_PLACES.name, "serial", r): one for r, one in baseline.results.items()}
        for groups in sizes:
            for setup in setups:
                results |= measure(rig, setup, groups, passes[setup.name])
        profiles = measure_profiles(rig, calibrations, sizes)
    rows = {
        (setup.name, mode, groups): Row.of(setup, mode, groups, results[setup.name, mode, groups])
        for setup in setups
        for groups in sizes
        for mode in setup.modes
    }
    values = of_rows.values_of(rows, sizes)
    few_results = [one for (name, *_), one in results.items() if name == FEW_PLACES.name]
    values["passes_per_micro_batch"] = sum(r.num_passes for r in few_results) / sum(
        r.num_micro_batches for r in few_results
    )
    values["serial_repeats"] = baseline.num_repeats
    timelines = {mode: round_timeline(results[FEW_PLACES.name, mode, sizes[0]]) for mode in FEW_PLACES.modes}
    folder = report.results_folder()
    if folder is not None:
        draw(folder / "overlap.png", rows, values, timelines)
    engine = profiles[MANY_PLACES.name]["engine"]
    speeds = dict(zip(engine["running"], engine["tokens_per_s"], strict=True))
    report.finish(
        "overlap",
        calibration=few,
        title="Overlap: serial, cgp and rolloutpipe on the real system",
        about=about(values, passes),
        table=of_rows.table_of(rows),
        remarks=[*baseline.remarks(SERIAL_WAIT), *of_rows.remarks_of(rows, values, sizes, speeds)],
        values=values,
        aims=of_rows.aims_of(values, sizes),
        data={
            "profile": profiles[FEW_PLACES.name],
            "profiles": profiles,
            "measured": [measured(row) for row in rows.values() if row.engine in profiles],
            "rows": [dataclasses.asdict(row) for row in rows.values()],
            "timelines": timelines,
        },
    )


def measure_profiles(rig: Rig, calibrations: dict[str, Calibration], sizes: tuple[int, ...]) -> dict[str, dict]:
    """The planner's input for each real engine, from its calibration; a paced one needs no prediction."""
    found: dict[str, dict] = {}
    engine = None
    for setup in (MANY_PLACES, FEW_PLACES):
        found[setup.name] = measure_profile(
            rig,
            setup.config("serial", sizes[0]),
            results=[calibrations[setup.name].result],
            lengths=LENGTHS,
            num_groups=ROUNDS * sizes[-1],
            engine=limited(engine, setup.max_num_seqs) if engine is not None else None,
        )
        engine = found[setup.name]["engine"]
    return found


def measured(row: Row) -> dict:
    """A row as the planner is asked to predict it."""
    setup = _named(row.engine)
    return report.measured(
        f"{row.mode}_R{row.groups}" + ("" if setup is FEW_PLACES else f", {row.engine}"),
        setup.config(row.mode, row.groups),
        rollout_to_train_end_s=row.mean_s,
        waiting_ratio=row.wait,
        waiting_ratio_eq4=report.mean_std(row.waiting_ratio_eq4)[0],
        first_dispatch_s=report.mean_std(row.first_dispatch_s)[0],
        profile=row.engine,
    )


def about(values: dict[str, float], passes: dict[str, float]) -> list[str]:
    """What was run, as paragraphs."""
    costs = ", ".join(f"{1000 * p:.1f} on {name}" for name, p in passes.items())
    return [
        f"`python -m tests.bench.overlap`: R groups a round, K = {K}, U = {U}, frontier width U, {ROUNDS} rounds of "
        "each; mean and sample standard deviation over rounds. Responses of the same lengths in every mode, lognormal "
        f"(median {LENGTHS.median:.0f} tokens, sigma {LENGTHS.prompt_sigma} between prompts and "
        f"{LENGTHS.sample_sigma} within one, at most {MAX_RESPONSE}). Training cost, in gradient passes per 1000 "
        f"tokens, set on each engine so that `serial` waits half of its time: {costs} "
        f"({values['passes_per_micro_batch']:.1f} a micro-batch on the first).",
        "Three engines, since a frontier of F_w K = 16 requests can gain only on an engine that would hold more and "
        "serves 16 as fast: the real one with 8 places, the real one with 32, and a paced one with 32 whose speed is "
        "constant from 8 sequences on, as the paper's own numbers have it (`tests/bench/overlap/__main__.py` says "
        "from which). `fgd_over_cgp_pct_R*` is of the real one with 32 places and is held against the paper's least "
        "gain; `fgd_over_cgp_pct_paced_R*` is of the paced one, and made from the paper's numbers it has no aim.",
    ]


def _named(name: str) -> Setup:
    return {setup.name: setup for setup in (FEW_PLACES, MANY_PLACES, FLAT)}[name]


if __name__ == "__main__":
    app.run(main)
