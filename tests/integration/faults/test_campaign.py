"""The campaign's pure parts: what is drawn, how a phase is met, what history survives, and the small engine's model."""

import ast
import asyncio
import collections
import inspect
import json
import pathlib
import sys
import threading
import time
import types
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from launch import actor
from tests.integration.faults import campaign, watched_actor
from tests.integration.faults.audit import _abandoned, surviving
from tests.integration.faults.decoder import Shape, log_softmax, next_logits
from tests.integration.faults.evidence import Life, Update
from tests.integration.faults.gates import FOLDER, PROCESS, Gates, reach
from tests.integration.faults.progress import Progress
from tests.integration.faults.schedule import (
    ENGINE,
    HANDOVER,
    OF_ACTORS,
    OF_LEARNERS,
    SERVER,
    STORE,
    VLLM,
    Fault,
    Phase,
    draw,
)
from tests.integration.faults.site import Site
from tests.integration.faults.store_process import StoreProcess
from tests.integration.support import models
from tests.integration.support.processes import wait_until


def test_draw_same_seed_same_faults_in_the_same_order_and_another_seed_another_order():
    kinds = [[(f.kind, f.target, f.phase) for f in draw(s, num_learners=2, has_vllm=True)] for s in (7, 7, 8)]
    assert draw(7, num_learners=2, has_vllm=True) == draw(7, num_learners=2, has_vllm=True)
    assert kinds[0] == kinds[1] != kinds[2]


def test_draw_three_seeds_have_two_hundred_faults_and_every_kind_and_phase_three_times():
    faults = [f for seed in (1, 2, 3) for f in draw(seed, num_learners=2, has_vllm=True)]
    assert len(faults) >= 200
    drawn = collections.Counter((f.kind, _role(f.target), f.phase) for f in faults)
    assert min(drawn.values()) >= 3
    for kind in ("kill", "stop"):
        wanted = {(kind, f"learner-{i}", phase) for i in range(2) for phase in OF_LEARNERS}
        wanted |= {(kind, role, phase) for role in ("small", VLLM) for phase in OF_ACTORS}
        wanted |= {(kind, ENGINE, "generating"), (kind, ENGINE, "swapping"), (kind, SERVER, "prefetching")}
        wanted |= {(kind, STORE, "emitting"), (kind, STORE, "saving"), (kind, "small", HANDOVER)}
        assert wanted <= drawn.keys()
    assert {(kind, role, "generating") for kind in ("leave", "resize") for role in ("small", VLLM)} <= drawn.keys()
    others = {"partition", "slow link", "full disk", "corrupt checkpoint", "corrupt chunk", "clock jump"}
    assert others <= {f.kind for f in faults}


def _role(target: str) -> str:
    if target.startswith(SERVER):
        return SERVER
    return "small" if target in ("a", "b") else target.replace("a-", "actor-").replace("b-", "actor-")


def test_small_engine_is_started_with_what_an_actor_gives(monkeypatch):
    monkeypatch.setitem(sys.modules, "actor.vllm.engine", None)  # put back afterwards
    watched_actor.use_numpy_engine()
    takes = inspect.signature(sys.modules["actor.vllm.engine"].VllmEngine.start)
    (call,) = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(actor)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "VllmEngine.start"
    )
    takes.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})


def test_surviving_leaves_out_what_a_later_learner_went_back_behind():
    def life(incarnation: int, begins_at: int, *steps: int) -> Life:
        return Life(incarnation, begins_at, tuple(Update(s, ((f"{incarnation}:{s}",),)) for s in steps))

    history = surviving([life(0, 0, 1, 2, 3), life(1, 2), life(2, 2, 3, 4, 5, 6), life(3, 4, 5)])
    assert [u.groups for u in history] == [["0:1"], ["0:2"], ["2:3"], ["2:4"], ["3:5"]]


def test_gate_holds_the_process_in_the_named_phase_alone_until_it_is_opened(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(PROCESS, "p")
    gates = Gates(tmp_path)
    told: list[str] = []

    def work() -> None:
        told.append(reach("emitting", "begin"))
        told.append(reach("swapping", "begin"))

    gates.shut("p", "swapping", "begin")
    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: gates.holds("p"), "it stands in its phase")
    assert told == [""]
    gates.open("p", "corrupt")
    thread.join()
    assert told == ["", "corrupt"] and reach("swapping", "begin") == ""


