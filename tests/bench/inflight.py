"""PipelineRL against conventional RL at the same maximum lag, on the real system.

    python -m tests.bench.inflight [--small]

`pipelinerl` publishes after every step while requests run on (section 4 of the paper), once with the running requests'
KV cache kept and once with it recomputed, with H = 32 and H = 256 sequences in service: a largest lag g of about 3 and
about 16 steps. g is measured first, by a run of its own. Conventional RL then takes G = g + 1 steps on each round of
G U groups (`serial`), whose last update trains at lag G - 1 = g too. All sample the same uniform lengths from 1 to the
maximum (appendix A). A trained token costs what makes `pipelinerl`'s learner as fast as its engine, which is how the
paper divides its accelerators (I of N for generation). Rewards are noise, so ESS and mismatch KL (k3) compare the ways
at one learning rate, no more.

What a full engine gains depends on the engine. vLLM on one core has 74% of its speed with 64 sequences and 95% with
128, so a round that drains loses little, and the ratio to the ideal opponent is about 1 at best.
H = 256 is therefore measured on a paced engine too (`tests.bench.rig.paced_engine`; actor, store, bridge and learner
are the real ones) with the paper's own U(h). That grows "almost linearly up to h ~ 200" (figure 8): here in proportion
to h up to 192, where the paper's case study runs, and not from there on.
`formula_ratio_both_cores` is what appendix A computes of each engine's U(h) for these H, g and lengths and N = 2.

Every number is of a session's steady state: without the updates until the window has turned over twice, or without the
first round. Before that `pipelinerl` fills its engine, which a training run does once.

There are three opponents at each H:

* `conventional`: the engine and the learner keep their cores, and either stands still while the other works;
* `conventional, both cores`: as in the paper, all accelerators generate, then all train. A second engine generates on
  the learner's core, and training has half the passes, as if the second core took its part at no cost
  (`tokens_per_s_ratio_both_cores`; engine fill is of the first engine);
* an ideal one that moves both cores at no cost and loses nothing: half of the ratio to `conventional`
  (`tokens_per_s_ratio_ideal`). What `pipelinerl` gains on it comes from an engine that is always full, where a
  conventional one drains at the end of each round. By appendix A that begins to pay at g of about 16.

The cases of an H take turns, four of each, every second turn in reverse order. Engine fill is the sequences that vLLM's
scheduler says it runs, over its places.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from absl import app

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.closed_formulas import System, conventional_rate, pipeline_split, uniform_lengths
from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.sim.simulate import default_warmup
from tests.bench.harness import result, sessions
from tests.bench.harness.estimates import ratio
from tests.bench.harness.figure import COLORS, pyplot
from tests.bench.planner.measure import limited, measure_profile
from tests.bench.rig.calibrate import MIN_PASSES
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session
from tests.bench.rig.setting import TRUNCATED, make_config

K, U = 8, 4
WINDOWS = (32, 256)
"""H: the sequences that the engine runs at once."""
PACED = EngineProfile(running=(192.0,), tokens_per_s=(4000.0,), max_num_seqs=WINDOWS[-1])
"""The paper's engine, at a speed at which a session takes seconds; training is paced by it, so the speed cancels out.
"""
MAX_RESPONSE = 128
LENGTHS = Lengths(kind="uniform", max_tokens=MAX_RESPONSE)
SHARED: dict[str, Any] = dict(
    max_response_tokens=MAX_RESPONSE,
    packing=PackingConfig(rows=4, row_tokens=320),
    loss=TRUNCATED,
    learning_rate=2e-4,  # high enough that the policy moves and an old token is off policy
)
KEEP, RECOMPUTE = "pipelinerl", "pipelinerl, KV recomputed"
CONVENTIONAL, BOTH_CORES = "conventional", "conventional, both cores"
KEYS = {KEEP: "pipelinerl", RECOMPUTE: "recompute", CONVENTIONAL: "conventional", BOTH_CORES: "both_cores"}
BUSY = (0.8, 0.95)
"""Share of its time that the balanced learner computes: at least the first; the search aims at the middle."""
FULL_SPEED = 0.8
"""Share of the engine's own tokens/s that the balanced pipeline keeps: runs of this machine differ by 5%, and the two
cores slow each other down."""
BY_STEP = {"lag/max": "largest lag, steps", "ess": "effective sample size", "mismatch_kl_k3": "mismatch KL, nats"}
"""Metrics whose course is kept (Figures 3a, 6a, 6b and 7)."""
COLUMNS = {
    "H": "{setup}",
    "": "{way}",
    "tokens/s": "{tokens_per_s:.0f}",
    "samples/s": "{samples_per_s:.1f}",
    "engine fill": "{engine_fill:.3f}",
    "max lag, steps": "{max_lag}",
    "mean lag": "{mean_lag:.2f}",
    "ESS": "{ess:.4f}",
    "mismatch KL, nats": "{mismatch_kl:.2e}",
    "pause, s": "{pause_s:.4f}",
    "learner waits": "{wait_share:.2f}",
}


def pipelinerl(window: int, num_updates: int, *, kv_cache: str = "keep") -> Config:
    return make_config(
        "pipelinerl",
        num_updates=num_updates,
        rounds=RoundsConfig(groups_per_round=U, samples_per_group=K, groups_per_update=U),
        admission=AdmissionConfig(policy="window", sequences=window),
        publish=PublishConfig(when="every", kv_cache=kv_cache),  # pyright: ignore[reportArgumentType]
        max_num_seqs=window,
        **SHARED,
    )


def conventional(num_updates: int, steps_per_round: int) -> Config:
    """`serial` with G steps a round, for at least `num_updates` updates in whole rounds."""
    return make_config(
        "serial",
        num_updates=math.ceil(num_updates / steps_per_round) * steps_per_round,
        rounds=RoundsConfig(
            groups_per_round=steps_per_round * U,
            samples_per_group=K,
            groups_per_update=U,
            train_start="round_complete",
        ),
        max_num_seqs=WINDOWS[-1],  # all slots of the engine: a window limits pipelinerl alone
        **SHARED,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine and its number of sequences in service."""

    window: int
    engine: EngineProfile | None = None
    """A paced engine; None for the real one."""

    @property
    def name(self) -> str:
        return f"{self.window}{', paced' if self.engine else ''}"

    @property
    def suffix(self) -> str:
        """Of the result's keys."""
        return f"{'_paced' if self.engine else ''}_H{self.window}"

    def session(self, config: Config, *, passes_per_token: float) -> Session:
        return Session(config=config, lengths=LENGTHS, passes_per_token=passes_per_token, engine=self.engine)


