"""PipelineRL against conventional RL at the same maximum lag, on the real system.

    python -m tests.bench.inflight [--small]

`pipelinerl` publishes after every step while requests run on (section 4 of the paper), once with the running requests'
KV cache kept and once with it recomputed. Its largest lag, g, is measured first, by a run of its own. Conventional RL
then takes G = g + 1 steps on each round of G U groups (`serial`), whose last update trains at lag G - 1 = g too. All
sample the same uniform lengths from 1 to the maximum (appendix A), on one engine and one learner of their own, at a
training cost at which a conventional round generates about as long as it trains: the paper's plan, too. Rewards are
noise, so ESS and mismatch KL (k3) compare the ways at one learning rate, no more.

The paper's conventional RL gives every GPU to generation and then every GPU to training; here either side stands still
while the other works, so the ratio can exceed the paper's. `samples_per_s_ratio_ideal_conventional` is against a
conventional RL that moved both cores at no cost: half of the ratio. What the paper gains on top of that comes from GPUs
that generate better at larger batches. Engine fill is the sequences that vLLM's scheduler says it runs, over its
places, from the update with which the window has turned over twice (a round, for the conventional one) to the last.
"""

import math
from typing import Any

from absl import app

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from tests.bench.harness import result, sessions
from tests.bench.harness.figure import bars
from tests.bench.harness.sessions import mean_of
from tests.bench.rig.calibrate import calibrate
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.measure import measure_profile
from tests.bench.rig.session import Session
from tests.bench.rig.setting import TRUNCATED, make_config

K, U = 8, 4
MAX_NUM_SEQS = 32
ADMISSION = AdmissionConfig(policy="window", sequences=32)
"""pipelinerl's window: H is what the engine runs at once."""
MAX_RESPONSE = 128
LENGTHS = Lengths(kind="uniform", max_tokens=MAX_RESPONSE)
SHARED: dict[str, Any] = dict(
    max_response_tokens=MAX_RESPONSE,
    max_num_seqs=MAX_NUM_SEQS,
    packing=PackingConfig(rows=2, row_tokens=320),
    loss=TRUNCATED,
    learning_rate=2e-4,  # high enough that the policy moves and an old token is off policy
)
KEEP, RECOMPUTE, CONVENTIONAL = "pipelinerl", "pipelinerl, KV recomputed", "conventional"
KEYS = {KEEP: "pipelinerl", RECOMPUTE: "recompute", CONVENTIONAL: "conventional"}
COLUMNS = {
    "": "{name}",
    "samples/s": "{samples_per_s:.1f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "engine fill": "{engine_fill:.3f}",
    "max lag, steps": "{max_lag}",
    "mean lag": "{mean_lag:.2f}",
    "ESS": "{ess:.4f}",
    "mismatch KL, nats": "{mismatch_kl:.2e}",
    "pause, s": "{pause_s:.4f}",
}


def pipelinerl(num_updates: int, *, kv_cache: str = "keep") -> Config:
    return make_config(
        "pipelinerl",
        num_updates=num_updates,
        rounds=RoundsConfig(groups_per_round=U, samples_per_group=K, groups_per_update=U),
        admission=ADMISSION,
        publish=PublishConfig(when="every", kv_cache=kv_cache),  # pyright: ignore[reportArgumentType]
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
        **SHARED,
    )


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    num_updates, repeats = (8, 1) if result.SMALL.value else (60, 2)
    with sessions.open_rig(pipelinerl(2)) as rig:
        rig.run(Session(config=pipelinerl(2), lengths=LENGTHS))  # compiles, warms up
        serial = Session(config=conventional(4, 4), lengths=LENGTHS)
        calibration = calibrate(rig, {"serial": serial}, bounds=(0.47, 0.53))
        pilot_case = {"pilot": Session(config=pipelinerl(num_updates), lengths=LENGTHS)}
        passes = calibration.passes_per_token
        ((pilot,),) = sessions.run_in_turns(rig, pilot_case, passes_per_token=passes).values()
        configs = {
            KEEP: pipelinerl(num_updates),
            CONVENTIONAL: conventional(num_updates, 1 + pilot.max_lag),
            RECOMPUTE: pipelinerl(num_updates, kv_cache="recompute"),
        }
        cases = {name: Session(config=config, lengths=LENGTHS) for name, config in configs.items()}
        found = sessions.run_in_turns(rig, cases, repeats=repeats, passes_per_token=passes)
        profile = measure_profile(
            rig,
            configs[CONVENTIONAL],
            results=[*calibration.results.values(), pilot],
            lengths=LENGTHS,
            num_groups=(num_updates + 8) * U,
        )
    rows = {name: sessions.row_of(name, configs[name], found[name]) for name in KEYS}
    values = values_of(rows)
    if (folder := result.results_folder()) is not None:
        panels = {
            "samples/s": [result.mean_std(row["samples_per_s"]) for row in rows.values()],
            "effective sample size": [(row["ess"], 0.0) for row in rows.values()],
            "mismatch KL, nats": [(row["mismatch_kl"], 0.0) for row in rows.values()],
        }
        bars(folder / "inflight.png", list(rows), panels)
    numbers = ("tokens_per_s", "samples_per_s", "max_lag", "mean_lag", "engine_fill")
    result.finish(
        "inflight",
        __doc__,
        values=values | calibration.values(),
        aims={
            "samples_per_s_ratio_same_lag": result.at_least(1.57, "PipelineRL, appendix A.4: 16.9 / 10.7"),
            "engine_fill": result.at_least(0.95, "Algorithm 2 keeps H sequences in progress"),
        },
        rows=list(rows.values()),
        columns=COLUMNS,
        notes=calibration.notes(),
        spread={f"samples_per_s {name}": result.mean_std(row["samples_per_s"])[1] for name, row in rows.items()},
        figure=True,
        profile=profile,
        measured=sessions.measured(rows, configs, numbers),
    )


def values_of(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Everything compared, flat."""
    rates = {name: mean_of(row, "samples_per_s") for name, row in rows.items()}
    token_rates = {name: mean_of(row, "tokens_per_s") for name, row in rows.items()}
    ratio = rates[KEEP] / rates[CONVENTIONAL]
    values = {
        "samples_per_s_ratio_same_lag": ratio,
        "tokens_per_s_ratio_same_lag": token_rates[KEEP] / token_rates[CONVENTIONAL],
        "engine_fill": rows[KEEP]["engine_fill"],
        "samples_per_s_ratio_ideal_conventional": ratio / 2,
        "samples_per_s_ratio_recompute": rates[RECOMPUTE] / rates[CONVENTIONAL],
    }
    for name, key in KEYS.items():
        values |= {f"samples_per_s_{key}": rates[name], f"tokens_per_s_{key}": token_rates[name]}
        values |= {f"{n}_{key}": rows[name][n] for n in ("engine_fill", "max_lag", "ess", "mismatch_kl")}
    return values


if __name__ == "__main__":
    app.run(main)
