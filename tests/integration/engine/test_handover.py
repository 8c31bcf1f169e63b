"""64 long responses on a real vLLM engine, whose actor leaves in their middle; transformers is the oracle."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from actor.admission import Admission
from actor.background import shut_down
from actor.engine_protocol import Sample
from actor.loop import Actor, ActorLimits
from actor.rewards.scorer import RewardScorer
from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierPool
from actor.weight_updates import BACKGROUND_TASKS
from bridge.rollout_types import Sampling, Ticket
from bridge.store.open import SqliteStore
from bridge.timeline import Timeline
from tests.actor.fakes import until
from tests.bridge.factories import make_ticket
from tests.integration.support import models
from tests.integration.support.engines import TEMPERATURE, Bench, EngineKind, for_engines

K, NUM_TICKETS, MAX_TOKENS = 8, 8, 200
BOUND = 1e-5
ENGINES = [EngineKind(prefix_caching=True), EngineKind(tied=False, at_publish="abort_and_resume")]
pytestmark = [pytest.mark.integration, pytest.mark.engine, for_engines(ENGINES)]


@contextlib.asynccontextmanager
async def acting(bench: Bench, root: Path, store: SqliteStore, name: str) -> AsyncGenerator[Actor]:
    def read(ticket: Ticket, sample: Sample) -> Response:
        del ticket
        return Response(text="", finish=sample.finish, num_tokens=sample.num_sampled)

    rewards = RewardScorer(VerifierPool(num_workers=1, timeout_s=5.0, retries=0))
    actor = Actor(
        name,
        store=store,
        engine=bench.engine,
        weights=bench.client,
        rewards=rewards,
        read=read,
        admission=Admission("fifo", max_sequences=K * NUM_TICKETS, samples_per_group=K),
        timeline=Timeline(root / "events", name),
        limits=ActorLimits(lease_s=60.0),
    )
    running = asyncio.create_task(actor.run(BACKGROUND_TASKS))
    try:
        yield actor
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await rewards.close()


def test_responses_go_on_at_the_next_actor_and_no_token_is_sampled_twice(bench: Bench, tmp_path: Path):
    async def body():
        store = SqliteStore(tmp_path / "store.sqlite")
        version = await bench.update()
        before = bench.engine.num_sampled_tokens
        store.put_tickets(
            make_ticket(
                f"t{i}",
                order=i,
                prompt_tokens=np.array([20, 21, 22, 23 + i], np.int32),
                num_samples=K,
                sampling=Sampling(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, ignore_eos=True),
            )
            for i in range(NUM_TICKETS)
        )
        middle = before + K * MAX_TOKENS * 9 // 2  # the engine samples one group at a time: in the fifth of eight
        async with acting(bench, tmp_path, store, "first") as actor:
            await until(lambda: bench.engine.num_sampled_tokens >= middle, "half of the fifth group", deadline_s=120)
            await shut_down(actor)
        num_first = bench.engine.num_sampled_tokens - before
        num_groups = len(store.read_groups(after_seq=0, limit=100))
        version = await bench.update(seed=0)  # as after a publish: the rest is of other weights
        async with acting(bench, tmp_path, store, "second"):
            await until(lambda: store.counts()["done"] == NUM_TICKETS, "all groups", deadline_s=120)
        groups = [s.group for s in store.read_groups(after_seq=0, limit=100)]
        store.close()
        return version, num_first, num_groups, bench.engine.num_sampled_tokens - before, groups

    version, num_first, num_groups, num_sampled, groups = bench.run(body())
    assert num_groups < NUM_TICKETS and len(groups) == NUM_TICKETS
    rollouts = [(g, r) for g in groups for r in g.rollouts]
    assert num_first < num_sampled == sum(r.tokens.size for _, r in rollouts) == K * NUM_TICKETS * MAX_TOKENS
    assert {g.actor for g in groups} - {"first", "second"} == {"first&second"}
    mixed = [(g, r) for g, r in rollouts if 0 < np.count_nonzero(r.token_versions == version.step) < r.tokens.size]
    assert mixed
    for group, rollout in rollouts:
        for step in np.unique(rollout.token_versions):
            weights = next(w for v, w in bench.weights.items() if v.step == step)
            tokens = np.concatenate([group.prompt_tokens, rollout.tokens])
            logprobs = models.reference_logprobs(bench.folder, weights, tokens, temperature=TEMPERATURE)
            is_of = rollout.token_versions == step
            difference = np.abs(logprobs[group.prompt_tokens.size - 1 :] - rollout.behavior_logprobs)[is_of]
            assert difference.max() <= BOUND
