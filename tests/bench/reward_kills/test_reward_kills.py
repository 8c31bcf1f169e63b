"""The bench of kills: its auditor finds what it is to find, and it runs."""

import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from bridge import codec
from bridge.rollout_types import Group, RewardScore, Rollout
from bridge.store.open import SqliteStore
from bridge.store.sql import ticket_rows
from tests.bench.reward_kills import truth
from tests.bench.reward_kills.audit import Characters, Evidence, Verdict, audit
from tests.bench.reward_kills.campaign import num_forgotten, ticket_states
from tests.bench.reward_kills.truth import EPISODE, JUDGE, NUM_TURNS, WORKER
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.support.processes import REPO

PAD, EOS = 96, 97
CHARACTERS = Characters({i: chr(32 + i) for i in range(95)} | {95: "\n"}, {PAD: "<pad>", EOS: "<eos>"}, EOS)


def tokens(text: str) -> list[int]:
    return [95 if c == "\n" else ord(c) - 32 for c in text]


def rollout(parts: Sequence[tuple[list[int], bool]], **fields) -> Rollout:
    whole = np.asarray([t for part, _ in parts for t in part], np.int32)
    sampled = np.asarray([is_sampled for part, is_sampled in parts for _ in part], np.bool_)
    return make_rollout(whole.size, tokens=whole, loss_mask=sampled, **fields)


def judged(source: str, text: str, value: float | None = None) -> Rollout:
    value = truth.earned(source, text) if value is None else value
    scores = (RewardScore(name=source, value=value, verdict="ok" if value else "wrong"),)
    return rollout([([*tokens(text), EOS], True)], reward=value, scores=scores)


def episode(*texts: str, **turn: float) -> Rollout:
    rewards = [turn.get(f"turn_{i}", truth.turn_earned(i, text)) for i, text in enumerate(texts)]
    parts = itertools.chain(*(((([*tokens(t), EOS], True)), (tokens("\n+1="), False)) for t in texts))
    return rollout(list(parts)[:-1], reward=sum(rewards), turn_rewards=np.asarray(rewards, np.float32))


def group(ticket: str, source: str, *rollouts: Rollout) -> Group:
    prompt = np.asarray(tokens(next(truth.prompts(source))[0]), np.int32)
    return make_group(make_ticket(ticket, order=int(ticket), prompt_tokens=prompt), rollouts=rollouts)


GOOD = (
    group("1", WORKER, judged(WORKER, "12"), judged(WORKER, "")),
    group("2", JUDGE, judged(JUDGE, "12"), judged(JUDGE, "x = 3")),
    group("3", EPISODE, episode("1", "2", "3"), episode("", "7<", "12")),
)


def verdict_of(*groups: Group, updates: Sequence[Sequence[str]] | None = None, **tickets: str) -> Verdict:
    """Of a run that trained these; each update's mean is what the rewards that it trained say."""
    rewards = {g.ticket_id: [r.reward for r in g.rollouts] for g in groups}
    rows = [
        {"step": i, "groups": list(ids), "reward/mean": np.mean([r for t in ids for r in rewards[t]])}
        for i, ids in enumerate(updates or [[g.ticket_id] for g in groups], 1)
    ]
    states = {g.ticket_id: "acknowledged" for g in groups} | tickets
    payloads = {g.ticket_id: codec.encode(g) for g in groups}
    return audit(Evidence(rows=rows, payloads=payloads, tickets=states), CHARACTERS)


def with_first(one: Group, first: Rollout) -> Group:
    return dataclasses.replace(one, rollouts=(first, *one.rollouts[1:]))


def test_run_as_it_should_be_is_clean_and_counted():
    found = verdict_of(*GOOD, updates=[["1", "3"], ["2"]])
    assert found.is_clean and found.examples == []
    assert (found.num_updates, found.num_groups, found.num_responses, found.num_turns) == (2, 3, 6, 6)
    assert found.by_source == {WORKER: 1, JUDGE: 1, EPISODE: 1}


@pytest.mark.parametrize(
    "bad",
    [
        with_first(GOOD[0], judged(WORKER, "12", 0.0)),
        with_first(GOOD[1], judged(JUDGE, "12", 0.0)),
        with_first(GOOD[2], episode("1", "2", "3", turn_1=0.0)),
    ],
    ids=[WORKER, JUDGE, EPISODE],
)
def test_reward_of_0_in_place_of_the_true_one_is_found(bad: Group):
    others = [g for g in GOOD if g.ticket_id != bad.ticket_id]
    found = verdict_of(bad, *others)
    # The response's reward and its score; of an episode one turn's.
    assert found.zero_rewards == (1 if bad.ticket_id == "3" else 2) and found.wrong_rewards == 1
    assert found.wrong_means == 1 and not found.is_clean


def test_turn_that_was_cut_off_earns_nothing_and_that_is_right():
    first, between = ([*tokens("1"), EOS], True), (tokens("\n+1="), False)
    rewards = np.asarray([truth.turn_earned(0, "1"), 0.0], np.float32)
    parts = [first, between, (tokens("2345"), True)]
    found = verdict_of(with_first(GOOD[2], rollout(parts, reward=float(rewards[0]), turn_rewards=rewards)))
    assert found.is_clean
    alone = rollout([(tokens("2345"), True)], reward=0.0, turn_rewards=np.zeros(1, np.float32))
    assert verdict_of(with_first(GOOD[2], alone)).is_clean


