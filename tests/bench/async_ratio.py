"""ROLL Flash's async ratio on the real system: alpha in {0, 1, 2, 4, 8} against synchronous training.

    python -m tests.bench.async_ratio [--small]

Two measurements for each alpha and for `serial` with one update a round (R = U), what a synchronous system does:

* throughput and lag: replayed long-tailed lengths, and training at the tiny model's own cost, which is a fraction of
  the rollout's: most of a synchronous step is a few long responses;
* reward reached: the real tiny task with its real verifier and natural lengths, the same number of samples for all;
  held-out reward before and after, with a standard error of about 0.03. Responses are a few tokens long there, so its
  times say nothing.

Publishing every step; running requests are aborted and resumed (section 4 of the paper). A synchronous step ends with
its longest response while most places of the engine are empty; from alpha = 1 on, the next update's groups fill them.
Beyond the alpha at which the engine is always full, more of it only adds lag. Each sample is a ticket of its own, as in
the preset. The cases take turns, four of each, every second turn in reverse order. Rates and speed-ups are of response
tokens trained per second: a run ends with groups in progress, more of them the larger alpha, and those are the long
ones. A lag is of a token, from the step of the weights behind it to the step that trains it.

A synchronous learner's core idles during a rollout. The paper's baseline has as many GPUs as the asynchronous system
and uses all of them for rollout, so the headline is of cases in which a second engine shares the learner's core, in
both schedules, at the paper's recommended alpha = 2, which the preset has. `best` is the largest of several noisy
numbers, and says less.
"""

from typing import Any

from absl import app

from configs.schema import Config
from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from tests.bench.harness import result, sessions
from tests.bench.harness.estimates import Estimate, ratio
from tests.bench.harness.figure import bars
from tests.bench.harness.sessions import mean_of
from tests.bench.planner.measure import measure_profile
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.session import Session
from tests.bench.rig.setting import TRUNCATED, make_config

ALPHAS = (0, 1, 2, 4, 8)
PRESET = 2
SERIAL, BOTH_CORES = "serial", ", both cores"
K, U = 8, 8
MAX_NUM_SEQS = 64
MAX_RESPONSE = 256
LENGTHS = Lengths(kind="lognormal", max_tokens=MAX_RESPONSE, median=20, prompt_sigma=0.8, sample_sigma=0.8)
TASK: dict[str, Any] = {"max_response_tokens": 6, "learning_rate": 4e-4, "num_eval_problems": 256}
COLUMNS = {
    "": "{name}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f}",
    "samples/s": "{samples_per_s:.1f}",
    "mean length": "{response_tokens:.1f}",
    "mean lag": "{mean_lag:.2f}",
    "max lag": "{max_lag}",
    "share of tokens at lag 0 / 1 / 2-3 / 4-7 / 8+": "{shares}",
    "learner waits": "{wait_share:.2f}",
    "groups dropped": "{dropped}",
    "held-out reward": "{reward}",
}


def config_of(name: str, num_updates: int, **fields: Any) -> Config:
    """A run of `serial` or of an alpha (its number as text)."""
    if name == SERIAL:
        admission, publish = AdmissionConfig(policy="fifo"), PublishConfig(when="round_end")
    else:
        admission = AdmissionConfig(policy="window", async_ratio=float(name), unit="sample")
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
        max_tokens=MAX_RESPONSE + 24,  # one engine for both measurements
        max_num_seqs=MAX_NUM_SEQS,
        packing=PackingConfig(rows=4, row_tokens=320),
        loss=TRUNCATED,
        **{"max_response_tokens": MAX_RESPONSE, **fields},
    )


