"""Tail batching and the async ratio on engines with the speeds of the papers' GPUs, in real time.

    python -m tests.bench.paced [--small]

vLLM on one core is hardly faster with 128 sequences than with 64, so `tests.bench.tail` and `tests.bench.async_ratio`
measure what these schedules gain on an engine that computation bounds. The papers' engines are bound by memory: a
sequence decodes almost as fast among others as alone. Here the engines are paced (`tests.bench.rig.paced_engine`);
actor, store, bridge and learner are the real ones.

Speeds are those from which the planner predicts the papers' experiments (`tests.bench.papers.inputs`, written before
the papers' results were read): a decoding step reads the weights and all caches once, at the memory bandwidth of an
H800. Nothing is fitted. A token stands for so many of the paper's that the longest response is as long; seconds shrink
with it, tokens/s don't.

* **Tail batching**: Qwen2.5-32B with responses of at most 32k tokens (RollPacker, section 6), the lengths of
  `tests.bench.tail` at 32x and its sizes. An engine of the paper serves 32 of serial's requests, the rig's one engine
  128, so it is as fast as four of them. `streamed` has no aim: it overlaps with a learner's core that idles in
  `serial`, where the paper's stream trainer has to take devices from the rollout.
* **Async ratio**: Qwen3-8B on one GPU per engine (ROLL Flash), 128 samples an update, 64 for each of the two engines of
  the synchronous run, responses of at most 7168 tokens. That run generates on both chips and trains on both, as if each
  took half of the passes; the asynchronous one has an engine on one and the learner on the other. The paper tunes this
  split, two chips have one. A micro-batch's own pass is all that the synchronous run needs (the 0.0 below); a token of
  the asynchronous run costs twice what that comes to.

A trained token costs what makes the synchronous run spend a quarter of its time on training, as RollPacker's do
(Table 1). So with one chip of two the learner alone allows 2.0 at any alpha.

`predicted` is the planner's speed-up in tokens for the same sessions. The cases take turns, four of each, every second
turn in reverse order. Asynchronous runs count from the update with which the window has turned over twice, synchronous
ones without their first round.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app
from jaxtyping import Int32

from configs.schema import Config
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import default_warmup, simulate
from launch.tools.plan.workload import LengthProfile
from tests.bench import async_ratio, tail
from tests.bench.harness import result, sessions
from tests.bench.harness.estimates import ratio
from tests.bench.inflight import steady
from tests.bench.papers import inputs, roll_flash, rollpacker
from tests.bench.rig.calibrate import Calibration, calibrate
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session
from tests.bench.tail import MAX_RESPONSE, WAITING_RATIO, lengths_of

(LONGEST,) = (s for s in inputs.SETTINGS if s.name == "32B/32k")
MAX_OVER_P75 = 32
TAIL_VARIANTS = ("serial", "tail batching", "tail batching, streamed")
TAIL_ENGINES = 4
"""Engines of the paper that the rig's one is as fast as."""
SERIAL, ALPHAS = async_ratio.SERIAL, ("1", "2")
K, U = async_ratio.K, 16
NUM_PROMPTS = 600
"""More than any session issues."""
ASYNC_LENGTHS = lengths_of(8)
"""P75 of 7168 / 8 = 896 tokens of the paper's: RollPacker's P75 are 755 to 1.1k (section 2.2)."""
COLUMNS = {
    "": "{name}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up in tokens": "{tokens_speedup:.2f}",
    "predicted": "{predicted:.2f}",
    "speed-up in samples": "{samples_speedup:.2f}",
    "mean trained length": "{response_tokens:.1f}",
    "engine fill": "{engine_fill:.3f}",
    "max lag, steps": "{max_lag}",
    "learner waits": "{wait_share:.2f}",
}


