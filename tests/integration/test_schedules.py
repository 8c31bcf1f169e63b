"""Every way to schedule, in a real learner process with a made-up actor: what is trained, what is asked for again.

The actor answers in random order, by the weights that are announced, so lags and races are the learner's own doing.
"""

import collections
import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from bridge.snapshots.writer import latest
from bridge.types import Group, Ticket
from tests.integration.support.models import make_folder
from tests.integration.test_resume import NUM_UPDATES, answer, run_to_the_end

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)


class Answers:
    """By the announced weights, or by `lag` steps older ones; a few at a time, in random order."""

    def __init__(self, snapshots: Path, *, seed: int = 0, lag: int = 0, flat_share: float = 0.0) -> None:
        self._snapshots, self._rng, self._lag, self._flat_share = snapshots, random.Random(seed), lag, flat_share
        self._held: list[Ticket] = []

    def __call__(self, tickets: list[Ticket]):
        self._held += tickets
        self._rng.shuffle(self._held)
        manifest = next((latest(folder) for folder in self._snapshots.glob("sluice-*")), None)
        for _ in range(min(len(self._held), self._rng.randint(1, 6))):
            ticket = self._held.pop()
            if manifest is None or ticket.min_version > manifest.version:
                self._held.insert(0, ticket)
                return
            yield self._answer(ticket, manifest.version.step, manifest.version.incarnation)

    def _answer(self, ticket: Ticket, step: int, incarnation: int) -> Group:
        group = answer(ticket)
        step = max(ticket.min_version.step, step - (self._lag if ticket.kind == "train" else 0))
        is_flat = self._rng.random() < self._flat_share
        return dataclasses.replace(
            group,
            incarnation=incarnation,
            rollouts=tuple(
                dataclasses.replace(
                    r,
                    token_versions=np.full(r.tokens.size, step, np.int32),
                    reward=1.0 if is_flat else float(i % 2),
                )
                for i, r in enumerate(group.rollouts)
            ),
        )


def run(tmp_path: Path, model: Path, config: str, *, kill_at: int | None = None, answers: dict | None = None, **fields):
    snapshots = tmp_path / "snapshots"
    return run_to_the_end(
        tmp_path / "run",
        model,
        config,
        kill_at=kill_at,
        answers=Answers(snapshots, **(answers or {})),
        publish__snapshot_dir=snapshots,
        **fields,
    )


def trained(rows: list[dict]) -> list[str]:
    assert [r["step"] for r in rows] == list(range(1, NUM_UPDATES + 1))
    groups = [i for r in rows for i in r["groups"]]
    assert len(groups) == len(set(groups))
    return groups


@pytest.mark.parametrize("kill_at", [None, 7])
def test_tail_batching_trains_whole_rounds_and_long_ones_of_the_losers(
    tmp_path: Path, model: Path, kill_at: int | None
):
    rows = run(
        tmp_path,
        model,
        "configs/rollpacker.py:tiny",
        kill_at=kill_at,
        rounds__groups_per_round=4,
        rounds__overprovision_prompts=1.5,
    )
    groups = trained(rows)
    # Two of six lose, so each third round is a long one of four: of 16 rounds, 11 are short and 5 are long.
    assert max(map(int, groups)) < 11 * 6 + 5 * 4 and len(groups) == 16 * 4
    sizes = collections.Counter(int(g) // 16 for g in groups)  # 2 short rounds and a long one issue 16 orders, train 12
    assert all(sizes[n] == 12 for n in range(5))


def test_zero_variance_groups_are_replaced_and_never_trained(tmp_path: Path, model: Path):
    rows = run(tmp_path, model, "configs/cgp.py:tiny", answers=dict(flat_share=0.4), rounds__filter_zero_variance=True)
    assert sorted(trained(rows)) == [f"{i:09d}" for i in range(NUM_UPDATES * 4)]
    assert rows[-1]["groups/zero_variance"] > 0
    assert all(r["reward/zero_variance_groups"] == 0 for r in rows)


def test_single_samples_make_whole_groups_and_lag_is_bounded(tmp_path: Path, model: Path):
    rows = run(
        tmp_path,
        model,
        "configs/roll_flash.py:tiny",
        kill_at=7,
        rounds__overprovision_samples=1.25,
        admission__async_ratio=1.0,
        rounds__max_lag_steps=2,
    )
    trained(rows)
    assert all(r["sequences"] == 4 * 8 for r in rows)
    assert max(r["lag/max"] for r in rows) <= 2


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_async_ratio_bounds_the_lag(tmp_path: Path, model: Path, alpha: float):
    rows = run(
        tmp_path, model, "configs/roll_flash.py:tiny", admission__async_ratio=alpha, rounds__max_lag_steps=int(alpha)
    )
    trained(rows)
    assert max(r["lag/max"] for r in rows) <= alpha
    if alpha == 0:
        assert rows[-1]["groups/stale"] == 0  # nothing is ever issued that would be too old


def test_ess_floor_stops_the_policy_until_a_batch_by_its_own_weights_is_there(tmp_path: Path, model: Path):
    # The made-up logprobs are far off, so every batch is below the floor; those by the current weights are trained all
    # the same, and nothing else.
    rows = run(
        tmp_path,
        model,
        "configs/pipelinerl.py:tiny",
        answers=dict(lag=0),
        rounds__ess_floor=0.95,
    )
    trained(rows)
    assert all(r["ess"] < 0.95 for r in rows)
    assert [r["ess_stops"] for r in rows] == list(range(1, NUM_UPDATES + 1))
    assert all(r["lag/max"] == 0 for r in rows)


def test_ess_floor_that_is_never_reached_changes_nothing(tmp_path: Path, model: Path):
    rows = run(tmp_path, model, "configs/pipelinerl.py:tiny", rounds__ess_floor=1e-9)
    trained(rows)
    assert rows[-1]["ess_stops"] == 0


def test_full_queue_drops_the_oldest_and_generates_them_anew(tmp_path: Path, model: Path):
    rows = run(
        tmp_path,
        model,
        "configs/pipelinerl.py:tiny",
        admission__width=32,
        admission__when_full="drop_oldest",
        admission__queue_groups=4,
    )
    trained(rows)
    assert rows[-1]["groups/overflow"] > 0
    # Of 32 groups that are out, at most 4 wait; the others are by weights that are newer than if they had.
    assert max(r["lag/mean"] for r in rows) < 8
