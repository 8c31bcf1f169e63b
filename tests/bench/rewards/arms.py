"""A way to compute rewards, in a real actor: its loop, scheduler, workers, sandboxes, store; the engine is paced."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32

from actor.admission import Admission
from actor.engine_protocol import PartialSample, Sample
from actor.loop import Actor, ActorLimits
from actor.rewards.adaptive_timeout import AdaptiveTimeouts
from actor.rewards.scorer import RewardResult, RewardScorer
from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierPool
from actor.rewards.verifiers.judge import JudgeCounts
from actor.weight_updates import BACKGROUND_TASKS
from actor.weights.client import WeightClient
from actor.weights.source import LocalSource
from bridge.rollout_types import Sampling, Task, Ticket, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from bridge.timeline import Timeline
from launch.tools.plan.profile import EngineProfile
from tests.bench.rewards.workload import FACTOR, MAX_TOKENS, SAMPLES, T_MAX_S, T_MIN_S, TOKENS_PER_S, Workload
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.replay import ReplayEngine
from tests.bridge.factories import make_ticket
from tests.bridge.snapshots.whole import write_whole

SYNCHRONOUS, FIXED, ADAPTIVE = "synchronous", "asynchronous", "asynchronous, adaptive timeout"
OWN = "adaptive, own solutions first"
ARMS = (SYNCHRONOUS, FIXED, ADAPTIVE, OWN)
_VERSION = Version(incarnation=0, step=0)
_TABLE = {"a": ("float32", (4,))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One round of one arm, in seconds of the bench."""

    epoch: int
    round: int
    kind: str
    """short or long."""
    rollout_s: float
    """Until the last response ended."""
    combined_s: float
    """Until the last reward was known."""
    verdicts: dict[str, int]
    right_timed_out: int
    """Right answers that were found to have run out of time."""

    @property
    def exposed_s(self) -> float:
        """What rewards added to the rollout."""
        return self.combined_s - self.rollout_s


class Answering(ReplayEngine):
    """Paced responses of the workload's lengths; their first tokens say which answer they are."""

    def __init__(self, workload: Workload) -> None:
        places = workload.size.prompts * SAMPLES
        speed = TOKENS_PER_S * workload.size.speed
        profile = EngineProfile(
            running=(1.0, float(max(2, places))), tokens_per_s=(speed, speed * max(2, places)), max_num_seqs=places
        )
        self._paced = PacedEngine(profile, version=_VERSION)
        super().__init__(self._paced, None)
        self._workload = workload
        self.last_end_s = 0.0

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        assert begun is None  # the actors of a bench hand nothing over
        index = int(request_id.split(".")[1].partition("+")[0])
        length = max(4, self._workload.lengths(int(prompt_tokens[1])).tokens(prompt_tokens, index))
        replayed = dataclasses.replace(sampling, max_tokens=length)
        sample = await self._paced.sample(prompt_tokens, replayed, request_id=request_id, priority=priority)
        self.last_end_s = time.monotonic()
        tokens = sample.tokens.copy()
        tokens[:4] = [*prompt_tokens, index]
        return dataclasses.replace(sample, tokens=tokens, finish="stop")


class Clocked:
    """The scheduler under test, watched; with `at_once` rewards begin when all responses of a round have ended."""

    def __init__(self, rewards: RewardScorer, num_responses: int, *, at_once: bool) -> None:
        self._rewards, self._num_responses, self._at_once = rewards, num_responses, at_once
        self.begin_round()

    def begin_round(self) -> None:
        """What was counted is forgotten."""
        self._num_ended = 0
        self._all_ended = asyncio.Event()
        self.all_judged = asyncio.Event()
        self.last_end_s = 0.0
        self.judged: list[tuple[str, str]] = []
        """Answers and their verdicts."""

    @property
    def num_failures(self) -> int:
        return self._rewards.num_failures

    judge_counts = JudgeCounts()

    def begin(self, task: Task) -> None:
        self._rewards.begin(task)

    async def score(self, response: Response, task: Task) -> RewardResult:
        self._num_ended += 1
        if self._num_ended == self._num_responses:
            self._all_ended.set()
        if self._at_once:
            await self._all_ended.wait()
        judgement = await self._rewards.score(response, task)
        self.last_end_s = time.monotonic()
        self.judged.append((response.text, judgement.scores[0].verdict))
        if len(self.judged) == self._num_responses:
            self.all_judged.set()
        return judgement

    async def close(self) -> None:
        await self._rewards.close()