SETUPS = (Setup(window=WINDOWS[1]), Setup(window=WINDOWS[1], engine=PACED), Setup(window=WINDOWS[0]))
"""The real engine's speeds are measured at its largest window, so that is first."""


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    num_updates, turns = (8, 1) if result.SMALL.value else (68, sessions.TURNS)
    rows: dict[str, dict[str, Any]] = {}
    configs: dict[str, Config] = {}
    profiles: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    notes: list[str] = []
    with sessions.open_rig(pipelinerl(WINDOWS[-1], 2), num_engines=2) as rig:
        compiling = Session(config=conventional(4, 4), lengths=LENGTHS, num_engines=2)
        rig.run(compiling)  # warms up both engines too
        for setup in SETUPS:
            passes, pilot = balance(rig, setup, num_updates)
            ran, of_setup = run_setup(rig, setup, num_updates, passes, 1 + pilot.max_lag, turns)
            engine = setup.engine or (next(iter(profiles.values()))["engine"] if profiles else None)
            profile = measure_profile(
                rig,
                of_setup[CONVENTIONAL],
                results=[pilot],
                lengths=LENGTHS,
                num_groups=(num_updates + 20) * U,
                engine=limited(msgspec.to_builtins(engine), setup.window) if engine is not None else None,
            )
            found: dict[str, dict[str, Any]] = {}
            for way, config in of_setup.items():
                name = f"{way}, H={setup.name}"
                found[way] = sessions.row_of(name, config, ran[way], way=way, window=setup.window, setup=setup.name)
                if setup.engine is not None:  # its logprobs are made up
                    found[way] |= {"ess": None, "mismatch_kl": None}
                found[way]["profile"] = {"profile": f"H={setup.name}"}
                found[way]["by_step"] = {metric: by_step(ran[way], metric) for metric in BY_STEP}
                rows[name], configs[name] = found[way], config
            if setup.engine is None:
                profiles[f"H={setup.name}"] = profile
            values |= values_of(found, setup.suffix)
            values[f"formula_ratio_both_cores{setup.suffix}"] = formula_ratio(profile, setup.window, pilot.max_lag)
            notes.append(
                f"H = {setup.name}: a trained token costs {1000 * passes:.1f} gradient passes per 1000; the pilot's "
                f"largest lag was {pilot.max_lag} steps. Passes per micro-batch of the conventional one with both "
                f"cores: {passes_per_micro_batch(ran[BOTH_CORES]):.1f}; below {MIN_PASSES:.0f} it trains dearer than "
                f"stated."
            )
    # The headlines are of the real engine's window whose lag is long enough for the ideal opponent to lose.
    headline = f"_H{WINDOWS[-1]}"
    values |= {key.removesuffix(headline): one for key, one in values.items() if key.endswith(headline)}
    if (folder := result.results_folder()) is not None:
        draw(folder / "inflight.png", rows)
    real = {setup.name for setup in SETUPS if setup.engine is None}
    predicted = {n: row for n, row in rows.items() if row["way"] != BOTH_CORES and row["setup"] in real}
    numbers = ("tokens_per_s", "samples_per_s", "max_lag", "mean_lag", "engine_fill", "num_skipped")
    result.finish(
        "inflight",
        __doc__,
        values=values,
        aims={
            "tokens_per_s_ratio_both_cores": result.at_least(2.0, "PipelineRL, section 5.1: about twice as fast"),
            "tokens_per_s_ratio_ideal": result.at_least(1.0, "PipelineRL, appendix A, where g_max is 16 or more"),
            "tokens_per_s_ratio_ideal_paced": result.at_least(1.0, "the same, with the paper's engine"),
            "max_lag_pipelinerl": result.at_least(16, "appendix A: where the gain begins"),
            "largest_lag_over_conventional": result.at_most(0, "the comparison's premise: the same largest lag"),
            "engine_fill_pipelinerl": result.at_least(0.95, "Algorithm 2 keeps H sequences in progress"),
        },
        rows=list(rows.values()),
        columns=COLUMNS,
        notes=notes,
        figure=True,
        profile=next(iter(profiles.values())),
        profiles=profiles,
        measured=sessions.measured(predicted, configs, numbers),
    )


