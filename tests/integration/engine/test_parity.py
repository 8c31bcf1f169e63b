"""After every publish the engine's logprobs are the Flax learner's: every family, tied and untied.

Qwen2 and Qwen3, a mixture of experts, and Gemma 3 with windows and two rotations run daily; the rest is nightly.
tests/learner/model/test_decoder.py has the logits of every family daily.
"""

import asyncio
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actor.rewards.scorer import NO_REWARD
from actor.serving import build_group
from bridge.param_names import flatten, unflatten
from bridge.rollout_types import Group, Sampling, Task, Ticket, Version
from learner.distributed.sharding import make_mesh
from learner.model import hf_load as hf_io
from learner.model.decoder import Params
from learner.parity import max_abs_dlogprob
from learner.publish.publisher import Publisher
from learner.update.packing import PackedBatch
from learner.update.train_step import TrainStep, build_train_step
from tests.integration.support.engines import ENGINES, TEMPERATURE, Bench, EngineKind, for_engines

OTHERS = [
    EngineKind(family="qwen3_moe", tied=False),
    EngineKind(family="gemma3_text"),
]
# Each other family, and the other kind of head; Gemma 2 has one kind only.
SLOW = [
    EngineKind(family="qwen2"),
    EngineKind(family="llama", tied=False),
    EngineKind(family="mistral"),
    EngineKind(family="gemma2"),
    EngineKind(family="qwen3_moe"),
    EngineKind(family="llama"),
    EngineKind(family="mistral", tied=False),
    EngineKind(family="gemma3_text", tied=False),
]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.engine,
    for_engines([*ENGINES, *OTHERS, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in SLOW)]),
]

NUM_PUBLISHES = 4
BOUND = 1e-4
SAMPLING = Sampling(max_tokens=48, temperature=TEMPERATURE, ignore_eos=True)


async def sample_group(bench: Bench, version: Version) -> Group:
    prompt = np.random.default_rng(version.step).integers(0, 95, 12).astype(np.int32)
    ticket = Ticket(
        id=f"probe-{version}",
        kind="probe",
        round=0,
        order=-1,
        prompt_tokens=prompt,
        task=Task.judged_by("exact", answer=""),
        num_samples=4,
        num_requests=4,
        sampling=SAMPLING,
        min_version=version,
    )
    requests = [
        bench.engine.sample(prompt, SAMPLING, request_id=f"{ticket.id}.{i}", priority=0)
        for i in range(ticket.num_samples)
    ]
    started_s = time.time()
    members = {i: (sample, NO_REWARD, None) for i, sample in enumerate(await asyncio.gather(*requests))}
    return build_group(ticket, members, actor="actor-0", started_s=started_s, finished_s=time.time())


def moved(params, seed: int, noise: float):
    """Every tensor changes, by far more than a training step would."""
    random = np.random.default_rng(seed)
    leaves = flatten(params)
    return unflatten(
        {k: x + jnp.asarray(noise * random.standard_normal(x.shape).astype(np.float32)) for k, x in leaves.items()}
    )


def scored(steps: TrainStep, weights: Params, batch: PackedBatch) -> np.ndarray:
    return np.asarray(steps.score(weights, batch))


def published_errors(bench: Bench, *, noise: float = 0.05) -> tuple[list[float], list[float]]:
    """Max |dlogprob| of what the engine sampled after each publish: by the weights published, and by those before."""
    config = bench.config
    model_config, params = hf_io.load(bench.folder, dtype="float32")
    steps = build_train_step(model_config, config, make_mesh(tensor=jax.device_count()))
    # The next learner's: other tests published before.
    incarnation = bench.next_version().incarnation + 1
    publisher = Publisher(
        bench.writer, model_config.param_names, config.publish, incarnation=incarnation, dtype="float32"
    )

    async def serve() -> None:
        manifest = await bench.client.prefetch()
        assert manifest is not None and await bench.client.swap(manifest)

    worst, stale = [], []
    older = params
    for step in range(NUM_PUBLISHES):
        publisher.publish(params, step=step)
        publisher.finish()
        bench.run(serve())
        group = bench.run(sample_group(bench, Version(incarnation=incarnation, step=step)))
        assert group.min_step == group.max_step == step
        for weights, found in ((params, worst), (older, stale)):
            score = functools.partial(scored, steps, weights)
            found.append(max_abs_dlogprob(score, group, config.packing))
        older, params = params, moved(params, step, noise)
    return worst, stale


def test_engine_logprobs_are_the_learners_after_every_publish(bench: Bench):
    worst, stale = published_errors(bench)
    print("max |dlogprob| after each publish:", [f"{w:.1e}" for w in worst])
    assert max(worst) <= BOUND
    assert min(stale[1:]) > 0.1  # the check would have seen the weights before