@pytest.mark.parametrize(
    "bad",
    [
        with_first(GOOD[0], judged(WORKER, "13", truth.earned(WORKER, "13") % 1 + truth.LEAST)),
        with_first(GOOD[1], dataclasses.replace(GOOD[1].rollouts[0], reward=GOOD[1].rollouts[0].reward + 0.25)),
        with_first(GOOD[1], dataclasses.replace(GOOD[1].rollouts[0], scores=())),
        with_first(GOOD[2], rollout([([*tokens("1"), EOS], True)], reward=truth.turn_earned(0, "1"))),
    ],
    ids=["another level", "reward is not its score", "no score", "no turn's reward"],
)
def test_reward_that_is_another_than_the_true_one_is_found(bad: Group):
    found = verdict_of(bad)
    assert found.wrong_rewards == 1 and found.zero_rewards == 0


def test_group_that_was_trained_twice_is_found():
    found = verdict_of(*GOOD, updates=[["1", "2"], ["3", "1"]])
    assert found.trained_twice == 1 and found.num_groups == 3 and not found.is_clean


def test_group_that_is_acknowledged_and_was_not_trained_is_lost_but_not_one_that_is_open_or_given_up():
    found = verdict_of(*GOOD, **{"4": "acknowledged", "5": "open", "6": "failed", "7": "done"})
    assert found.lost == 1 and not found.is_clean


@pytest.mark.parametrize(("num_forgotten", "lost"), [(0, 0), (1, 0), (2, 1)])
def test_tickets_that_the_store_only_counts_are_lost_beyond_those_trained(num_forgotten: int, lost: int):
    evidence = Evidence(
        rows=[{"step": 1, "groups": ["1", "2"], "reward/mean": 0.0}],
        payloads={},
        tickets={"2": "acknowledged", "3": "open"},
        num_forgotten=num_forgotten,
    )
    assert audit(evidence, CHARACTERS).lost == lost


def test_tickets_of_a_store_that_forgets_are_its_known_ones_and_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(ticket_rows, "KEPT_ORDERS", 2)
    path = tmp_path / "store.db"
    with contextlib.closing(SqliteStore(path)) as store:
        assert (ticket_states(path), num_forgotten(path)) == ({}, 0)
        for order in range(8):
            ticket = make_ticket(str(order), order=order)
            store.put_tickets([ticket])
            store.put_group(make_group(ticket))
            store.acknowledge([ticket.id])
        known = ticket_states(path)
        assert num_forgotten(path) == 8 - len(known) > 0
        assert known == {str(order): "acknowledged" for order in range(num_forgotten(path), 8)}


def test_mean_reward_of_the_learner_that_is_not_its_groups_is_found():
    evidence = Evidence(
        rows=[{"step": 1, "groups": ["1"], "reward/mean": 0.0}],
        payloads={"1": codec.encode(GOOD[0])},
        tickets={},
    )
    found = audit(evidence, CHARACTERS)
    assert found.wrong_means == 1 and found.wrong_rewards == 0 and not found.is_clean
    assert audit(dataclasses.replace(evidence, payloads={}), CHARACTERS).unrecorded == 1


def test_auditor_reads_special_tokens_as_the_actor_does():
    assert CHARACTERS.plain([*tokens("1"), PAD, 123, *tokens("2"), EOS]) == "12"
    assert CHARACTERS.action([*tokens("1"), PAD, EOS]) == "1<pad>" and CHARACTERS.action([EOS, PAD]) == "<eos><pad>"


def test_no_response_earns_nothing_and_sources_differ():
    texts = [f"{i} = {i}" for i in range(500)]
    levels = {source: [truth.earned(source, t) for t in texts] for source in (WORKER, JUDGE, EPISODE)}
    assert all(collections.Counter(of).keys() == {0.25, 0.5, 0.75, 1.0} for of in levels.values())
    assert levels[WORKER] != levels[JUDGE] != levels[EPISODE]
    assert [truth.source_of(p) for s in (WORKER, JUDGE, EPISODE) for p, _ in truth.prompts(s)] == [
        s for s in (WORKER, JUDGE, EPISODE) for _ in range(300)
    ]
    assert NUM_TURNS * 4 + (NUM_TURNS - 1) * 4 < 24  # turns and observations fit into the budget


@pytest.mark.integration
@pytest.mark.engine
@pytest.mark.nightly
def test_run_goes_on_under_kills_and_trains_nothing_wrong(tmp_path: pathlib.Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.reward_kills", "--minutes=1.5", f"--results_dir={tmp_path}"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["bench"] == "reward_kills" and line["values"]["kills"] >= 10
    # In so short a time not every kind hits somebody at work; what must be none is none, and it went on.
    must = {k: a for k, a in line["aims"].items() if not k.startswith("failures_of_")}
    assert all(aim["met"] for aim in must.values()), line
    assert json.loads((tmp_path / "reward_kills.json").read_text())["bench"] == "reward_kills"
