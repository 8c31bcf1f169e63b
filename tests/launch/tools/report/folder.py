"""Run folders as a learner, its actors and a supervisor leave them, of any length; made without any of them."""

import json
import math
import pathlib
import random
from collections.abc import Iterator
from typing import Any

from bridge.timeline import Timeline
from configs import overrides
from configs.presets import tiny
from configs.run_folder import RunFolder

START_S = 1_700_000_000.0
STEP_S = 2.0
HOSTILE = (
    "</script><script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 1'>",
    "\u001b[2J\u001b]0;title\u0007 \u0000 \u202egnirts \ud800 lone",
    "x" * 50_000,
    "<!-- --> ]]> {{ 7 * 7 }} ${1} &lt;b&gt; \u2028 \u2029",
)


def make_folder(
    folder: pathlib.Path,
    *,
    name: str = "made",
    steps: int = 8,
    actors: int = 2,
    groups: int | None = None,
    killed: bool = False,
    hangs: bool = False,
    texts: tuple[str, ...] = ("the sum is 12", "I count: 1, 2, 3", "needle in a haystack"),
    seed: int = 0,
) -> pathlib.Path:
    """A finished run of so many updates, two a round of four groups of eight, of which `groups` are kept as text.

    `killed`: actor-0 died in the middle of the run and came back as actor-0-r1. `hangs`: no group of the last update
    ever ended, so it was not made; the supervisor was killed.
    """
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    changes = {"run.name": name, "run.num_updates": str(steps), "rounds.groups_per_round": "4"}
    changes |= {"rounds.groups_per_update": "2", "admission.width": "2", "rounds.samples_per_group": "8"}
    run.config_file.write_text(overrides.to_json(overrides.apply(tiny.tiny(), changes)))
    run.loss_constants.write_text(json.dumps({"name": "grpo_clip", "clip_low": 0.2}))
    if not hangs:
        run.summary.write_text(json.dumps({"outcome": "done", "steps": steps}))
    _write(run.metrics, _metrics(steps - hangs, rng))
    _write(run.samples, _samples(steps, 2 * steps if groups is None else groups, texts, rng))
    _events(run.events, steps, actors, killed, hangs)
    return folder


