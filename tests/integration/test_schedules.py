"""Every way to schedule, in a real learner process with a made-up actor: what is trained, what is asked for again.

The actor answers in random order, by the weights that are announced, so lags and races are the learner's own doing.
Daily runs a schedule by rounds and one by window, both killed, the ESS stop and the full queue. The rest is nightly;
tests/learner/schedule has their rules as properties.
"""

import collections
import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from bridge.rollout_types import Group, Ticket, Version
from bridge.snapshots.snapshot_format import latest
from tests.integration.test_resume import NUM_UPDATES, answer, run_to_the_end

pytestmark = pytest.mark.integration
UNINTERRUPTED = pytest.param(None, marks=pytest.mark.nightly)


class Answers:
    """By the announced weights, or by `lag` steps older ones; a few at a time, in random order."""

    def __init__(self, snapshots: Path, *, lag: int = 0) -> None:
        self._snapshots, self._rng, self._lag = snapshots, random.Random(0), lag
        self._version: Version | None = None
        self._held: list[tuple[Ticket, int]] = []
        """With the step that each began at."""
        self._waiting: list[Ticket] = []
        self._late: set[str] = set()
        """Tickets whose first answer was as old as this actor likes; the next is fresh."""

    def __call__(self, tickets: list[Ticket]):
        self._waiting += tickets
        manifest = next((latest(folder) for folder in self._snapshots.glob("sluice-*")), None)
        if manifest is not None:
            self._version = manifest.version
        if self._version is None:
            return
        version = self._version
        self._held += [(t, version.step) for t in self._waiting if t.min_version <= version]
        self._waiting = [t for t in self._waiting if t.min_version > version]
        self._rng.shuffle(self._held)
        for _ in range(min(len(self._held), self._rng.randint(1, 6))):
            ticket, began = self._held.pop()
            if ticket.kind == "train" and ticket.id not in self._late:
                self._late.add(ticket.id)
                began = max(0, began - self._lag)
            yield self._answer(ticket, began, version.step, version.incarnation)

    def _answer(self, ticket: Ticket, began: int, step: int, incarnation: int) -> Group:
        group = answer(ticket)
        began = min(began, step)  # a restarted learner may have gone back behind it
        if ticket.kind != "train":
            began = step
        return dataclasses.replace(
            group,
            incarnation=incarnation,
            rollouts=tuple(
                dataclasses.replace(
                    r,
                    token_versions=np.linspace(began, step, r.tokens.size).astype(np.int32),
                    reward=float(i % 2),
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


@pytest.mark.parametrize("kill_at", [UNINTERRUPTED, 4])
def test_tail_batching_trains_whole_rounds_and_long_ones_of_the_losers(
    tmp_path: Path, model: Path, kill_at: int | None
):
    rows = run(
        tmp_path,
        model,
        "rollpacker:tiny",
        kill_at=kill_at,
        rounds__groups_per_round=4,
        rounds__overprovision_prompts=1.5,
    )
    groups = trained(rows)
    # Two of six lose, so each third round is a long one of four: of 8 rounds, 6 are short and 2 are long.
    assert max(map(int, groups)) < 6 * 6 + 2 * 4 and len(groups) == 8 * 4
    sizes = collections.Counter(int(g) // 16 for g in groups)  # 2 short rounds and a long one issue 16 orders, train 12
    assert all(sizes[n] == 12 for n in range(2))


@pytest.mark.parametrize("kill_at", [UNINTERRUPTED, 4])
@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=pytest.mark.nightly), 1.0])
def test_async_ratio_bounds_the_lag(tmp_path: Path, model: Path, alpha: float, kill_at: int | None):
    # The actor's first answers began two steps before what it serves: only what refuses them keeps the bound. After a
    # restart of the learner it holds as before.
    rows = run(
        tmp_path,
        model,
        "roll_flash:tiny",
        kill_at=kill_at,
        answers=dict(lag=2),
        admission__async_ratio=alpha,
    )
    trained(rows)
    assert max(r["lag/max"] for r in rows) <= alpha
    assert rows[-1]["groups/below_min_version"] + rows[-1]["groups/stale"] > 0


def test_ess_floor_stops_the_policy_until_a_batch_by_its_own_weights_is_there(tmp_path: Path, model: Path):
    # The made-up logprobs are far off, so every batch is below the floor; those by the current weights are trained all
    # the same, and nothing else.
    rows = run(
        tmp_path,
        model,
        "pipelinerl:tiny",
        answers=dict(lag=0),
        rounds__ess_floor=0.95,
    )
    trained(rows)
    assert all(r["ess"] < 0.95 for r in rows)
    assert [r["ess_stops"] for r in rows] == list(range(1, NUM_UPDATES + 1))
    assert all(r["lag/max"] == 0 for r in rows)


def test_full_queue_drops_the_oldest_and_generates_them_anew(tmp_path: Path, model: Path):
    rows = run(
        tmp_path,
        model,
        "pipelinerl:tiny",
        admission__sequences=256,
        admission__when_full="drop_oldest",
        admission__queue_groups=4,
    )
    trained(rows)
    assert rows[-1]["groups/overflow"] > 0
    # Of 32 groups that are out, at most 4 wait; the others are by weights that are newer than if they had.
    assert max(r["lag/mean"] for r in rows) < 8
