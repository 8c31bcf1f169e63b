import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import RewardScore, Task
from learner.metrics import sample_record
from learner.metrics.sample_record import (
    PickedGroup,
    SamplePick,
    chosen,
    cut,
    evaluated_record,
    is_episode,
    text_of,
    trained_record,
)
from tests.bridge.factories import make_group, make_rollout, make_ticket

TASK = Task.judged_by("math", answer="12", metadata='{"id": 3}')


def decode(tokens):
    return " ".join(map(str, tokens))


def group_of(*rollouts, **fields):
    return make_group(make_ticket("t", num_samples=len(rollouts)), rollouts=rollouts, **fields)


def trained(group, advantages, step=8, source=""):
    picked = PickedGroup(group=group, task=TASK, source=source, advantages=advantages)
    return trained_record(picked, step=step, decode=decode)


def test_trained_record_has_text_rewards_by_verifier_advantages_versions_and_lag():
    versions = np.array([4, 5, 7], np.int32)
    scores = (RewardScore(name="math", value=1.0, verdict="ok"), RewardScore(name="format", value=0.0, verdict="wrong"))
    first = make_rollout(3, token_versions=versions, scores=scores, reward=0.9)
    group = group_of(first, make_rollout(2, step=7, finish="length", reward=0.0), round=3, actor="a+b")
    got = trained(group, [np.full(3, 0.5, np.float32), np.full(2, -0.5, np.float32)], source="sums")
    want = {
        "kind": "train", "step": 8, "round": 3, "ticket": "t", "source": "sums", "answer": "12",
        "metadata": '{"id": 3}', "prompt": "7 8", "set": "",
    }  # fmt: skip
    assert {name: got[name] for name in want} == want
    one, two = got["responses"]
    # The update that made step 8 began with the weights of step 7: lags 3, 2, 0.
    assert one["lag"] == pytest.approx(5 / 3, abs=1e-4)
    assert (one["lag_max"], one["min_version"], one["max_version"]) == (3, 4, 7)
    assert one["scores"] == {"math": {"value": 1.0, "verdict": "ok"}, "format": {"value": 0.0, "verdict": "wrong"}}
    assert (one["text"], one["reward"], one["advantage"], one["actor"]) == ("0 1 2", 0.9, 0.5, "a")
    assert (two["finish"], two["tokens"], two["lag"], two["advantage"], two["actor"]) == ("length", 2, 0.0, -0.5, "b")


def test_episode_is_told_turn_by_turn_with_what_was_observed_and_each_turns_advantage():
    mask = np.array([True, True, False, True])
    rollout = make_rollout(4, loss_mask=mask, turn_rewards=np.array([0.0, 1.0], np.float32))
    got = trained(group_of(rollout), [np.array([0.5, 0.5, 9.0, -1.0], np.float32)])["responses"][0]
    assert got["turns"] == [
        {"by": "policy", "text": "0 1"},
        {"by": "environment", "text": "2"},
        {"by": "policy", "text": "3"},
    ]
    assert got["turn_advantages"] == [0.5, -1.0] and got["turn_rewards"] == [0.0, 1.0]
    assert (got["tokens"], got["observed_tokens"], got["num_parts"]) == (3, 1, 3)


def test_evaluated_record_has_no_advantage_and_no_lag():
    got = evaluated_record(group_of(make_rollout(2)), TASK, set_name="heldout", step=20, decode=decode)
    assert (got["kind"], got["set"], got["step"]) == ("eval", "heldout", 20)
    assert got["responses"][0]["advantage"] is None and got["responses"][0]["lag"] is None


def test_the_same_prompt_has_the_same_id_and_another_one_another():
    same = [trained(group_of(make_rollout()), [np.zeros(3, np.float32)], step=s)["prompt_id"] for s in (1, 9)]
    other = make_group(
        make_ticket("t", prompt_tokens=np.array([7, 9], np.int32), num_samples=1), rollouts=(make_rollout(),)
    )
    assert same[0] == same[1] != trained(other, [np.zeros(3, np.float32)])["prompt_id"]


def test_of_many_responses_the_best_the_worst_and_some_between_are_kept(monkeypatch):
    monkeypatch.setattr(sample_record, "MAX_RESPONSES", 2)
    rewards = [0.1, 0.9, 0.5, 0.0, 0.3]
    assert chosen(rewards, limit=2) == [1, 3]
    assert chosen(rewards, limit=3) == [1, 3, 4]  # 0.3 is the middle one
    assert chosen(rewards, limit=9) == [0, 1, 2, 3, 4]
    group = group_of(*[make_rollout(1, reward=r) for r in rewards])
    got = trained(group, [np.zeros(1, np.float32)] * 5)
    assert [r["reward"] for r in got["responses"]] == [0.9, 0.0] and got["num_responses"] == 5


def test_long_texts_are_cut_in_their_middle_and_few_of_many_tokens_are_decoded():
    assert cut("x" * 10, 10) == "x" * 10
    assert cut("a" * 60 + "b" * 60, 100) == f"{'a' * 50} [... 20 characters left out ...] {'b' * 50}"
    asked = []

    def counting(tokens):
        asked.append(len(tokens))
        return "y" * len(tokens)

    text = text_of(np.zeros(100_000, np.int32), counting, 200)
    assert asked == [100, 100] and "100000 tokens" in text and len(text) < 300


def test_an_episode_of_very_many_turns_keeps_both_ends():
    mask = np.arange(1000) % 2 == 0
    got = trained(group_of(make_rollout(1000, loss_mask=mask)), [np.zeros(1000, np.float32)])["responses"][0]
    assert got["num_parts"] == 1000 and len(got["turns"]) == 64
    assert got["turns"][0]["text"] == "0" and got["turns"][-1]["text"] == "999"


def test_episode_is_what_an_environment_rewarded_be_it_with_nothing():
    assert not is_episode(make_rollout(3))
    assert is_episode(make_rollout(3, turn_rewards=np.zeros(1, np.float32)))


def picked(number=0):
    group = make_group(make_ticket(f"t{number}"))
    return PickedGroup(
        group=group, task=Task.judged_by("exact", answer="1"), source="", advantages=[np.zeros(3, np.float32)] * 2
    )


@given(st.integers(1, 300), st.integers(0, 40))
def test_pick_keeps_so_many_groups_of_each_round_and_spreads_them(per_round, kept):
    pick = SamplePick(groups_per_round=per_round, kept_per_round=kept)
    wanted = [i for i in range(per_round) if pick.wants(i)]
    assert len(wanted) == min(kept, per_round)
    if wanted:
        gaps = np.diff([-1, *wanted])
        assert gaps.max() - gaps.min() <= 1 and wanted[-1] == per_round - 1


def test_pick_taken_or_dropped_is_gone():
    pick = SamplePick(groups_per_round=4, kept_per_round=2)
    pick.book(picked(0))
    assert [p.group.ticket_id for p in pick.take()] == ["t0"]
    pick.book(picked(1))
    pick.clear()
    assert pick.take() == []


@pytest.mark.parametrize("per_round", [1, 8])
def test_pick_of_nothing_wants_nothing(per_round):
    pick = SamplePick(groups_per_round=per_round, kept_per_round=0)
    assert not any(pick.wants(i) for i in range(per_round))