def test_lane_hits_the_start_that_a_fault_asked_for_and_waits_for_both_before_the_next(monkeypatch: pytest.MonkeyPatch):
    phases: tuple[Phase, ...] = ("applying", "restoring", "accumulating")
    killed = [f for f in draw(1, num_learners=1, has_vllm=False) if f.lane == "learner" and f.kind == "kill"]
    faults = [next(f for f in killed if f.phase == phase) for phase in phases]
    happened: list[str] = []
    is_hit = {phase: asyncio.Event() for phase in phases}

    async def inject(site: Site, fault: Fault) -> None:
        happened.append(fault.phase)
        is_hit[fault.phase].set()

    class Lane(campaign.Campaign):
        async def _hold(self, fault: Fault, *, after_life: int) -> None:
            happened.append("in its start" if after_life >= 0 else "alone")

        async def _survive(self, fault: Fault, *, life: int, passed_s: float) -> None:
            await is_hit["restoring"].wait()
            happened.append(f"survived {fault.phase}")

    monkeypatch.setattr(campaign, "inject", inject)
    site = types.SimpleNamespace(progress=types.SimpleNamespace(num_lives=1))
    asyncio.run(Lane(cast(Site, site), faults, minutes=1)._run_lane("learner"))
    survived = happened[4:6]
    assert happened[:4] == ["alone", "applying", "in its start", "restoring"]
    assert sorted(survived) == ["survived applying", "survived restoring"]
    assert happened[6:] == ["alone", "accumulating", "survived accumulating"]


def test_corrupt_checkpoint_is_survived_by_the_learner_that_reads_it(monkeypatch: pytest.MonkeyPatch):
    (fault,) = (f for f in draw(1, num_learners=1, has_vllm=False) if f.kind == "corrupt checkpoint")
    progress, lives = types.SimpleNamespace(num_lives=1), list[int]()

    async def inject(site: Site, fault: Fault) -> None:
        pass

    class Lane(campaign.Campaign):
        async def _hold(self, fault: Fault, *, after_life: int) -> None:
            progress.num_lives = 2  # its log is read before it reads the checkpoint

        async def _survive(self, fault: Fault, *, life: int, passed_s: float) -> None:
            lives.append(life)

    monkeypatch.setattr(campaign, "inject", inject)
    site = types.SimpleNamespace(progress=progress)
    asyncio.run(Lane(cast(Site, site), [fault], minutes=1)._run_lane("learner"))
    assert lives == [1]


def test_group_trained_by_a_learner_that_was_thrown_away_does_not_show_that_what_came_after_is_survived(tmp_path):
    given = [("t", time.time() + 60)]  # the ticket's second group
    store = types.SimpleNamespace(ask=lambda question, *values: given)
    progress = Progress(tmp_path, cast(StoreProcess, store))
    events = [{"ph": "M"}, {"ph": "X", "name": "train", "args": {"groups": "t"}}]
    events.append({"ph": "X", "name": "apply", "args": {"step": 1}})

    def has_trained(after_life: int) -> bool:
        progress.look()
        return asyncio.run(progress.has_trained(made_after_s=0.0, by=None, after_life=after_life))

    _write(tmp_path / "learner.jsonl", events)
    assert not has_trained(0)
    given[0] = ("t", time.time() - 60)
    assert has_trained(0) and not has_trained(1)
    _write(tmp_path / "learner.jsonl", events)
    assert has_trained(1)


def _write(file: pathlib.Path, events: list[dict]) -> None:
    with open(file, "a") as lines:
        lines.writelines(json.dumps(event) + "\n" for event in events)


@pytest.mark.heavy
def test_decoder_gives_the_logprobs_of_transformers(tmp_path):
    folder = models.make_folder(tmp_path / "model", family="qwen3", tied=True)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 90, size).astype(np.int32) for size in (5, 9, 13)]
    weights = models.read_weights(folder)
    logits = next_logits(Shape.read(folder), weights, [s[:-1] for s in sequences])
    got = log_softmax(logits / np.float32(0.7))
    for sequence, row in zip(sequences, got, strict=True):
        wanted = models.reference_logprobs(folder, weights, sequence, temperature=0.7)
        assert abs(row[sequence[-1]] - wanted[-1]) < 1e-5


@pytest.mark.parametrize(
    ("versions", "incarnation", "older", "restores", "num_abandoned"),
    [
        ([4, 4, 5, 5], 1, [(0, 5)], {0: 0, 1: 3}, 4),  # 0:4, 0:5 and 1:5: which 5 is whose can't be told
        ([3, 4, 5, 6], 1, [(0, 5)], {0: 0, 1: 3}, 2),
        ([3, 4, 5, 6], 1, [(0, 3)], {0: 0, 1: 3}, 0),
        ([4, 5], 0, [], {0: 0, 1: 3}, 2),
        ([4, 5, 6, 7], 2, [(0, 4), (1, 6)], {0: 0, 1: 4, 2: 5}, 1),
        ([4, 5, 6, 7], 2, [(0, 4), (1, 6)], {0: 0, 1: 4, 2: 6}, 0),
        ([4, 5, 6, 7], 2, [(0, 4), (1, 6)], {0: 0, 1: 4, 2: 6, 3: 5}, 2),
    ],
)
def test_auditor_counts_tokens_of_abandoned_weights_behind_newer_ones(
    versions, incarnation, older, restores, num_abandoned
):
    evidence: Any = SimpleNamespace(restores=restores)
    group = {
        "incarnation": incarnation,
        "older_versions": [{"incarnation": i, "step": s} for i, s in older],
        "rollouts": [{"token_versions": ["<i4", np.array(versions, np.int32).tobytes()]}],
    }
    assert _abandoned(evidence, group) == num_abandoned
