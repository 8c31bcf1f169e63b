"""PipelineRL against conventional RL at the same maximum lag, on the real system.

    python -m tests.bench.inflight [--small]

`pipelinerl` publishes after every step while requests run on (section 4 of the paper), once with the running requests'
KV cache kept and once with it recomputed. Its largest lag, g, is measured first, by a run of its own. Conventional RL
then takes G = g + 1 steps on each round of G U groups (`serial`), whose last update trains at lag G - 1 = g too. All
sample the same uniform lengths from 1 to the maximum (appendix A), on one engine and one learner of their own, at a
training cost at which a conventional round generates about as long as it trains: the paper's plan, too.

The paper's conventional RL gives every GPU to generation and then every GPU to training; here either side stands still
while the other works, as in any system with engines and learner apart. Writes `results/inflight.{json,md,png}`.
"""

import dataclasses
import math
import pathlib
import tempfile

from absl import app

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from launch.tools.plan.sim.simulate import default_warmup
from tests.bench.rig import report
from tests.bench.rig.calibrate import calibrate_passes
from tests.bench.rig.figures import bars
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.load import LOOK_S, Steady, mean_running
from tests.bench.rig.measure import measure_profile
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session
from tests.bench.rig.setting import TRUNCATED, make_config, tiny_model

K, U = 8, 4
MAX_NUM_SEQS = 32
ADMISSION = AdmissionConfig(policy="window", sequences=32)
"""pipelinerl's window: H is what the engine runs at once."""
MAX_RESPONSE = 128
LENGTHS = Lengths(kind="uniform", max_tokens=MAX_RESPONSE)
LEARNING_RATE = 2e-4
"""High enough that the policy moves and an old token is off policy; rewards are noise here."""
AIM = 1.57
"""PipelineRL, appendix A.4: 16.9 against 10.7 at g_max ~ 133."""
AIM_FILL = 0.95
"""Of the engine's places, mean over the steady state: Algorithm 2 keeps H sequences in progress, here its 32."""
KEEP, RECOMPUTE, CONVENTIONAL = "pipelinerl", "pipelinerl, KV recomputed", "conventional"


def pipelinerl(num_updates: int, *, recompute: bool) -> Config:
    return make_config(
        "pipelinerl",
        num_updates=num_updates,
        rounds=RoundsConfig(groups_per_round=U, samples_per_group=K, groups_per_update=U),
        admission=ADMISSION,
        publish=PublishConfig(when="every", kv_cache="recompute" if recompute else "keep"),
        **_shared(),
    )


def conventional(num_updates: int, steps_per_round: int) -> Config:
    """`serial` with G steps a round, for at least `num_updates` updates in whole rounds."""
    num_rounds = math.ceil(num_updates / steps_per_round)
    return make_config(
        "serial",
        num_updates=num_rounds * steps_per_round,
        rounds=RoundsConfig(
            groups_per_round=steps_per_round * U,
            samples_per_group=K,
            groups_per_update=U,
            train_start="round_complete",
        ),
        **_shared(),
    )


