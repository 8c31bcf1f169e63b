"""The planner's input, measured in the rig: so the planner can be checked against what the bench measured.

Nothing of the measured sessions goes in but their configs and lengths, which were drawn before.
"""

import dataclasses
import statistics
from typing import Any

import numpy as np

from bridge.store.sqlite_database import LOOK_S
from configs.schema import Config
from configs.sections import AdmissionConfig
from launch.tools.profile_machine.measure_engine import counts_up_to
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session

_NUM_REQUESTS, _LONGEST = 256, 16
"""Of one to so many tokens each, to tell what a request costs; and twice as many."""
_REPEATS = 3


def measure_profile(
    rig: Rig,
    config: Config,
    *,
    results: list[Result],
    lengths: Lengths,
    num_groups: int,
    engine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A profile as `launch/tools/plan/profile.py` reads it.

    Training and publishing are taken from sessions that ran beside the engine as the measured ones do, but none of
    those: what the planner is to predict must not be in its input.

    Args:
      rig: has run a session.
      results: of the calibration, or of other warm sessions before the measured ones, at their training cost.
      num_groups: prompts whose lengths the profile lists, in the order of their tickets.
      engine: its part of the profile, if its speeds were measured before.
    """
    if engine is None:
        counts = counts_up_to(config.actor.max_num_seqs)
        engine = rig.ask_actor("profile", counts=counts, num_tokens=min(64, config.sampling.max_response_tokens))
    engine = engine | {"request_s": request_s(rig, config, engine)}
    prompts = [np.asarray(p, np.int32) for p in rig.prompts(config, num_groups)]
    num_requests = config.rounds.requests_per_group
    return {
        "engine": engine,
        "response_tokens": {
            "kind": "groups",
            "groups": [[lengths.tokens(p, i) for i in range(num_requests)] for p in prompts],
        },
        "prompt_tokens": {"kind": "groups", "groups": [[p.size] for p in prompts]},
        "learner": learner_costs(results),
        "publish": publish_costs(results),
        "claim_s": LOOK_S / 2,
    }


def request_s(rig: Rig, config: Config, engine: dict[str, Any]) -> float:
    """What a request costs beside its tokens, from the ticket to the group in the store: seconds of the engine's core.

    The rig's actor has one core for its engine and for all that it does with a response: while a response is claimed,
    started, judged and stored, the engine waits. That costs least where many responses end at once, so it is taken from
    rounds of short responses of different lengths, served by the whole actor: what the second half of a round of twice
    as many takes, less its tokens and prompts.
    """
    num_groups = -(-_NUM_REQUESTS // config.rounds.samples_per_group)

    def once() -> float:
        short, long = (_round_of(rig, config, n) for n in (num_groups, 2 * num_groups))
        took_s, num_requests, num_tokens, num_prompt_tokens = np.subtract(long, short).tolist()
        decode_s = num_tokens / engine["tokens_per_s"][-1] + num_prompt_tokens * engine["prefill_s_per_token"]
        return (took_s - decode_s) / num_requests

    return max(statistics.median([once() for _ in range(1 + _REPEATS)][1:]), 0.0)  # the first try warms up


def _round_of(rig: Rig, config: Config, num_groups: int) -> tuple[float, int, int, int]:
    """Returns (seconds, requests, response tokens, prompt tokens) of a round's rollout."""
    rounds = dataclasses.replace(
        config.rounds,
        groups_per_round=num_groups,
        groups_per_update=num_groups,
        train_start="round_complete",
        overprovision_prompts=1.0,
        overprovision_samples=1.0,
    )
    publish = dataclasses.replace(config.publish, when="round_end", at_publish="keep", kv_cache="keep")
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, num_updates=1),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=0),
        rounds=rounds,
        admission=AdmissionConfig(policy="fifo", unit=config.admission.unit),
        publish=publish,
    )
    lengths = Lengths(kind="uniform", max_tokens=_LONGEST)
    result = rig.run(Session(config=config, lengths=lengths))
    served, judged = _spans(result, "rollout"), _spans(result, "reward")
    took_s = max(end for _, end in judged) - min(start for start, _ in served)
    num_samples = config.rounds.samples_per_group
    prompts = [np.asarray(p, np.int32) for p in rig.prompts(config, num_groups)]
    num_tokens = sum(lengths.tokens(p, i) for p in prompts for i in range(num_samples))
    return took_s, num_groups * num_samples, num_tokens, num_samples * sum(p.size for p in prompts)


def limited(engine: dict[str, Any], places: int) -> dict[str, Any]:
    """The profile of an engine of which only so many places are used."""
    kept = [(h, rate) for h, rate in zip(engine["running"], engine["tokens_per_s"], strict=True) if h <= places]
    running, rates = zip(*kept, strict=True)
    return engine | {"running": list(running), "tokens_per_s": list(rates), "max_num_seqs": places}


def learner_costs(results: list[Result]) -> dict[str, Any]:
    """Returns the `learner` part of a profile; a token's seconds are the training spans' over the real tokens."""
    events = [e for r in results for e in r.events]
    train_s = sum(e["dur"] for e in events if e["name"] == "train") / 1e6
    return {
        "seconds_per_token": train_s / sum(r.real_tokens for r in results),
        "optimizer_step_s": statistics.median(e["dur"] / 1e6 for e in events if e["name"] == "apply"),
    }


def publish_costs(results: list[Result]) -> dict[str, float]:
    """Returns the `publish` part of a profile, medians over the publishes of these runs and over engines.

    The first of a run, which maps cold memory and finds the actors idle, is left out where there are others.
    """
    exports, gaps, pauses = [], [], []
    for result in results:
        published = sorted(_spans(result, "publish"))
        counted = published[1:] or published
        exports += [end - start for start, end in counted]
        for start, end in _spans(result, "pause"):
            if start >= counted[0][0]:
                pauses.append(end - start)
                gaps.append(start - max(e for s, e in published if s <= start))
    return {
        "export_s": statistics.median(exports),
        "prefetch_s": max(0.0, statistics.median(gaps)),
        "pause_s": statistics.median(pauses),
    }


def _spans(result: Result, name: str) -> list[tuple[float, float]]:
    """(start, end) of the event log's spans of that name, in seconds."""
    return [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in result.events if e["name"] == name]
