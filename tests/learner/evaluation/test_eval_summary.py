import json
import math

import numpy as np
import pytest

from bridge.rollout_types import RewardScore, Task
from learner.data.problem import Problem
from learner.evaluation import eval_summary
from learner.evaluation.eval_summary import held_out_metrics, metrics_of, samples_of, summarize
from learner.metrics.metric_names import meaning
from tests.bridge.factories import make_group, make_rollout, make_ticket

TICKET = make_ticket("e", kind="eval", order=-1)


def scored(*values, answer=None):
    return tuple(RewardScore(name=n, value=v, verdict="ok" if v else "wrong", answer=answer) for n, v in values)


def answered(answer, reward):
    return make_rollout(2, reward=reward, scores=scored(("math", reward), answer=answer))


def summary_of(*groups, num_problems=None, pass_reward=1.0):
    made = [make_group(TICKET, rollouts=g) for g in groups]
    return summarize(made, num_problems=num_problems or len(made), pass_reward=pass_reward)


def test_held_out_metrics_are_means_over_all_rollouts():
    a = make_group(
        TICKET,
        rollouts=(make_rollout(1, reward=0.0, step=7), make_rollout(3, reward=1.0, step=7, num_thinking_tokens=2)),
    )
    b = make_group(
        TICKET,
        rollouts=tuple(
            make_rollout(8, reward=0.5, step=9, finish="length", num_thinking_tokens=n, is_thinking_finished=n < 8)
            for n in (4, 8)
        ),
    )
    got = held_out_metrics("heldout", summarize([a, b], num_problems=5, pass_reward=1.0))
    assert {n: v for n, v in got.items() if "@" not in n} == {
        "eval/reward": 0.5,
        "eval/reward_stderr": 0.0,
        "eval/unscored_problems": 3,
        "eval/version": 7,
        "eval/last_version": 9,
        "eval/response_tokens": 5.0,
        "eval/thinking_tokens": 3.5,
        "eval/thinking_unfinished": 0.25,
        "eval/truncated": 0.5,
    }
    assert {n: v for n, v in got.items() if "@" in n} == {
        "eval/heldout/avg@2": 0.5,
        "eval/heldout/avg@2_stderr": 0.0,
        "eval/heldout/pass@1": 0.25,
        "eval/heldout/pass@1_stderr": 0.25,
        "eval/heldout/pass@2": 0.5,
        "eval/heldout/pass@2_stderr": 0.5,
    }


def test_metrics_tell_verifiers_apart_and_count_turns_and_sampled_tokens_and_all_have_a_meaning():
    mask = np.array([False, True, True, False, True])
    played = make_rollout(
        5, loss_mask=mask, turn_rewards=np.array([0.5, 0.0], np.float32), scores=scored(("math", 1.0), answer="1")
    )
    short = make_rollout(
        1, turn_rewards=np.array([0.5], np.float32), scores=scored(("math", 0.0), ("format", 0.25), answer="")
    )
    plain = make_rollout(2, finish="length")
    summary = summary_of((played, short, plain))
    got = metrics_of("games", summary)
    assert got["eval/games/response_tokens"] == (3 + 1 + 2) / 3 and got["eval/games/truncated"] == 1 / 3
    assert {n: v for n, v in got.items() if "turns" in n or "rewards" in n} == {
        "eval/games/turns": 1.5,
        "eval/games/rewards/math": 0.5,
        "eval/games/rewards/format": 0.25,
    }
    assert dict(summary.verdicts) == {"ok": 2, "wrong": 1, "timeout": 0, "hang": 0, "unscored": 1}
    assert "eval/games/maj@3" in got and math.isnan(got["eval/games/maj@3_stderr"])
    assert [n for n in got if meaning(n) is None] == []
    assert [n for n in held_out_metrics("heldout", summary) if meaning(n) is None] == []
    assert "standard error" in (meaning("eval/games/avg@3_stderr") or "")


def test_a_response_passes_with_at_least_the_reward_asked_for():
    group = tuple(make_rollout(2, reward=r) for r in (0.8, 0.7 + 0.1, 0.2))
    assert summary_of(group, pass_reward=0.8).estimates["pass@1"].value == pytest.approx(2 / 3)
    assert summary_of(group).estimates["pass@1"].value == 0.0


def test_majority_votes_by_the_answers_that_verifiers_read():
    first = (answered("3", 1.0), answered("3", 1.0), answered("4", 0.0))
    second = (answered("5", 0.0), answered("5", 0.0), answered("6", 1.0))
    got = summary_of(first, second)
    assert got.estimates["maj@3"].value == 0.5 and got.notes == ()


def test_majority_is_left_out_where_a_verifier_reads_no_answers_and_that_is_said():
    code = make_rollout(2, reward=1.0, scores=scored(("code", 1.0)))
    got = summary_of((code, code))
    assert "maj@2" not in got.estimates and got.notes == ("maj@2 is missing: code does not report a response's answer",)
    assert "no verifier scored a response" in summary_of((make_rollout(2), make_rollout(2))).notes[0]
    cut = [make_group(TICKET, rollouts=(make_rollout(2, reward=0.0, finish="length"),) * 2)]
    all_cut = summarize(cut, num_problems=1, pass_reward=1.0, reads_answers=True)
    assert all_cut.estimates["maj@2"].value == 0.0 and all_cut.notes == ()  # nobody voted
    assert summary_of((code,)).notes == ()  # of one sample nobody wants it


def test_response_that_was_cut_off_and_not_judged_does_not_vote():
    got = summary_of((make_rollout(2, finish="length"), answered("3", 1.0)))
    assert got.estimates["maj@2"].value == 1.0


def test_groups_of_different_sizes_and_none_are_refused():
    for groups in ([], [(make_rollout(1),), (make_rollout(1), make_rollout(1))]):
        with pytest.raises(ValueError, match="groups must have one size"):
            summary_of(*groups, num_problems=2)


def problems(count):
    task = Task.judged_by("exact", answer="7")
    return {n: Problem(f"question {n}", np.array([n], np.int32), task) for n in range(count)}


def groups(numbers, k=1):
    return {n: make_group(make_ticket("t", kind="eval", num_samples=k, order=-1)) for n in numbers}


@pytest.mark.parametrize(("there", "limit", "wanted"), [(10, 3, [0, 4, 9]), (2, 5, [0, 1]), (4, 0, []), (5, 1, [0])])
def test_samples_are_a_bounded_number_spread_over_the_problems(there, limit, wanted):
    got = samples_of(problems(there), groups(range(there)), str, limit=limit)
    assert [shown["problem"] for shown in got] == wanted
    assert [shown["prompt"] for shown in got] == [f"question {n}" for n in wanted]


def test_samples_leave_out_problems_without_a_group_and_cut_what_is_long():
    long = dict(groups([2]), **{})
    rollout = make_rollout(3, reward=0.5)
    long[2] = make_group(make_ticket("t", kind="eval", order=-1), rollouts=(rollout,) * 20)
    (shown,) = samples_of(problems(4), long, lambda tokens: "x" * 100_000, limit=8)
    assert shown["problem"] == 2 and len(shown["responses"]) == eval_summary.MAX_SHOWN_SAMPLES
    assert len(shown["responses"][0]["text"]) < eval_summary.MAX_CHARS + 100 and shown["answer"] == "7"
    json.dumps(shown, allow_nan=False)