async def run_arm(arm: str, workload: Workload, pool: VerifierPool, root: pathlib.Path) -> AsyncGenerator[Step]:
    """Runs a round of all epochs each time that it is asked for one; the pool is left open."""
    size = workload.size
    num_responses = size.prompts * SAMPLES
    with _parts(root) as (store, timeline):
        anchors = AdaptiveTimeouts(
            store, factor=FACTOR, min_s=T_MIN_S / size.sleep_speed, max_s=T_MAX_S / size.sleep_speed
        ) if arm in (ADAPTIVE, OWN) else None  # fmt: skip
        rewards = Clocked(RewardScorer(pool, anchors=anchors), num_responses, at_once=arm == SYNCHRONOUS)
        engine: Any = Answering(workload)

        def read(ticket: Ticket, sample: Sample) -> Response:
            del ticket
            epoch, round_, prompt, index = (int(t) for t in sample.tokens[:4])
            text = workload.answer(epoch, round_, prompt, index)
            return Response(text=text, finish=sample.finish, num_tokens=sample.num_sampled)

        source = LocalSource(
            root / "snapshots", root / "copy" / "weights", run="r", tokenizer_hash="t", expected=_TABLE
        )
        actor = Actor(
            "actor-0",
            store=store,
            engine=engine,
            weights=WeightClient(source, engine, timeline=timeline),
            rewards=rewards,  # pyright: ignore[reportArgumentType]
            read=read,
            admission=Admission("fifo", max_sequences=num_responses, samples_per_group=SAMPLES),
            timeline=timeline,
            limits=ActorLimits(lease_s=600.0),
        )
        with contextlib.closing(SnapshotWriter(root / "snapshots", run="r", tokenizer_hash="t")) as writer:
            write_whole(writer, _VERSION, {"a": np.zeros(4, np.float32)}, dtype="float32")
            serving = asyncio.create_task(actor.run(BACKGROUND_TASKS))
            try:
                for epoch, round_ in itertools.product(range(size.epochs), range(len(size.period))):
                    yield await _step(
                        workload, epoch, round_, store, engine, rewards, serving, has_solutions=arm == OWN
                    )
            finally:
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                    await serving
                if anchors is not None:
                    await anchors.close()
                await engine.close()


async def _step(
    workload: Workload, epoch: int, round_: int, store: SqliteStore, engine: Answering, rewards: Clocked,
    serving: "asyncio.Task[None]", *, has_solutions: bool,
) -> Step:  # fmt: skip
    rewards.begin_round()
    began = time.monotonic()
    store.put_tickets(
        _ticket(workload, epoch, round_, prompt, has_solutions=has_solutions) for prompt in range(workload.size.prompts)
    )
    judging = asyncio.create_task(rewards.all_judged.wait())
    await asyncio.wait({judging, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not judging.done():
        judging.cancel()
        serving.result()
        raise RuntimeError("the actor ended")
    kinds = {
        workload.answer(epoch, round_, prompt, sample)
        for prompt in range(workload.size.prompts)
        for sample in range(SAMPLES)
        if workload.kind(epoch, round_, prompt, sample) == "right"
    }
    return Step(
        epoch=epoch,
        round=round_,
        kind=workload.size.period[round_],
        rollout_s=engine.last_end_s - began,
        combined_s=rewards.last_end_s - began,
        verdicts=dict(collections.Counter(verdict for _, verdict in rewards.judged)),
        right_timed_out=sum(text in kinds and verdict == "timeout" for text, verdict in rewards.judged),
    )


def _ticket(workload: Workload, epoch: int, round_: int, prompt: int, *, has_solutions: bool) -> Ticket:
    order = (epoch * len(workload.size.period) + round_) * workload.size.prompts + prompt
    return make_ticket(
        f"{order:06d}",
        round=epoch * len(workload.size.period) + round_,
        order=order,
        prompt_tokens=np.array([epoch, round_, prompt], np.int32),
        task=workload.task(round_, prompt, has_solution=has_solutions),
        num_samples=SAMPLES,
        sampling=Sampling(max_tokens=MAX_TOKENS),
    )


@contextlib.contextmanager
def _parts(root: pathlib.Path) -> Iterator[tuple[SqliteStore, Timeline]]:
    root.mkdir(parents=True)
    with contextlib.ExitStack() as parts:
        store = SqliteStore(root / "store.sqlite")
        parts.callback(store.close)
        timeline = Timeline(root / "events", "actor-0")
        parts.callback(timeline.close)
        yield store, timeline