def _write(file: pathlib.Path, rows: Iterator[dict[str, Any]]) -> None:
    with open(file, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def _metrics(steps: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for step in range(steps + 1):
        if step:
            learned = 1 - math.exp(-3 * step / steps)
            yield {
                "kind": "step",
                "step": step,
                "incarnation": 0,
                **{f"filler/{i}": rng.random() for i in range(60)},  # a real row has a hundred numbers
                "reward/mean": learned + rng.gauss(0, 0.05),
                "reward/min": 0.0,
                "reward/max": 1.0,
                "response/mean_tokens": 40 + rng.gauss(0, 2),
                "response/max_tokens": 64.0,
                "lag/mean": float((step + 1) % 2),
                "lag/max": float((step + 1) % 2),
                "ess": 1 - 0.1 * rng.random(),
                "ess_sequence": 0.8,
                "mismatch_kl_k3": 10 ** rng.uniform(-6, -2),
                "max_abs_dlogprob": 0.01,
                "max_abs_dlogprob_lag0": 1e-6,
                "grad_norm": rng.random() + 0.1,
                "entropy": 2 - learned,
                "loss": None if step == 3 else rng.gauss(0, 0.1),
                "tokens_per_s": 900.0,
                "tokens": 600.0,
                "time/step_s": 40.0 if step == 1 else STEP_S,
                "time/train_s": STEP_S / 2,
                "time/wait_s": STEP_S / 3,
                "groups/dropped": float(step // 100),
                "rewards/math": learned,
                "actor/verifier_failures": 2.0,
                "groups": ["000000001"],
            }
        if step and step % 2 == 0:
            yield {
                "kind": "round",
                "step": step,
                "incarnation": 0,
                "round/waiting_ratio": 0.3,
                "round/waiting_ratio_eq4": 0.2,
                "round/first_dispatch_s": 0.9,
                "round/wait_s": 1.0,
                "round/compute_s": 2.0,
                "round/rollout_to_train_end_s": 4.0,
            }
        if step % max(2, steps // 8) == 0:
            mean = min(1.0, 0.1 + 0.8 * step / steps)
            yield {"kind": "eval", "step": step, "incarnation": 0, "eval/reward": mean, "problems": 64}
            yield {"kind": "probe", "step": step, "incarnation": 0, "parity/max_abs_dlogprob": 1e-6}


def _samples(steps: int, num_groups: int, texts: tuple[str, ...], rng: random.Random) -> Iterator[dict[str, Any]]:
    for i in range(num_groups):
        step = 1 + i * steps // num_groups
        is_eval = i % 5 == 0
        yield {
            "format": 1,
            "kind": "eval" if is_eval else "train",
            "set": "heldout" if is_eval else "",
            "step": step,
            "incarnation": 0,
            "round": (step - 1) // 2,
            "ticket": f"{i:09d}",
            "order": i,
            "prompt_id": f"{i % 97:012x}",
            "prompt": f"question {i % 97}: {texts[i % len(texts)]}",
            "prompt_tokens": 9,
            "answer": "12",
            "metadata": '{"id": 7}',
            "num_responses": 8,
            "responses": [_response(i, j, step, texts[(i + j) % len(texts)], is_eval, rng) for j in range(8)],
        }


def _response(i: int, j: int, step: int, text: str, is_eval: bool, rng: random.Random) -> dict[str, Any]:
    parts = [{"by": "environment", "text": f"guess {i}"}, {"by": "policy", "text": text}]
    said: dict[str, Any] = {"turns": parts, "num_parts": 4} if (i + j) % 11 == 3 else {"text": f"{text} ({i}.{j})"}
    return said | {
        "actor": "actor-0",
        "finish": "stop" if j else "length",
        "tokens": 5 + (i * 7 + j * 3) % 60,
        "observed_tokens": 0,
        "reward": float(rng.random() < 0.5),
        "scores": {"math": {"value": 1.0, "verdict": "ok"}},
        "turn_rewards": [],
        "min_version": step - 1,
        "max_version": step - 1,
        "lag": None if is_eval else float(i % 3),
        "lag_max": None if is_eval else i % 3,
        "advantage": None if is_eval else rng.gauss(0, 1),
    }


def _events(folder: pathlib.Path, steps: int, actors: int, killed: bool, hangs: bool) -> None:
    unfinished = {steps} if hangs else set[int]()
    learner = Timeline(folder, "learner")
    learner.instant("restored", time_s=START_S - 1, incarnation=0, step=0)
    learner.span("publish", START_S - 0.5, START_S - 0.4, lane=1, step=0)
    died_s = START_S + STEP_S * (steps // 2) + 1.0
    names = [f"actor-{i}" for i in range(actors)]
    lines = {name: Timeline(folder, name) for name in names}
    for name in names:
        lines[name].span("start engine", START_S - 20, START_S - 2, max_num_seqs=8)
    if killed:
        lines["actor-0-r1"] = Timeline(folder, "actor-0-r1")
        lines["actor-0-r1"].span("start engine", died_s + 0.3, died_s + 2.5, max_num_seqs=8)
        supervisor = Timeline(folder, "supervisor")
        died = {"how": "was killed by signal 9", "signal": 9, "cause": "weights served"}
        then = "; restarting (restart 1)"
        for name in ("learner", *names):
            supervisor.instant("start", time_s=START_S - 30, process=name)
        supervisor.instant("exit", time_s=died_s + 0.2, process="actor-0", **died, then=then)
        supervisor.instant("start", time_s=died_s + 0.25, process="actor-0-r1")
        supervisor.close()
    for step in range(1, steps + 1):
        begin = START_S + STEP_S * (step - 1)
        if step % 2:
            learner.instant("issue", time_s=begin, tickets=4, step=step - 1)
        if step not in unfinished:
            _update(learner, begin, step)
        for name, timeline in lines.items():
            is_new = name.endswith("-r1")
            if killed and ((name == "actor-0" and begin + 1.1 > died_s) or (is_new and begin < died_s + 2.5)):
                continue
            for lane in range(2):
                about = {"ticket": f"{step:09d}.{lane}", "kind": "train", "round": (step - 1) // 2}
                timeline.instant("begin", time_s=begin + 0.1, lane=lane, **about)
                if step in unfinished:
                    continue
                timeline.span("rollout", begin + 0.1, begin + 0.7 + 0.1 * lane, lane=lane, tokens=80, **about)
                timeline.span(
                    "reward", begin + 0.7 + 0.1 * lane, begin + 0.9 + 0.1 * lane, lane=lane, reward=0.5, **about
                )
            if step % 2 == 0 and step not in unfinished:
                timeline.span("pause", begin + 1.91, begin + 1.95, version=f"0:{step}", load_s=0.02)
    if hangs:  # what still says something says nothing of that
        learner.instant("checkpoint", time_s=START_S + STEP_S * (steps + 4), step=steps - 1)
    for timeline in (learner, *lines.values()):
        timeline.close()


def _update(learner: Timeline, begin: float, step: int) -> None:
    learner.span("train", begin + 1.0, begin + 1.4, step=step - 1, groups="1")
    learner.span("apply", begin + 1.5, begin + 1.7, step=step, epoch=0)
    if step % 2 == 0:
        learner.span("publish", begin + 1.75, begin + 1.9, lane=1, step=step)
