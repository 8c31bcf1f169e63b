"""The simulated engine itself: what it makes fits its stamps through updates, and it finds a mixture."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.engine_protocol import EngineDeadError, Sample, WeightLoadError
from bridge.rollout_types import Sampling, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.network.simulated import ledger, model
from tests.integration.network.simulated.engine import MIXTURE, SimulatedEngine

TABLE = model.table(num_tensors=4, num_bytes=4096)
KEYS: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}


class Published:
    """Versions, as an actor finds them in its mirror."""

    def __init__(self, root: Path) -> None:
        self.file = root / "copy" / "weights"
        self._writer = SnapshotWriter(root / "snapshots", **KEYS)
        self._mirror = VerifiedCopy(root / "snapshots", self.file, **KEYS)

    def write(self, step: int, **changed: np.ndarray):
        version = Version(incarnation=1, step=step)
        tensors = model.weights(version, TABLE) | {k.replace("_", "."): v for k, v in changed.items()}
        manifest = self._writer.write(version, tensors, dtype="float32")
        self._mirror.fetch(manifest)
        return manifest


def make_engine() -> SimulatedEngine:
    return SimulatedEngine(expected=TABLE, max_num_seqs=8, token_s=0.001, pause_s=0.01)


async def sample(engine: SimulatedEngine, name: str, num_tokens: int) -> Sample:
    return await engine.sample(np.array([1], np.int32), Sampling(max_tokens=num_tokens), request_id=name, priority=0)


def test_tokens_fit_their_stamps_through_updates_in_flight(tmp_path: Path):
    published, engine = Published(tmp_path), make_engine()

    async def run() -> Sample:
        await engine.swap_weights(published.file, published.write(1))
        running = asyncio.create_task(sample(engine, "a", 60))
        for step in (2, 3):
            tokens = engine.num_sampled_tokens
            while engine.num_sampled_tokens < tokens + 10:
                await asyncio.sleep(0.001)
            await engine.swap_weights(published.file, published.write(step))
        result = await running
        await engine.close()
        return result

    made = asyncio.run(run())
    steps = [v.step for v in made.token_versions]
    assert set(steps) == {1, 2, 3} and steps == sorted(steps)
    assert made.tokens.tolist() == [20_000 + step for step in steps]


@pytest.mark.parametrize("index", [0, 100, 255])
def test_engine_given_two_versions_in_one_snapshot_ends_and_says_so(tmp_path: Path, index: int):
    published, engine = Published(tmp_path), make_engine()
    (name, (_, shape)) = list(TABLE.items())[2]
    mixed = np.full(shape, 20_002, np.float32)
    mixed[index] = 20_001

    async def run() -> None:
        await engine.swap_weights(published.file, published.write(1))
        running = asyncio.create_task(sample(engine, "a", 10**6))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match=MIXTURE):
            await engine.swap_weights(published.file, published.write(2, **{name.replace(".", "_"): mixed}))
        with pytest.raises(EngineDeadError, match=MIXTURE):
            await running

    asyncio.run(run())
    assert engine.is_dead


def test_engine_whose_memory_changes_under_it_finds_it_and_its_tokens_show_it(tmp_path: Path):
    published, engine = Published(tmp_path), make_engine()

    async def run() -> None:
        await engine.swap_weights(published.file, published.write(1))
        running = asyncio.create_task(sample(engine, "a", 10**6))
        await asyncio.sleep(0)
        next(iter(engine._weights.values()))[-1] = 20_002
        with pytest.raises(EngineDeadError, match=MIXTURE):
            await running

    asyncio.run(run())


def test_engine_refuses_another_models_snapshot(tmp_path: Path):
    published = Published(tmp_path)
    engine = SimulatedEngine(
        expected=model.table(num_tensors=5, num_bytes=4096), max_num_seqs=8, token_s=0.001, pause_s=0.01
    )
    with pytest.raises(WeightLoadError):
        asyncio.run(engine.swap_weights(published.file, published.write(1)))
    assert engine.version is None


@pytest.mark.parametrize(
    ("tokens", "versions", "is_wrong"),
    [
        ([20_003, 20_003, 20_004], [3, 3, 4], False),
        ([20_003, 20_004, 20_004], [3, 3, 4], True),
        ([40_003, 40_003, 40_004], [3, 3, 4], True),
        ([0, 0, 0], [0, 0, 0], True),
    ],
)
def test_group_whose_tokens_are_not_of_their_stamps_is_found(tokens: list[int], versions: list[int], is_wrong: bool):
    rollout = make_rollout(tokens=np.array(tokens, np.int32), token_versions=np.array(versions, np.int32))
    group = make_group(make_ticket(num_samples=1), rollouts=(rollout,), incarnation=2)
    assert (model.check_tokens(group) is not None) == is_wrong


def test_ledger_finds_what_is_lost_double_or_foreign():
    def entries(*tickets: str) -> list[ledger.Entry]:
        return [ledger.Entry(t, 1, "a", 0, 0, 0.0) for t in tickets]

    ledger.check_exactly_once(entries("a", "b"), ["a", "b"])
    for wrong, said in ((("a", "b", "a"), "twice"), (("a",), "lost"), (("a", "b", "c"), "never asked for")):
        with pytest.raises(AssertionError, match=said):
            ledger.check_exactly_once(entries(*wrong), ["a", "b"])
