"""A fresh `Actor` on an engine that outlives it, for one session."""

import asyncio
import contextlib

from actor.admission import Admission
from actor.loop import Actor, ActorLimits
from actor.responses import ResponseReader
from actor.rewards.scorer import RewardScorer
from actor.rewards.verifier_pool import VerifierPool
from actor.weight_updates import BACKGROUND_TASKS
from actor.weights.client import WeightClient
from actor.weights.model_folder import ModelFolder
from actor.weights.source import LocalCopy, LocalSource
from bridge.chat_template import read_chat_template
from bridge.store.open import SqliteStore
from bridge.timeline import Timeline
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from tests.bench.rig.load import LoadLog
from tests.bench.rig.replay import HashRewards, ReplayEngine
from tests.bench.rig.session import Session


async def serve(
    name: str,
    session: Session,
    replay: ReplayEngine,
    model: ModelFolder,
    load: LoadLog | None,
    *,
    max_lag_steps: int | None = None,
) -> None:
    """Serves a session's store until it is cancelled; the engine is left as it is.

    Args:
      name: the actor's.
      session: whose.
      replay: the engine.
      model: what it serves.
      load: looks at the engine meanwhile, if it is to.
      max_lag_steps: see `Actor`.
    """
    config = session.config
    snapshots = snapshot_folder(config)
    with contextlib.ExitStack() as parts:
        copy = LocalCopy(snapshots, name)
        parts.callback(copy.close)
        store = SqliteStore(RunFolder(session.folder).store)
        parts.callback(store.close)
        timeline = Timeline(RunFolder(session.folder).events, name)
        parts.callback(timeline.close)
        weights = WeightClient(
            LocalSource(
                snapshots,
                copy.file,
                run=run_id(session.folder),
                tokenizer_hash=model.tokenizer_hash,
                expected=model.tensors,
            ),
            replay,
            timeline=timeline,
        )
        parts.callback(weights.close)
        rewards = _rewards(session, config)
        actor = Actor(
            name,
            store=store,
            engine=replay,
            weights=weights,
            rewards=rewards,  # pyright: ignore[reportArgumentType]
            read=ResponseReader(model.tokenizer, read_chat_template(model.path)),
            admission=Admission.of(config),
            timeline=timeline,
            limits=ActorLimits(lease_s=config.actor.lease_s, max_attempts=config.actor.max_attempts),
            drain_before_swap=config.publish.at_publish == "drain",
            max_lag_steps=max_lag_steps,
        )
        watching = asyncio.create_task(load.watch()) if load is not None else None
        try:
            await actor.run(BACKGROUND_TASKS)
        finally:
            if watching is not None:
                watching.cancel()
            await replay.settle()
            await rewards.close()


def _rewards(session: Session, config: Config) -> RewardScorer | HashRewards:
    if session.rewards == "hash":
        return HashRewards(session.flat_share)
    pool = VerifierPool(
        num_workers=config.actor.verifier_workers,
        timeout_s=config.actor.verifier_timeout_s,
        retries=config.actor.verifier_retries,
        settings=config.rewards,
        own=config.custom_verifiers,
    )
    return RewardScorer(pool, truncated=config.prompts.truncated_responses)