def engine_of(setting: inputs.Setting, *, max_num_seqs: int, num_engines: int = 1) -> EngineProfile:
    """An engine as fast as `num_engines` of a setting's that share its requests evenly.

    The capacity of its KV cache is in the rig's tokens, of which `MAX_RESPONSE` are the setting's longest response.
    """
    engine = rollpacker.profile_of(
        setting, rollpacker.NO_COSTS, prompt_share=inputs.PROMPT_SHARES[0], reward_s=0.0
    ).engine
    return EngineProfile(
        running=tuple(h * num_engines for h in engine.running),
        tokens_per_s=tuple(rate * num_engines for rate in engine.tokens_per_s),
        max_num_seqs=max_num_seqs,
        kv_capacity_tokens=int(engine.kv_capacity_tokens * num_engines * MAX_RESPONSE / setting.max_tokens),
    )


def tail_session(variant: str, num_rounds: int) -> Session:
    config = tail.config_of(variant, num_rounds)
    engine = engine_of(LONGEST, max_num_seqs=config.actor.max_num_seqs, num_engines=TAIL_ENGINES)
    return Session(config=config, lengths=lengths_of(MAX_OVER_P75), engine=engine)


def async_config(name: str, num_updates: int) -> Config:
    """Of `async_ratio`'s serial or an alpha, with this bench's sizes."""
    config = async_ratio.config_of(name, num_updates)
    of_tail = tail.config_of("serial", 1)
    return dataclasses.replace(
        config,
        model=of_tail.model,
        sampling=of_tail.sampling,
        packing=of_tail.packing,
        rounds=dataclasses.replace(config.rounds, groups_per_round=U, groups_per_update=U),
        actor=dataclasses.replace(config.actor, max_num_seqs=inputs.MAX_NUM_SEQS),
    )


def async_session(name: str, num_updates: int) -> Session:
    """Both chips generate in the synchronous run, one in the others."""
    engine = engine_of(roll_flash.setting(2), max_num_seqs=inputs.MAX_NUM_SEQS)
    return Session(
        config=async_config(name, num_updates),
        lengths=ASYNC_LENGTHS,
        engine=engine,
        num_engines=2 if name == SERIAL else 1,
    )


