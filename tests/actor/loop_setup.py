"""An actor's loop with a made-up engine, a real store, real snapshots and real verifier workers."""

import asyncio
import contextlib
import dataclasses
import pathlib
from typing import Any

import numpy as np

from actor.admission import Admission, Policy
from actor.engine_protocol import Sample
from actor.environments.episode import Episodes
from actor.loop import Actor, ActorLimits, BackgroundTask
from actor.rewards.scorer import RewardScorer
from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierPool
from actor.teacher_servers import TeacherServers
from actor.weight_updates import BACKGROUND_TASKS
from actor.weights.client import WeightClient
from actor.weights.source import LocalSource
from bridge import timeline
from bridge.heartbeat_types import ActorReport
from bridge.rollout_types import Ticket, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from bridge.timeline import Timeline
from tests.actor.fakes import FakeEngine, until
from tests.bridge.factories import make_ticket
from tests.bridge.snapshots.whole import write_whole

TABLE = {"a": ("float32", (4,))}
LIMITS = ActorLimits(lease_s=30.0, heartbeat_s=0.01)


@dataclasses.dataclass
class Setup:
    root: pathlib.Path
    store: SqliteStore
    writer: SnapshotWriter
    engine: FakeEngine
    actor: Actor
    rewards: RewardScorer

    def publish(self, step: int, incarnation: int = 0) -> Version:
        version = Version(incarnation=incarnation, step=step)
        write_whole(self.writer, version, {"a": np.full(4, step, np.float32)}, dtype="float32")
        return version

    def restart_learner(self, base_steps: dict[int, int]) -> None:
        """Another learner publishes from here on; its incarnations began at these steps."""
        self.writer.close()
        self.writer = SnapshotWriter(self.root / "snapshots", run="r", tokenizer_hash="t", base_steps=base_steps)

    def put(self, *orders: int, **fields) -> None:
        self.store.put_tickets(ticket(o, **fields) for o in orders)

    def groups(self, kind: str = "train"):
        return [s.group for s in self.store.read_groups(after_seq=0, limit=1000, kind=kind)]

    def report(self) -> ActorReport:
        """Of its last heartbeat."""
        (beat,) = self.store.heartbeats()
        assert beat.report is not None
        return beat.report

    def events(self, name: str) -> list[str]:
        """The versions of the event log's entries of a name so far."""
        return [e["args"]["version"] for e in timeline.read(self.root / "events") if e["name"] == name]

    def running(self) -> list[str]:
        return sorted(self.engine.running)

    async def served(self, version: Version) -> None:
        await until(lambda: self.engine.version == version, f"{version} is served")

    async def runs(self, *request_ids: str) -> None:
        await until(lambda: self.running() == sorted(request_ids), f"{request_ids} run")

    @contextlib.asynccontextmanager
    async def serving(self, *more: BackgroundTask):
        task = asyncio.create_task(self.actor.run((*BACKGROUND_TASKS, *more)))
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await task
            await self.rewards.close()


def ticket(order: int, **fields) -> Ticket:
    return make_ticket(f"t{order}", order=order, **({"num_samples": 2} | fields))


def make_setup(
    root: pathlib.Path,
    *,
    auto: bool = False,
    policy: Policy = "frontier",
    width: int = 2,
    tickets_per_group: int = 1,
    limits: ActorLimits = LIMITS,
    command: tuple[str, ...] = (),
    name: str = "actor-0",
    drain_before_swap: bool = False,
    max_lag_steps: int | None = None,
    episodes: Episodes | None = None,
    teachers: TeacherServers | None = None,
) -> Setup:
    engine = FakeEngine(auto=auto)
    store = SqliteStore(root / "store.sqlite")
    events = Timeline(root / "events", name)
    weights = WeightClient(
        LocalSource(
            root / "snapshots",
            root / f"copy-{name}" / "weights",
            run="r",
            tokenizer_hash="t",
            expected=TABLE,
        ),
        engine,
        timeline=events,
    )
    extra: dict[str, Any] = {"command": command} if command else {}
    rewards = RewardScorer(VerifierPool(num_workers=1, timeout_s=5.0, retries=0, **extra))
    actor = Actor(
        name,
        store=store,
        engine=engine,
        weights=weights,
        rewards=rewards,
        read=read_bytes,
        admission=Admission(
            policy, width=width, max_sequences=8, samples_per_group=2, tickets_per_group=tickets_per_group
        ),
        timeline=events,
        limits=limits,
        drain_before_swap=drain_before_swap,
        max_lag_steps=max_lag_steps,
        episodes=episodes,
        teachers=teachers,
    )
    writer = SnapshotWriter(root / "snapshots", run="r", tokenizer_hash="t")
    return Setup(root, store, writer, engine, actor, rewards)


def read_bytes(ticket: Ticket, sample: Sample) -> Response:
    """A response whose tokens are characters."""
    del ticket
    text = bytes(sample.tokens[slice(*sample.turns[-1])].astype(np.uint8)).decode()
    return Response(text=text, finish=sample.finish, num_tokens=sample.num_sampled)


def failure(group: BaseException | None) -> BaseException | None:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def ended(task: asyncio.Task) -> BaseException | None:
    await asyncio.wait({task})
    return failure(task.exception())


def make_setup_beside(other: Setup, name: str, **fields) -> Setup:
    other.writer.close()  # one writer a folder
    s = make_setup(other.root, name=name, **fields)
    other.writer = s.writer
    return s