def _shared() -> dict:
    return dict(
        max_response_tokens=MAX_RESPONSE,
        max_num_seqs=MAX_NUM_SEQS,
        packing=PackingConfig(rows=2, row_tokens=320),
        loss=TRUNCATED,
        learning_rate=LEARNING_RATE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way of training, over its sessions."""

    samples_per_s: list[float]
    tokens_per_s: list[float]
    """Response tokens trained."""
    engine_fill: float
    """Sequences that the engine runs over its places, mean over the steady state: from the end of the update with which
    the window has turned over twice (`default_warmup`; a round, by rounds) to the last update's."""
    max_lag: list[int]
    mean_lag: float
    ess: float
    mismatch_kl: float
    pause_s: float

    @classmethod
    def of(cls, config: Config, results: list[Result]) -> "Row":
        warmup = default_warmup(config)

        def mean(name: str) -> float:
            return report.mean_std([r.mean(name) for r in results])[0]

        return cls(
            samples_per_s=[r.samples_per_s for r in results],
            tokens_per_s=[r.tokens_per_s for r in results],
            engine_fill=report.mean_std(
                [mean_running(r.running, Steady.of(r.events, warmup_updates=warmup)) for r in results]
            )[0]
            / MAX_NUM_SEQS,
            max_lag=[r.max_lag for r in results],
            mean_lag=mean("lag/mean"),
            ess=mean("ess"),
            mismatch_kl=mean("mismatch_kl_k3"),
            pause_s=mean("actor/pause_s"),
        )

    @property
    def rate(self) -> float:
        """Samples trained a second."""
        return report.mean_std(self.samples_per_s)[0]

    @property
    def token_rate(self) -> float:
        """Response tokens trained a second."""
        return report.mean_std(self.tokens_per_s)[0]


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = report.SMALL.value
    num_updates, passes_over = (8, 1) if small else (60, 2)
    with (
        tempfile.TemporaryDirectory(prefix="sluice-inflight-") as folder,
        Rig(pathlib.Path(folder), pipelinerl(2, recompute=False), tiny_model()) as rig,
    ):
        rig.run(Session(config=pipelinerl(2, recompute=False), lengths=LENGTHS))  # compiles, warms up
        calibrated = calibrate_passes(
            rig,
            lambda p: Session(config=conventional(4, 4), lengths=LENGTHS, passes_per_token=p),
            waiting_ratio=0.5,
            tolerance=0.03,
        )
        passes = calibrated.passes_per_token
        print(f"gradient passes per 1000 tokens: {1000 * passes:.1f}", flush=True)

        def run(name: str, config: Config) -> Result:
            result = rig.run(Session(config=config, lengths=LENGTHS, passes_per_token=passes))
            print(f"{name}: {result.samples_per_s:.1f} samples/s, max lag {result.max_lag}", flush=True)
            return result

        pilot = run("pipelinerl, to find its lag", pipelinerl(num_updates, recompute=False))
        steps_per_round = 1 + pilot.max_lag
        config = conventional(num_updates, steps_per_round)
        results: dict[str, list[Result]] = {KEEP: [], CONVENTIONAL: [], RECOMPUTE: []}
        for _ in range(passes_over):
            results[KEEP].append(run(KEEP, pipelinerl(num_updates, recompute=False)))
            results[CONVENTIONAL].append(run(CONVENTIONAL, config))
            results[RECOMPUTE].append(run(RECOMPUTE, pipelinerl(num_updates, recompute=True)))
        profile = measure_profile(
            rig, config, results=[calibrated.result, pilot], lengths=LENGTHS, num_groups=(num_updates + 8) * U
        )
    configs = {
        KEEP: pipelinerl(num_updates, recompute=False),
        RECOMPUTE: pipelinerl(num_updates, recompute=True),
        CONVENTIONAL: config,
    }
    rows = {name: Row.of(configs[name], of_one) for name, of_one in results.items()}
    values = values_of(rows)
    folder = report.results_folder()
    if folder is not None:
        draw(folder / "inflight.png", rows)
    ratio = values["samples_per_s_ratio_same_lag"]
    report.finish(
        "inflight",
        calibration=calibrated,
        title="In-flight updates against conventional RL at the same maximum lag",
        about=[
            f"`python -m tests.bench.inflight`: K = {K}, U = {U}, {num_updates} updates or more a run, {passes_over} "
            f"runs of each, an engine of {MAX_NUM_SEQS} sequences, a window of {ADMISSION.sequences} sequences, "
            f"uniform lengths 1 to {MAX_RESPONSE}. Training cost {1000 * passes:.1f} gradient passes per 1000 tokens. "
            "Conventional RL does as many steps a round as pipelinerl's largest measured lag allows. Rewards are "
            f"noise, so ESS and mismatch KL (k3) compare the ways at one learning rate ({LEARNING_RATE:g}), no more."
        ],
        table=table_of(rows),
        remarks=[
            f"In-flight updates train {ratio:.2f} times the samples a second at a maximum lag of "
            f"{max(rows[KEEP].max_lag)} (conventional: {max(rows[CONVENTIONAL].max_lag)}). The ratio can exceed the "
            "paper's since conventional RL leaves one of the two cores idle at any time, where the paper moves all "
            "GPUs from one side to the other. Against a conventional RL that did so here at no cost, generation and "
            f"training both twice as fast on two cores, the ratio would be {ratio / 2:.2f}: what the paper gains on "
            "top of that comes from GPUs that generate better at larger batches.",
            f"Engine fill is the sequences that vLLM's scheduler says it runs, looked at every {1000 * LOOK_S:.0f} ms, "
            "over its places, from the update with which the window has turned over twice (a round, for the "
            "conventional one) to the last.",
        ],
        values=values,
        aims={
            "samples_per_s_ratio_same_lag": report.Aim(value=ratio, aim=AIM).to_json(),
            "engine_fill": report.Aim(value=values["engine_fill"], aim=AIM_FILL).to_json(),
        },
        data={
            "profile": profile,
            "measured": [
                report.measured(
                    name,
                    configs[name],
                    tokens_per_s=row.token_rate,
                    samples_per_s=row.rate,
                    max_lag=max(row.max_lag),
                    mean_lag=row.mean_lag,
                    engine_fill=row.engine_fill,
                )
                for name, row in rows.items()
            ],
            "rows": {name: dataclasses.asdict(row) for name, row in rows.items()},
        },
    )


def values_of(rows: dict[str, Row]) -> dict[str, float]:
    """Everything compared, flat."""
    values = {
        "samples_per_s_ratio_same_lag": rows[KEEP].rate / rows[CONVENTIONAL].rate,
        "tokens_per_s_ratio_same_lag": rows[KEEP].token_rate / rows[CONVENTIONAL].token_rate,
        "engine_fill": rows[KEEP].engine_fill,
    }
    # If conventional RL had both cores for either phase, at twice the speed.
    values["samples_per_s_ratio_ideal_conventional"] = values["samples_per_s_ratio_same_lag"] / 2
    values["samples_per_s_ratio_recompute"] = rows[RECOMPUTE].rate / rows[CONVENTIONAL].rate
    for name, key in ((KEEP, "pipelinerl"), (RECOMPUTE, "recompute"), (CONVENTIONAL, "conventional")):
        row = rows[name]
        values |= {
            f"samples_per_s_{key}": row.rate,
            f"tokens_per_s_{key}": row.token_rate,
            f"engine_fill_{key}": row.engine_fill,
            f"max_lag_{key}": max(row.max_lag),
            f"ess_{key}": row.ess,
            f"mismatch_kl_{key}": row.mismatch_kl,
        }
    return values


def table_of(rows: dict[str, Row]) -> report.Table:
    lines = []
    for name, row in rows.items():
        mean, std = report.mean_std(row.samples_per_s)
        lags = ", ".join(str(lag) for lag in row.max_lag)
        cells = [f"{mean:.1f} ± {std:.1f}", f"{row.token_rate:.0f}", f"{row.engine_fill:.3f}", lags]
        cells += [f"{row.mean_lag:.2f}", f"{row.ess:.4f}", f"{row.mismatch_kl:.2e}"]
        lines.append([name, *cells, f"{1000 * row.pause_s:.1f}"])
    columns = ["", "samples/s", "tokens/s", "engine fill", "max lag, steps", "mean lag", "ESS"]
    columns += ["mismatch KL, nats", "pause, ms"]
    return report.Table(columns=columns, rows=lines)


def draw(file: pathlib.Path, rows: dict[str, Row]) -> None:
    """Writes the PNG."""
    names = list(rows)
    panels = {
        "samples/s": [report.mean_std(rows[n].samples_per_s) for n in names],
        "effective sample size": [(rows[n].ess, 0.0) for n in names],
        "mismatch KL, nats": [(rows[n].mismatch_kl, 0.0) for n in names],
    }
    bars(file, names, panels)


if __name__ == "__main__":
    app.run(main)