def predict(prompts: Sequence[Int32[np.ndarray, " P"]], of_sessions: Mapping[str, Session]) -> dict[str, float]:
    """Returns the planner's tokens/s of each session over serial's, where training takes a quarter of serial's time.

    `prompts` are a run's first ones, in the order of their tickets.
    """

    def tokens_per_s(name: str, passes_s: float) -> SimResult:
        session = of_sessions[name]
        assert session.lengths is not None and session.engine is not None
        num_requests = session.config.rounds.requests_per_group
        groups = tuple(tuple(session.lengths.tokens(p, i) for i in range(num_requests)) for p in prompts)
        profile = Profile(
            engine=session.engine,
            response_tokens=LengthProfile(kind="groups", groups=groups),
            prompt_tokens=LengthProfile(kind="groups", groups=tuple((p.size,) for p in prompts)),
            learner=LearnerProfile(seconds_per_token=passes_s),
            num_engines=session.num_engines,
            num_learner_chips=1,
        )
        config = session.config
        warmup = min(default_warmup(config), config.run.num_updates // 2) if name in ALPHAS else 0
        return simulate(config, profile, num_updates=config.run.num_updates, warmup_updates=warmup)

    rollout = tokens_per_s(SERIAL, 1e-12)
    tokens_of_prompts = statistics.fmean(p.size for p in prompts) * rollout.num_samples / rollout.num_steps
    tokens = rollout.tokens_per_s * rollout.step_s + tokens_of_prompts
    passes_s = rollout.step_s / 3 / tokens
    serial = tokens_per_s(SERIAL, passes_s).tokens_per_s
    return {
        name: tokens_per_s(name, passes_s * (2 if name in ALPHAS else 1)).tokens_per_s / serial
        for name in of_sessions
        if name != SERIAL
    }


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = result.SMALL.value
    num_rounds, num_updates, turns = (5, 10, 1) if small else (10, 20, sessions.TURNS)
    with sessions.open_rig(async_config(SERIAL, 1), num_engines=2) as rig:
        tail_rows, tail_notes = run_tail(rig, num_rounds, turns)
        async_rows, async_notes = run_async(rig, num_updates, turns)
        prompts = [np.asarray(p, np.int32) for p in rig.prompts(async_config(SERIAL, 1), NUM_PROMPTS)]
    predicted = predict(prompts, {v: tail_session(v, num_rounds) for v in TAIL_VARIANTS})
    predicted |= predict(prompts, {name: async_session(name, num_updates) for name in (SERIAL, *ALPHAS)})
    values: dict[str, Any] = {}
    for rows, keys in ((tail_rows, TAIL_KEYS), (async_rows, {a: f"alpha_{a}" for a in ALPHAS})):
        serial = rows[SERIAL]
        for name, row in rows.items():
            tokens = ratio(row["tokens_per_s"], serial["tokens_per_s"])
            samples = ratio(row["samples_per_s"], serial["samples_per_s"])
            row |= {"tokens_speedup": tokens.value, "samples_speedup": samples.value}
            if name != SERIAL:
                values |= {f"tokens_speedup_{keys[name]}": tokens, f"samples_speedup_{keys[name]}": samples}
                values[f"predicted_tokens_speedup_{keys[name]}"] = predicted[name]
            row["predicted"] = 1.0 if name == SERIAL else predicted[name]
    result.finish(
        "paced",
        __doc__,
        values=values,
        aims={
            "tokens_speedup_tail_32x": result.at_least(2.21, "RollPacker, Table 2, tail batching alone"),
            "tokens_speedup_alpha_2": result.at_least(2.24, "ROLL Flash, RLVR, best of its settings"),
        },
        rows=[*tail_rows.values(), *async_rows.values()],
        columns=COLUMNS,
        notes=[*tail_notes, *async_notes],
    )


TAIL_KEYS = {"tail batching": "tail_32x", "tail batching, streamed": "tail_32x_streamed"}


def run_tail(rig: Rig, num_rounds: int, turns: int) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the rows by variant, and notes."""
    rig.run(tail_session("tail batching", 1))  # compiles
    calibration = calibrate(rig, {SERIAL: tail_session(SERIAL, 3)}, bounds=WAITING_RATIO)
    cases = {variant: tail_session(variant, num_rounds) for variant in TAIL_VARIANTS}
    ran = sessions.run_in_turns(rig, cases, turns=turns, passes_per_token=calibration.passes_per_token)
    rows = {v: sessions.row_of(f"{v}, 32x", cases[v].config, ran[v]) for v in TAIL_VARIANTS}
    short, long = rows["tail batching"]["rollout_to_train_end_s"], rows[SERIAL]["rollout_to_train_end_s"]
    note = (
        f"Mean round of serial {sum(long) / len(long):.2f} s; longest of tail batching {max(short):.2f} s, shortest "
        f"{min(short):.2f} s."
    )
    return rows, [*notes_of("Tail batching", calibration), note]


def run_async(rig: Rig, num_updates: int, turns: int) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the rows of the synchronous run and of each alpha, and notes."""
    rig.run(async_session(ALPHAS[0], 2))  # compiles
    calibration = calibrate(rig, {SERIAL: async_session(SERIAL, 3)}, bounds=WAITING_RATIO)
    paid = cost_paid(calibration)
    cases = {
        name: dataclasses.replace(
            async_session(name, num_updates), passes_per_token=paid * (1 if name == SERIAL else 2)
        )
        for name in (SERIAL, *ALPHAS)
    }
    ran = sessions.run_in_turns(rig, cases, turns=turns)
    rows = {}
    for name, case in cases.items():
        settled: list[Result] = [steady(one, case.config) for one in ran[name]]
        label = "synchronous, both chips" if name == SERIAL else f"alpha = {name}"
        rows[name] = sessions.row_of(label, case.config, settled)
    return rows, notes_of("Async ratio", calibration)


def cost_paid(calibration: Calibration) -> float:
    """Returns the gradient passes per token of the calibrating runs.

    A micro-batch costs at least one pass, so this exceeds `calibration.passes_per_token` where that asks for less. To
    double that number would not double the cost then.
    """
    results = calibration.results.values()
    return sum(r.num_passes for r in results) / sum(r.real_tokens for r in results)


def notes_of(name: str, calibration: Calibration) -> list[str]:
    return [f"{name}: {note}" for note in calibration.notes()]


if __name__ == "__main__":
    app.run(main)
