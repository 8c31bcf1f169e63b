"""Evaluation sets: their problems, and that nothing trains on them."""

import dataclasses

import pytest

from configs import sections
from configs.sections import EvaluationSet
from configs.sections.teacher import Teacher
from learner.data.open_sources import open_sources
from learner.data.prompt_stream import load_prompts
from learner.evaluation.eval_sets import all_sets, bad_rows, open_own_sets, questions_of
from tests.learner.data.rooms import SUMS, config_of, jsonl, rows_of, take


def with_sets(config, num_problems=5, **sets):
    evaluation = sections.EvaluationConfig(num_problems=num_problems, sets=sets)
    return dataclasses.replace(config, evaluation=evaluation)


def opened(config, tokenizer):
    own = open_own_sets(config, tokenizer)
    sources = open_sources(config, tokenizer, evaluated=questions_of(own))
    return {s.name: s for s in all_sets(config, own, [p for one in sources for p in one.held_out])}


def test_sets_have_the_problems_of_their_own_sources_or_the_held_out_ones(tmp_path, tokenizer):
    file = EvaluationSet(path=jsonl(tmp_path, rows_of(9, start=500), "set.jsonl"), k=2)
    first = dataclasses.replace(file, num_problems=4)
    task = EvaluationSet(**SUMS, num_problems=6, max_tokens=20)
    few = EvaluationSet(temperature=0.0, num_problems=3)
    config = with_sets(config_of(path=jsonl(tmp_path, rows_of(200))), file=file, first=first, task=task, few=few)
    sets = opened(config, tokenizer)
    assert list(sets) == ["heldout", "few", "file", "first", "task"]  # the held-out one first
    assert {n: len(s.problems) for n, s in sets.items()} == {"heldout": 5, "few": 3, "file": 9, "first": 4, "task": 6}
    assert [p.question for p in sets["file"].problems] == [r["prompt"] for r in rows_of(9, start=500)]
    assert sets["first"].problems[3].question == sets["file"].problems[3].question
    assert [p.question for p in sets["few"].problems] == [p.question for p in sets["heldout"].problems[:3]]
    assert (sets["task"].config.max_tokens, sets["file"].config.max_tokens) == (20, 16) and sets["file"].config.k == 2


def test_evaluated_rows_need_no_teacher_where_trained_ones_do(tmp_path, tokenizer):
    teachers = {"math": Teacher(path="/teacher")}
    config = config_of(
        path=jsonl(tmp_path, [row | {"from": "math"} for row in rows_of(9)]),
        eval_path=jsonl(tmp_path, rows_of(4, start=700), "eval.jsonl"),
    )
    config = dataclasses.replace(
        config,
        prompts=dataclasses.replace(config.prompts, teacher_field="from"),
        loss=sections.LossConfig(advantage="none", teacher_coef=1.0, teachers=teachers),
    )
    file = EvaluationSet(path=jsonl(tmp_path, rows_of(3, start=500), "set.jsonl"))
    sets = opened(with_sets(config, file=file), tokenizer)
    assert {n: len(s.problems) for n, s in sets.items()} == {"heldout": 4, "file": 3}


def test_nothing_trains_on_a_question_that_a_set_asks(tmp_path, tokenizer):
    rows = rows_of(60)
    system = {"role": "system", "content": "Be brief."}
    chats = [[system, {"role": "user", "content": f" {r['prompt']}\n"}] for r in rows[10:20]]
    asked = EvaluationSet(path=jsonl(tmp_path, [{"prompt": c, "answer": 1} for c in chats], "set.jsonl"))
    config = with_sets(config_of(path=jsonl(tmp_path, rows), num_updates=1), asked=asked)
    own = open_own_sets(config, tokenizer)
    stream, _, _ = load_prompts(config, tokenizer, evaluated=questions_of(own))
    trained = set(take(stream, 120))
    assert len(trained) > 30 and not trained & {r["prompt"] for r in rows[10:20]}
    without, _, _ = load_prompts(config, tokenizer)
    assert set(take(without, 120)) & {r["prompt"] for r in rows[10:20]}


def test_rows_of_a_set_that_are_none_are_set_aside_and_a_prompt_has_room_for_its_own_response(tmp_path, tokenizer):
    rows = [{"prompt": "x" * 30, "answer": 1}, "torn", {"prompt": "x" * 50, "answer": 2}, {"prompt": "y", "answer": 3}]
    path = jsonl(tmp_path, rows, "set.jsonl")
    config = config_of(path=jsonl(tmp_path, rows_of(100)))  # 64 tokens in all, 16 of a response
    sets = opened(with_sets(config, long=EvaluationSet(path=path, max_tokens=40)), tokenizer)
    assert [p.question for p in sets["long"].problems] == ["y"]
    assert [(b.row, b.path) for b in bad_rows(sets.values())] == [(1, path), (2, path), (3, path)]
    short = opened(with_sets(config, short=EvaluationSet(path=path, max_tokens=10)), tokenizer)["short"]
    assert [p.question[0] for p in short.problems] == ["x", "x", "y"]
    room = r"longer than 1 tokens \(model.max_tokens - evaluation.sets.none.max_tokens\)"
    with pytest.raises(ValueError, match=room):
        opened(with_sets(config, none=EvaluationSet(path=jsonl(tmp_path, rows[::2]), max_tokens=63)), tokenizer)


def test_set_of_the_held_out_problems_that_leaves_no_room_is_refused(tmp_path, tokenizer):
    config = config_of(path=jsonl(tmp_path, rows_of(100)))
    with pytest.raises(ValueError, match=r"evaluation.sets.wide.max_tokens \(60\) and the longest held-out prompt"):
        opened(with_sets(config, wide=EvaluationSet(max_tokens=60)), tokenizer)


@pytest.mark.heavy
def test_set_that_can_not_be_read_is_refused_by_its_own_name(tmp_path, tokenizer):
    config = config_of(path=jsonl(tmp_path, rows_of(100)))
    few = EvaluationSet(
        task="chain_sum", task_args=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1), num_problems=500
    )
    with pytest.raises(
        ValueError, match=r"evaluation.sets.few.task='chain_sum' has only .* evaluation.sets.few.num_problems"
    ):
        opened(with_sets(config, few=few), tokenizer)
