import dataclasses
import json

import pytest

from actor.rewards.verifier_pool import VerifierError, VerifierPool
from configs import sections
from configs.run_folder import RunFolder
from launch.startup import gold_answers
from launch.startup.gold_answers import check_gold_answers
from learner.data.open_sources import open_sources
from learner.data.row_filter import read_gold_failures, write_gold_failures
from tests.actor.sandbox.conftest import isolated as isolated
from tests.learner.data.rooms import config_of, jsonl, rows_of

ADD = "def f(a, b): return a + b"
LIARS = [3, 11]
"""Rows, from 1, whose answer is none."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))


def checked(config, show=lambda line: None):
    return check_gold_answers(config, ("learner", "actor"), show=show)[0]


def math_rows(tmp_path, liars=LIARS, count=12, **rewards):
    rows = rows_of(count)
    for row in liars:
        rows[row - 1]["answer"] = "$ $"
    config = config_of(path=jsonl(tmp_path, rows), verifier="math")
    return with_rewards(config, tmp_path, **rewards)


def with_rewards(config, tmp_path, **rewards):
    run = dataclasses.replace(config.run, dir=str(tmp_path / "run"))
    return dataclasses.replace(config, rewards=sections.RewardsConfig(**rewards), run=run)


def code_row(n, solution=ADD, **metadata):
    tests = [{"call": "f", "args": [n, 1], "returns": n + 1}, {"call": "f", "args": [n, 0], "returns": n}]
    return {"prompt": f"add {n}", "metadata": {"tests": tests, "solution": solution} | metadata}


@pytest.mark.heavy
def test_row_whose_own_answer_does_not_pass_is_set_aside_with_its_number_and_reason(tmp_path):
    found = checked(math_rows(tmp_path))
    assert set(found) == {""} and sorted(found[""]) == LIARS
    assert all("expected a mathematical expression" in why for why in found[""].values())


@pytest.mark.heavy
def test_sample_that_passes_is_all_that_is_judged_and_one_that_does_not_has_all_judged(tmp_path, monkeypatch):
    judged = []
    judge = gold_answers._judge

    async def counting(pool, row, questions):
        judged.append(row.row)
        return await judge(pool, row, questions)

    monkeypatch.setattr(gold_answers, "_judge", counting)
    assert checked(math_rows(tmp_path, liars=[2], check_gold_answers=3)) == {}
    assert sorted(judged) == [1, 6, 12]
    judged.clear()
    said = []
    found = checked(math_rows(tmp_path, liars=[2, 6], check_gold_answers=3), show=said.append)
    assert sorted(found[""]) == [2, 6]
    assert sorted(judged) == [1, *range(1, 7), 6, *range(7, 13), 12]
    assert said == ["reference answers: 1 of 3 rows fail; checking all 12 rows"]


@pytest.mark.heavy
def test_what_was_judged_is_not_judged_again_until_it_changes(tmp_path, monkeypatch):
    first = checked(math_rows(tmp_path))

    async def must_not(*args):
        raise AssertionError("judged again")

    monkeypatch.setattr(gold_answers, "_judge_all", must_not)
    assert checked(math_rows(tmp_path)) == first
    for changed in ({"liars": [4]}, {"max_timeout_s": 7.0}):
        with pytest.raises(AssertionError, match="judged again"):
            checked(math_rows(tmp_path, **changed))  # pyright: ignore[reportArgumentType]


@pytest.mark.heavy
def test_rows_on_which_workers_break_are_kept_with_a_line_and_asked_again_by_the_next_run(tmp_path, monkeypatch):
    ask = VerifierPool._ask

    async def broken(pool, one, question, timeout_s):
        if question.response is not None:
            raise VerifierError("the worker broke down")
        return await ask(pool, one, question, timeout_s)

    said = []
    with monkeypatch.context() as patched:
        patched.setattr(VerifierPool, "_ask", broken)
        patched.setattr("actor.rewards.verifier_pool.FIRST_PAUSE_S", 0.0)
        assert checked(math_rows(tmp_path), show=said.append) == {}
    assert [line for line in said if "rows not checked" in line] == said[-1:] and "12 rows" in said[-1]
    assert sorted(checked(math_rows(tmp_path))[""]) == LIARS


@pytest.mark.heavy
def test_cache_that_can_not_be_written_is_no_reason_not_to_start(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "file" / "cache"))
    assert sorted(checked(math_rows(tmp_path))[""]) == LIARS


@pytest.mark.heavy
def test_run_that_was_set_up_keeps_what_was_found_then(tmp_path):
    config = math_rows(tmp_path)
    (tmp_path / "run").mkdir()
    write_gold_failures(RunFolder(tmp_path / "run").gold_failures, {"": {7: "because"}})
    assert checked(config) == {"": {7: "because"}}


def test_no_answers_are_judged_where_none_are_to_be(tmp_path):
    assert checked(math_rows(tmp_path, check_gold_answers=0)) == {}
    assert checked(with_rewards(config_of(task="chain_sum"), tmp_path)) == {}


@pytest.mark.heavy
def test_file_no_row_of_which_passes_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="no row passes its verifiers; row 1: .*rewards.check_gold_answers=0"):
        checked(math_rows(tmp_path, liars=list(range(1, 13))))


@pytest.mark.heavy
def test_rows_that_are_not_asked_are_neither_counted_nor_passing(tmp_path):
    only_judged = [row | {"rewards": [{"name": "judge"}]} for row in rows_of(3)]
    config = with_rewards(config_of(path=jsonl(tmp_path, only_judged)), tmp_path)
    assert check_gold_answers(config, ("learner", "actor"))[1] == []
    wrong = [row | {"rewards": [{"name": "math"}], "answer": "$ $"} for row in rows_of(2)]
    with pytest.raises(ValueError, match="no row passes its verifiers"):
        checked(with_rewards(config_of(path=jsonl(tmp_path, only_judged + wrong)), tmp_path))


@pytest.mark.heavy
def test_judges_and_forms_and_penalties_are_not_asked(tmp_path):
    rewards = [{"name": "format", "weight": 0.5}, {"name": "math", "weight": -1.0}, {"name": "exact"}]
    rows = [row | {"rewards": rewards, "answer": "\\frac{", "metadata": {"format": "x"}} for row in rows_of(3)]
    assert checked(with_rewards(config_of(path=jsonl(tmp_path, rows)), tmp_path)) == {}


@pytest.mark.integration
def test_solutions_are_run_and_wrong_and_endless_ones_set_aside(tmp_path, isolated):
    rows = [
        code_row(1),
        code_row(2, solution="def f(a, b): return a"),
        code_row(3, solution="def f(a, b):\n    while True: pass"),
        {"prompt": "no solution", "metadata": {"tests": code_row(4)["metadata"]["tests"]}},
        code_row(5, solution="", solutions=[ADD]),
    ]
    rows[4]["metadata"].pop("solution")
    config = config_of(path=jsonl(tmp_path, rows), verifier="code")
    found = checked(with_rewards(config, tmp_path, min_timeout_s=0.5, max_timeout_s=1.0))
    assert {row: why.rpartition(" ")[2] for row, why in found[""].items()} == {2: "wrong", 3: "timeout"}


@pytest.mark.heavy
def test_verifier_that_can_not_be_had_is_refused_where_an_actor_is_to_run_and_told_of_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no bubblewrap
    config = with_rewards(config_of(path=jsonl(tmp_path, [code_row(1)]), verifier="code"), tmp_path)
    with pytest.raises(ValueError, match="verifier code.*bubblewrap is not installed"):
        checked(config)
    found, (note,) = check_gold_answers(config, ("learner",))
    assert not found
    assert note.startswith("note: reference answers are not checked by verifier code on this machine: ")


@pytest.mark.heavy
def test_rows_set_aside_are_no_problems_and_stand_in_the_quarantine(tmp_path):
    from learner.data.tokenizer import load_tokenizer
    from tests.learner.model_folder import make_model_folder

    config = math_rows(tmp_path, count=40)
    tokenizer = load_tokenizer(make_model_folder(tmp_path / "model"), vocab_size=300)
    config = dataclasses.replace(
        config,
        evaluation=sections.EvaluationConfig(num_problems=0),
        publish=sections.PublishConfig(probe_every_n_publishes=0),
    )
    (opened,) = open_sources(config, tokenizer, gold_failures=checked(config))
    assert [bad.row for bad in opened.bad] == LIARS
    assert all("expected a mathematical expression" in bad.reason for bad in opened.bad)


def test_set_aside_rows_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "gold_failures.json"
    assert read_gold_failures(file) == {}
    written = {"": {3: "wrong"}, "b": {1: "x", 20: "y"}}
    write_gold_failures(file, written)
    assert read_gold_failures(file) == written
    file.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="is not a valid list of quarantined rows"):
        read_gold_failures(file)