def replayed(name: str, num_updates: int) -> Session:
    """A session of a case; its name ends in `BOTH_CORES` where two engines serve it."""
    config = config_of(name.removesuffix(BOTH_CORES), num_updates)
    return Session(config=config, lengths=LENGTHS, num_engines=2 if name.endswith(BOTH_CORES) else 1)


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = result.SMALL.value
    names = [SERIAL, *(str(a) for a in (ALPHAS[:2] if small else ALPHAS))]
    num_updates, task_updates, turns = (6, 6, 1) if small else (30, 80, sessions.TURNS)
    cases = {n: replayed(n, num_updates) for n in (*names, *(f"{n}{BOTH_CORES}" for n in names if n != "0"))}
    with sessions.open_rig(config_of(SERIAL, 1), num_engines=2) as rig:
        rig.run(replayed(f"0{BOTH_CORES}", 2))  # compiles, warms up
        # What the planner may know: sessions of their own, warm.
        costs = {name: [rig.run(replayed(name, 12))] for name in (SERIAL, "1")}
        speed = sessions.run_in_turns(rig, cases, turns=turns)
        # A sample that is a ticket of its own costs the actor more, and an update under load takes longer to stage and
        # to load, so a profile for either.
        profiles, num_groups = {}, (num_updates + 2 + max(ALPHAS)) * U
        for name in (SERIAL, "1"):
            engine = profiles[SERIAL]["engine"] if profiles else None
            config = config_of(name, 1)
            profiles[name] = measure_profile(
                rig, config, results=costs[name], lengths=LENGTHS, num_groups=num_groups, engine=engine
            )
        tasks = {name: Session(config=config_of(name, task_updates, **TASK), rewards="task") for name in names}
        rewards = sessions.run_in_turns(rig, tasks, turns=1)
    configs = {name: case.config for name, case in cases.items()}
    rows = {name: sessions.row_of(name, configs[name], speed[name]) for name in cases}
    values: dict[str, Any] = {}
    best: dict[str, Estimate] = {}
    for name, row in rows.items():
        if name.endswith(BOTH_CORES):
            speedup = ratio(row["tokens_per_s"], rows[SERIAL + BOTH_CORES]["tokens_per_s"])
            row["speedup"] = speedup.value
            if name != SERIAL + BOTH_CORES:
                best[name] = speedup
                values[f"speedup_both_cores_alpha_{name.removesuffix(BOTH_CORES)}"] = speedup
            continue
        evals = rewards[name][0].evals
        speedups = {
            "speedup": ratio(row["tokens_per_s"], rows[SERIAL]["tokens_per_s"]),
            "samples_speedup": ratio(row["samples_per_s"], rows[SERIAL]["samples_per_s"]),
        }
        row |= {key: one.value for key, one in speedups.items()} | {
            "shares": " / ".join(f"{share:.0%}" for share in row["lag_shares"].values()),
            "reward_start": evals[0]["eval/reward"],
            "reward_end": evals[-1]["eval/reward"],
            "reward": f"{evals[0]['eval/reward']:.3f} -> {evals[-1]['eval/reward']:.3f}",
            "lag_mean": row["mean_lag"],
            "lag_max": row["max_lag"],
            "mean_length": row["response_tokens"],
        }
        if name == SERIAL:
            values |= {f"{n}_serial": mean_of(row, n) for n in ("tokens_per_s", "samples_per_s")}
            values["reward_end_serial"] = row["reward_end"]
        else:
            of_alpha = {n: row[n] for n in ("mean_length", "lag_mean", "lag_max", "reward_end")} | speedups
            values |= {f"{n}_alpha_{name}": value for n, value in of_alpha.items()}
    values["best_speedup"] = max((values[f"speedup_alpha_{n}"] for n in names if n != SERIAL), key=lambda e: e.value)
    values["best_speedup_both_cores"] = max(best.values(), key=lambda e: e.value)
    if (folder := result.results_folder()) is not None:
        panels = {
            "response tokens trained a second": [result.mean_std(row["tokens_per_s"]) for row in rows.values()],
            "mean lag, steps": [(row["mean_lag"], 0.0) for row in rows.values()],
            "held-out reward at the end": [(row.get("reward_end", 0.0), 0.0) for row in rows.values()],
        }
        bars(folder / "async_ratio.png", [n if n.startswith(SERIAL) else f"α = {n}" for n in rows], panels)
    of_one_engine = {name: rows[name] | {"profile": {"profile": SERIAL if name == SERIAL else "1"}} for name in names}
    measured = sessions.measured(of_one_engine, configs, ("tokens_per_s", "samples_per_s", "lag_mean", "lag_max"))
    result.finish(
        "async_ratio",
        __doc__,
        values=values,
        aims={f"speedup_both_cores_alpha_{PRESET}": result.at_least(2.24, "ROLL Flash, RLVR, best of its settings")},
        rows=list(rows.values()),
        columns=COLUMNS,
        figure=True,
        profile=profiles[SERIAL],
        profiles=profiles,
        measured=[one | {"name": f"alpha_{one['name']}"} for one in measured],
    )


if __name__ == "__main__":
    app.run(main)
