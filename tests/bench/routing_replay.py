"""Routing replay (R3) on a mixture of experts: mismatch of engine and learner, and the cost.

    python -m tests.bench.routing_replay [--small]

A tiny Qwen3-MoE (2 layers, 4 experts, 2 per token) whose experts have nearly equal router rows, so that rounding
decides which are chosen; the worst case, which trained routers have for few tokens. Weights, engine and learner are in
bfloat16. The engine samples groups with its routing; the learner recomputes their logprobs, with the engine's experts
and by its own router. Then each side's speed with and without: one engine each, and turns of one learner.

Mismatch is over sampled tokens: KL(mu || pi), its k3 estimate, and the largest |dlogprob|, in nats.
"""

import asyncio
import dataclasses
import functools
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np
from absl import app

from actor.engine_protocol import Sample
from actor.rewards.scorer import NO_REWARD
from actor.serving import build_group
from bridge.rollout_types import Group
from learner.distributed.sharding import make_mesh
from learner.update.packing import PackedBatch, pack_groups
from learner.update.train_step import TrainStep, build_train_step
from tests.bench.harness import estimates, result
from tests.bridge.factories import make_ticket
from tests.integration.support import models
from tests.integration.support.engines import Bench, EngineKind, start_bench

KIND = EngineKind(family="qwen3_moe", tied=False, prefix_caching=True, routing_replay=True, served_dtype="bfloat16")
PROMPT = np.arange(40, dtype=np.int32) + 20
NUM_SAMPLES = 8
NOISE = 1e-3
"""Relative noise between the router rows of experts; bfloat16 rounds by up to 4e-3."""


def main(argv: list[str]) -> None:
    """Measures, writes the results, prints the JSON line."""
    del argv
    num_groups, num_tokens, turns = (1, 48, 1) if result.SMALL.value else (8, 400, 6)
    sampled = {}
    for replays in (False, True):
        with tempfile.TemporaryDirectory(prefix="sluice-routing-") as root:
            kind = dataclasses.replace(KIND, routing_replay=replays)
            bench = start_bench(pathlib.Path(root), kind)
            try:
                groups, rates, weights = sample_groups(bench, num_groups, num_tokens)
                sampled[replays] = rates
                architecture, params = models.learner_params(bench.folder, weights)
            finally:
                bench.close()
    config = dataclasses.replace(
        bench.config, model=dataclasses.replace(bench.config.model, compute_dtype="bfloat16", remat="none")
    )
    without = dataclasses.replace(config, model=dataclasses.replace(config.model, routing_replay=False))
    steps = {r: build_train_step(architecture, c, make_mesh()) for r, c in ((True, config), (False, without))}
    batches = {r: pack(groups, config, steps[r]) for r in steps}
    rows = [{"routing": "replayed" if r else "own", **mismatch(steps[r], params, batches[r])} for r in (True, False)]
    replayed, own = rows
    trained = time_learner(steps, params, batches, turns)
    shape = steps[True].routing
    assert shape is not None
    values: dict[str, Any] = {f"{name}_{row['routing']}": row[name] for row in rows for name in ("kl", "k3", "worst")}
    values |= {
        "worst_ratio": own["worst"] / replayed["worst"],
        "learner_speed_ratio": estimates.ratio(trained[True], trained[False]),
        "engine_speed_ratio": estimates.mean(sampled[True]).value / estimates.mean(sampled[False]).value,
        "bytes_per_token": shape.token_bytes,
    }
    result.finish(
        "routing_replay",
        __doc__,
        values=values,
        aims={"worst_ratio": result.at_least(10.0, "ours")},
        rows=rows,
        columns={
            "routing": "{routing}",
            "KL, nats": "{kl:.2e}",
            "k3, nats": "{k3:.2e}",
            "worst token, nats": "{worst:.3f}",
            "tokens": "{tokens}",
        },
        beside="the engine, then the learner alone",
    )


def sample_groups(bench: Bench, num_groups: int, num_tokens: int) -> tuple[list[Group], list[float], Any]:
    """Groups by weights near ties, the tokens/s of each, and the weights as they are served."""

    async def one() -> tuple[list[Sample], float]:
        start = time.perf_counter()
        samples = await asyncio.gather(*(bench.sample(PROMPT, max_tokens=num_tokens) for _ in range(NUM_SAMPLES)))
        return samples, NUM_SAMPLES * num_tokens / (time.perf_counter() - start)

    change = functools.partial(models.near_ties, seed=1, noise=NOISE)
    version = bench.run(bench.update(change=change))
    bench.run(one())  # warms up
    found = [bench.run(one()) for _ in range(num_groups)]
    ticket = make_ticket(prompt_tokens=PROMPT, num_samples=NUM_SAMPLES)
    groups = [
        build_group(
            ticket, {i: (s, NO_REWARD, None) for i, s in enumerate(samples)}, actor="a", started_s=0.0, finished_s=1.0
        )
        for samples, _ in found
    ]
    served = {name: _rounded(weight) for name, weight in bench.weights[version].items()}
    return groups, [rate for _, rate in found], served


def _rounded(weight: np.ndarray) -> np.ndarray:
    return np.asarray(jax.numpy.asarray(weight).astype("bfloat16").astype("float32"))


def pack(groups: list[Group], config: Any, steps: TrainStep) -> list[PackedBatch]:
    micros = pack_groups(groups, packing=config.packing, loss=config.loss, max_response_tokens=1, routing=steps.routing)
    return [micro.batch for micro in micros]


def mismatch(steps: TrainStep, params: Any, batches: list[PackedBatch]) -> dict[str, float]:
    """Of the learner's logprobs from the engine's."""
    log_w = np.concatenate(
        [(np.asarray(steps.score(params, b)) - b.behavior_logprobs)[np.asarray(b.loss_mask)] for b in batches]
    ).astype(np.float64)
    return {
        "kl": float(-log_w.mean()),
        "k3": float(np.mean(np.expm1(log_w) - log_w)),
        "worst": float(np.abs(log_w).max()),
        "tokens": log_w.size,
    }


def time_learner(
    steps: dict[bool, TrainStep], params: Any, batches: dict[bool, list[PackedBatch]], turns: int
) -> dict[bool, list[float]]:
    """Tokens/s of `accumulate` in each turn, with and without replay."""
    states = {r: step.init(params) for r, step in steps.items()}
    rates: dict[bool, list[float]] = {True: [], False: []}
    num_tokens = sum(int(np.count_nonzero(b.loss_mask)) for b in batches[True])
    for turn in range(-1, turns):
        for r in (True, False) if turn % 2 else (False, True):
            start = time.perf_counter()
            for batch in batches[r]:
                states[r] = steps[r].accumulate(states[r], batch)
            jax.block_until_ready(steps[r].pending)
            if turn >= 0:  # the first compiles
                rates[r].append(num_tokens / (time.perf_counter() - start))
            states[r] = steps[r].discard(states[r])
    return rates


if __name__ == "__main__":
    app.run(main)