def formula_ratio(profile: dict[str, Any], window: int, max_lag: int) -> float:
    """Returns appendix A's speed-up over two accelerators that generate and then train, at these H and g."""
    engine = plan_profile.from_dict(profile).engine
    rate = np.array([engine.throughput(h) for h in range(1, engine.max_num_seqs + 1)])
    system = System(
        engine_rate=rate,
        still_running=uniform_lengths(MAX_RESPONSE),
        num_chips=2,
        batch_size=K * U,
        train_time=1 / rate[window - 1],  # as fast as the engine
    )
    return pipeline_split(system, window, 1).rate / conventional_rate(system, max_lag + 1)


def passes_per_micro_batch(results: Sequence[Result]) -> float:
    return sum(r.num_passes for r in results) / sum(r.num_micro_batches for r in results)


def by_step(results: Sequence[Result], metric: str) -> list[float]:
    """Returns the mean of a metric over the sessions, by optimizer step."""
    return [
        statistics.fmean(values) for values in zip(*([s[metric] for s in one.steps] for one in results), strict=True)
    ]


def draw(file: pathlib.Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes throughput by way and window, and lag, ESS and KL by step of the largest window (Figures 3a, 6 and 7)."""
    plt = pyplot()
    fig, axes = plt.subplots(1, 1 + len(BY_STEP), figsize=(4 * (1 + len(BY_STEP)), 3.6), layout="constrained")
    for i, way in enumerate(KEYS):
        of_way = {n: rows[f"{way}, H={s.name}"] for n, s in enumerate(SETUPS) if f"{way}, H={s.name}" in rows}
        places = [n + (i - 1.5) * 0.2 for n in of_way]
        stats = [result.mean_std(row["tokens_per_s"]) for row in of_way.values()]
        axes[0].bar(places, [m for m, _ in stats], 0.19, yerr=[s for _, s in stats], color=COLORS[i], label=way)
        for axis, metric in zip(axes[1:], BY_STEP, strict=True):
            if way != BOTH_CORES:  # its steps are those of the conventional one
                axis.plot(rows[f"{way}, H={WINDOWS[-1]}"]["by_step"][metric], color=COLORS[i], linewidth=1.2)
    axes[0].set_xticks(range(len(SETUPS)), [f"H = {setup.name}" for setup in SETUPS])
    axes[0].set_title("response tokens trained/s", fontsize=10)
    axes[0].legend(frameon=False, fontsize=7)
    for axis, title in zip(axes[1:], BY_STEP.values(), strict=True):
        axis.set_title(f"{title} by step, H = {WINDOWS[-1]}", fontsize=10)
    fig.savefig(file, dpi=130)
    plt.close(fig)


def balance(rig: Rig, setup: Setup, num_updates: int) -> tuple[float, Result]:
    """Returns the passes per token at which the learner keeps pace with a full engine, and a run at that pace.

    The first run trains so cheaply that the engine alone sets the pace. From there the passes rise until the learner is
    busy, and fall where the engine loses speed. Raises RuntimeError if seven runs find no such pace.
    """
    passes, full_rate = 0.0, 0.0
    config = pipelinerl(setup.window, num_updates)
    for _ in range(7):
        ran = steady(rig.run(setup.session(config, passes_per_token=passes)), config)
        busy = 1 - sum(s["time/wait_s"] for s in ran.steps) / sum(s["time/step_s"] for s in ran.steps)
        full_rate = full_rate or ran.tokens_per_s
        speed, per_micro_batch = ran.tokens_per_s / full_rate, ran.num_passes / ran.num_micro_batches
        print(
            f"H={setup.name}: {passes:.4f} passes per token ({per_micro_batch:.1f} per micro-batch), learner busy "
            f"{busy:.3f}, {ran.tokens_per_s:.0f} tokens/s, {speed:.3f} of the engine's, max lag {ran.max_lag}",
            flush=True,
        )
        if busy >= BUSY[0] and speed >= FULL_SPEED:
            return passes, ran
        done = ran.num_passes / ran.real_tokens
        passes = done * (speed if speed < FULL_SPEED else sum(BUSY) / 2 / busy)
    raise RuntimeError(f"H={setup.name}: no pace found at which the learner is busy and the engine full")


def steady(ran: Result, config: Config) -> Result:
    """Returns the steady state of a session; a short run's second half."""
    return ran.skip(min(default_warmup(config), len(ran.steps) // 2))


def run_setup(
    rig: Rig, setup: Setup, num_updates: int, passes: float, steps_per_round: int, turns: int
) -> tuple[dict[str, list[Result]], dict[str, Config]]:
    """Returns what each way of a setup came to in its steady state, and its configuration."""
    serial = conventional(num_updates, steps_per_round)
    configs = {
        KEEP: pipelinerl(setup.window, num_updates),
        RECOMPUTE: pipelinerl(setup.window, num_updates, kv_cache="recompute"),
        CONVENTIONAL: serial,
        BOTH_CORES: serial,
    }
    if setup.engine is not None:  # a KV cache costs it nothing
        del configs[RECOMPUTE]
    cases = {way: setup.session(c, passes_per_token=passes) for way, c in configs.items()}
    cases[BOTH_CORES] = dataclasses.replace(cases[BOTH_CORES], num_engines=2, passes_per_token=passes / 2)
    ran = sessions.run_in_turns(rig, cases, turns=turns)
    return {way: [steady(one, configs[way]) for one in results] for way, results in ran.items()}, configs


def values_of(rows: Mapping[str, Mapping[str, Any]], suffix: str) -> dict[str, Any]:
    """Everything compared in one setup, flat."""
    rates = {way: row["tokens_per_s"] for way, row in rows.items()}
    ratio_apart = ratio(rates[KEEP], rates[CONVENTIONAL])
    values: dict[str, Any] = {
        "tokens_per_s_ratio_apart": ratio_apart,
        "tokens_per_s_ratio_ideal": ratio_apart.map(0.0, 0.5),
        "tokens_per_s_ratio_both_cores": ratio(rates[KEEP], rates[BOTH_CORES]),
        "samples_per_s_ratio_both_cores": ratio(rows[KEEP]["samples_per_s"], rows[BOTH_CORES]["samples_per_s"]),
        "largest_lag_over_conventional": rows[KEEP]["max_lag"] - rows[CONVENTIONAL]["max_lag"],
    }
    if RECOMPUTE in rows:
        values["tokens_per_s_ratio_recompute"] = ratio(rates[RECOMPUTE], rates[KEEP])
    for way, row in rows.items():
        values |= {f"{n}_{KEYS[way]}": row[n] for n in ("engine_fill", "max_lag", "mean_lag", "ess", "mismatch_kl")}
        values[f"tokens_per_s_{KEYS[way]}"] = sessions.mean_of(row, "tokens_per_s")
    return {f"{key}{suffix}": value for key, value in values.items()}


if __name__ == "__main__":
    app.run(main)
