"""A fresh `Actor` for each session on engines that outlive it, and the process that serves sessions so."""

import asyncio
import contextlib
import os
import pathlib
from typing import Any

from absl import logging

from actor.admission import Admission
from actor.loop import Actor, ActorLimits
from actor.responses import ResponseReader
from actor.rewards.scorer import RewardScorer
from actor.rewards.verifier_pool import VerifierPool
from actor.weight_updates import BACKGROUND_TASKS
from actor.weights.client import WeightClient
from actor.weights.model_folder import ModelFolder, read_model_folder
from actor.weights.source import LocalCopy, LocalSource
from bridge.device_turns import HELPER, LEARNER, EngineTurn
from bridge.store.open import SqliteStore
from bridge.text.chat_template import read_chat_template
from bridge.timeline import Timeline
from configs import overrides
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch import cli
from launch.tools.profile_machine.profile_worker import RpcServer
from tests.bench.rig.load import LoadLog
from tests.bench.rig.replay import HashRewards, ReplayEngine
from tests.bench.rig.session import Session


class Server:
    """Answers requests one after the other; a subclass has the engines."""

    def __init__(self, parent: RpcServer) -> None:
        self.parent = parent
        self.model: ModelFolder | None = None
        self._serving: list[asyncio.Task[None]] = []
        self._load: LoadLog | None = None

    async def start(self, config: Config) -> None:
        """Starts what outlives the sessions."""

    async def engines(self, session: Session) -> list[ReplayEngine]:
        """Returns the engines of a session; each gets an actor of its own."""
        raise NotImplementedError

    async def end(self) -> dict[str, Any]:
        """Ends what a session had; returns what there is to tell beside the load."""
        return {}

    async def close(self) -> None:
        """Ends what `start` started."""

    async def run(self) -> None:
        while (request := await asyncio.to_thread(self.parent.receive)) is not None:
            self.parent.answer(await getattr(self, f"do_{request.pop('do')}")(**request))
        await self.close()

    async def do_start_engine(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        parsed = overrides.from_dict(config)
        self.model = read_model_folder(pathlib.Path(model_folder), dtype=parsed.model.served_dtype)
        await self.start(parsed)
        return {}

    async def do_begin(self, session: dict[str, Any], first: int) -> dict[str, Any]:
        """Starts serving a session's store; the first actor's number is `first`."""
        parsed = Session.from_json(session)
        assert self.model is not None
        for index, engine in enumerate(await self.engines(parsed)):
            load = None
            if index == 0:  # of many engines one: each look costs all of them
                load = self._load = LoadLog(lambda engine=engine: engine.stats)
            task = asyncio.create_task(serve(f"actor-{first + index}", parsed, engine, self.model, load))
            task.add_done_callback(self._on_end)
            self._serving.append(task)
        return {}

    async def do_end(self) -> dict[str, Any]:
        """Stops serving; what is in progress is given up. Returns the first engine's load meanwhile."""
        for task in self._serving:
            task.cancel()
        for task in self._serving:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert self._load is not None
        self._serving = []
        return {"running": self._load.seen} | await self.end()

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.error("session failed", exc_info=error)
            self.parent.fail(error)


def run_server(server: type[Server], core: str | None) -> None:
    """Serves requests until there are no more, on one core if one is given."""
    if core is not None:
        os.sched_setaffinity(0, {int(core)})
    parent = RpcServer()
    cli.log_to_stderr()
    try:
        asyncio.run(server(parent).run())
    except BaseException as e:
        logging.error("the rig's actor ends", exc_info=e)
        parent.fail(e)
        raise


async def serve(name: str, session: Session, engine: Any, model: ModelFolder, load: LoadLog | None) -> None:
    """Serves a session's store until it is cancelled; the `ReplayEngine` is left as it is, and `load` looks at it."""
    config = session.config
    snapshots = snapshot_folder(config)
    with contextlib.ExitStack() as parts:
        copy = parts.enter_context(contextlib.closing(LocalCopy(snapshots, name)))
        store = parts.enter_context(contextlib.closing(SqliteStore(RunFolder(session.folder).store)))
        timeline = parts.enter_context(contextlib.closing(Timeline(RunFolder(session.folder).events, name)))
        source = LocalSource(
            snapshots,
            copy.file,
            run=run_id(session.folder),
            tokenizer_hash=model.tokenizer_hash,
            expected=model.tensors,
        )
        weights = parts.enter_context(contextlib.closing(WeightClient(source, engine, timeline=timeline)))
        rewards = _rewards(session)
        turn = await _turn(config, session.folder, name)
        actor = Actor(
            name,
            store=store,
            engine=engine,
            weights=weights,
            rewards=rewards,  # pyright: ignore[reportArgumentType]
            read=ResponseReader(model.tokenizer, read_chat_template(model.path)),
            admission=Admission.of(config),
            timeline=timeline,
            limits=ActorLimits(lease_s=config.actor.lease_s),
            drain_before_swap=config.publish.at_publish == "drain",
            max_lag_steps=config.max_lag_steps if config.publish.when == "every" else None,
        )
        actor.turn = turn
        watching = asyncio.create_task(load.watch()) if load is not None else None
        try:
            await actor.run(BACKGROUND_TASKS)
        finally:
            if watching is not None:
                watching.cancel()
            await engine.settle()
            await rewards.close()


async def _turn(config: Config, folder: pathlib.Path, name: str) -> EngineTurn | None:
    """Waits for the devices that an engine shares; as in `launch.supervision.placement`, the helper's are the last."""
    if not config.shares_devices:
        return None
    is_helper = int(name.removeprefix("actor-")) >= config.actor.num_engines - config.helpers.num_engines
    if not is_helper and not config.actor.colocated:
        return None
    turn = EngineTurn(folder, HELPER if is_helper else LEARNER)
    await turn.take()
    return turn


def _rewards(session: Session) -> RewardScorer | HashRewards:
    if session.rewards == "hash":
        return HashRewards(session.flat_share)
    config = session.config
    pool = VerifierPool(
        num_workers=config.actor.verifier_workers,
        timeout_s=config.actor.verifier_timeout_s,
        settings=config.rewards,
        own=config.custom_verifiers,
    )
    return RewardScorer(pool, truncated=config.prompts.truncated_responses)
