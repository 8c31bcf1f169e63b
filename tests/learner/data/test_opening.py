import dataclasses
from typing import Any

import pytest

from configs import sections
from configs.sections.prompts import PromptSource
from learner.data import generated
from learner.data.open_sources import open_sources
from learner.data.problem import Problem, is_held_out
from tests.learner.data.rooms import SUMS, config_of, jsonl, parquet, rows_of


def open_one(config, tokenizer, **how):
    (opened,) = open_sources(config, tokenizer, **how)
    return opened


def trained(opened):
    return [opened.problems[i].question for i in range(len(opened.problems))]


def problem_at(opened, index):
    problem = opened.problems[index]
    assert isinstance(problem, Problem)
    return problem


def held(opened):
    return [p.question for p in opened.held_out]


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("prompts source=")]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_open_file_keeps_the_rows_order_and_numbers_what_is_set_aside(tmp_path, tokenizer, write):
    rows = [*rows_of(3), {"prompt": None, "answer": 4}, *rows_of(3, start=3)]
    opened = open_one(config_of(path=write(tmp_path, rows), num_problems=0), tokenizer)
    wanted = [r["prompt"] for r in rows_of(6) if not is_held_out(r["prompt"], 10)]
    assert trained(opened) == wanted and [b.row for b in opened.bad] == [4]
    problem = problem_at(opened, 0)
    assert tokenizer.decode(problem.prompt_tokens) == problem.question == wanted[0]


def test_open_file_splits_by_text_whatever_the_seed_and_the_order(tmp_path, tokenizer):
    rows = rows_of(200)
    again = [*reversed(rows), *rows[:50]]  # repeated rows fall on the same side
    one = open_one(config_of(path=jsonl(tmp_path, rows), num_problems=256), tokenizer)
    two = open_one(config_of(path=jsonl(tmp_path, again, "b.jsonl"), num_problems=256, seed=5), tokenizer)
    assert not set(trained(one)) & set(held(one))
    assert len(trained(one)) + len(held(one)) == 200 and one.bad == ()
    assert set(held(one)) == set(held(two)) and set(trained(one)) == set(trained(two))
    assert 5 <= len(held(one)) <= 40  # one in ten


def test_open_file_eval_rows_never_train_even_with_other_blanks(tmp_path, tokenizer):
    rows = rows_of(10)
    evals = [{"prompt": f"  {rows[3]['prompt']}\n", "answer": 6}, *rows_of(2, start=50)]
    rows.append({"prompt": rows[4]["prompt"] + " ", "answer": 8})
    eval_path = jsonl(tmp_path, [*evals, rows[4], "torn"], "eval.jsonl")
    opened = open_one(config_of(path=jsonl(tmp_path, rows), eval_path=eval_path), tokenizer)
    assert len(held(opened)) == 4 and [(b.row, b.path) for b in opened.bad] == [(5, eval_path)]
    assert trained(opened) == [r["prompt"] for i, r in enumerate(rows_of(10)) if i not in (3, 4)]


def test_open_file_prompts_too_long_are_set_aside_with_their_rows_and_counted(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="absl")
    bound = 64 - 16
    rows = [{"prompt": f"{n}".rjust(bound + extra, "x"), "answer": n} for n in range(20) for extra in (0, 1)]
    config = config_of(path=jsonl(tmp_path, [*rows, "torn", ""]), held_out_one_in=2)
    assert config.model.max_tokens - config.sampling.max_response_tokens == bound
    opened = open_one(config, tokenizer)
    problems = [*(opened.problems[i] for i in range(len(opened.problems))), *opened.held_out]
    assert {p.prompt_tokens.size for p in problems} == {bound} and len(problems) == 20
    assert [b.row for b in opened.bad] == list(range(2, 42, 2)) + [41] and {b.path for b in opened.bad} == {
        opened.source.path
    }
    assert opened.bad[0].reason == f"prompt has {bound + 1} tokens, expected 1 to {bound}"
    (line,) = said(caplog)
    counts = dict(part.split("=") for part in line.split()[1:])
    assert (counts["rows"], counts["too_long"], counts["bad"]) == ("41", "20", "1")
    assert int(counts["kept"]) == len(opened.problems) and int(counts["held_out"]) == len(opened.held_out)


def test_open_file_prompt_that_the_chat_template_refuses_is_set_aside(tmp_path, chat_tokenizer):
    odd = {"prompt": [{"role": "narrator", "content": "once"}], "answer": "1"}
    opened = open_one(config_of(path=jsonl(tmp_path, [odd, *rows_of(30)])), chat_tokenizer)
    assert [b.row for b in opened.bad] == [1] and "no narrator" in opened.bad[0].reason


def test_open_file_rows_whose_answers_do_not_pass_are_set_aside(tmp_path, tokenizer):
    rows = [r for r in rows_of(30) if not is_held_out(r["prompt"], 10)]
    config = config_of(path=jsonl(tmp_path, rows), num_problems=0)
    opened = open_one(config, tokenizer, gold_failures={"": {2: "its own answer earns 0"}})
    assert trained(opened) == [r["prompt"] for i, r in enumerate(rows) if i != 1]
    assert [(b.row, b.reason) for b in opened.bad] == [(2, "its own answer earns 0")]


def test_open_file_with_all_prompts_too_long_is_an_error(tmp_path, tokenizer):
    rows = [{"prompt": f"{n}" * 60, "answer": n} for n in range(10, 30)]
    with pytest.raises(ValueError, match="no prompt fits.*longer than 48 tokens"):
        open_one(config_of(path=jsonl(tmp_path, rows), held_out_one_in=2), tokenizer)


def test_open_file_that_leaves_nothing_held_out_or_to_train_on_is_an_error(tmp_path, tokenizer):
    for wanted, counts in (
        (False, r"{} rows to train on and 0 held out"),
        (True, r"0 rows to train on and {} held out"),
    ):
        rows = [r for r in rows_of(30) if is_held_out(r["prompt"], 10) is wanted]
        with pytest.raises(ValueError, match=counts.format(len(rows))):
            open_one(config_of(path=jsonl(tmp_path, rows)), tokenizer)


def test_open_file_without_a_good_row_names_the_first(tmp_path, tokenizer):
    path = jsonl(tmp_path, ["", {"prompt": "x"}, "nope"])
    with pytest.raises(ValueError, match=r"no usable row \(2 malformed; the first: row 2: no field 'answer'"):
        open_one(config_of(path=path), tokenizer)
    with pytest.raises(ValueError, match=r"no usable row \(0 malformed\)"):
        open_one(config_of(path=jsonl(tmp_path, [])), tokenizer)


def test_open_held_out_rows_of_another_data_set_are_of_its_split(tmp_path, tokenizer):
    (data := tmp_path / "data").mkdir()
    for split, start in (("train", 500), ("test", 700)):
        jsonl(data, rows_of(4, start=start), f"{split}.jsonl")
    given: dict[str, Any] = dict(path=jsonl(tmp_path, rows_of(30)), eval_path=f"hf:{data}", num_problems=4)
    for split, start in (("test", 700), ("", 500)):
        opened = open_one(config_of(**given, eval_split=split), tokenizer)
        assert held(opened) == [row["prompt"] for row in rows_of(4, start=start)]


def test_open_rows_that_no_actor_could_score_are_set_aside(tmp_path, tokenizer):
    rows = rows_of(40)
    rows[1]["rewards"] = [{"name": "format"}]
    rows[2]["rewards"] = [{"name": "format"}]
    rows[2]["metadata"] = {"format": ".*"}
    rows[3]["rewards"] = [{"name": "judge"}]
    config = config_of(path=jsonl(tmp_path, rows), num_problems=0)
    assert [(bad.row, bad.reason.split("; ")[-1]) for bad in open_one(config, tokenizer).bad] == [
        (2, "verifier format needs rewards.format_pattern, or a pattern in the row's metadata (format)"),
        (4, "judge needs judge.url or judge.colocate"),
    ]
    scored = dataclasses.replace(
        config,
        rewards=sections.RewardsConfig(format_pattern=".*"),
        judge=sections.JudgeConfig(url="http://127.0.0.1:1/v1", model="m"),
    )
    assert open_one(scored, tokenizer).bad == ()


def test_open_task_with_a_format_and_no_pattern_is_refused(tokenizer):
    config = config_of(**SUMS, rewards={"reasoning_gym": 1.0, "format": 0.2})
    with pytest.raises(ValueError, match=r"prompts: verifier format requires rewards\.format_pattern"):
        open_one(config, tokenizer)


def test_open_file_missing_or_foreign_is_refused(tmp_path, tokenizer):
    (tmp_path / "x.csv").write_text("a,b")
    for path, reason in (("none.jsonl", "no prompts file"), ("x.csv", "must be .jsonl, .parquet, .arrayrecord or hf:")):
        with pytest.raises(ValueError, match=reason):
            open_one(config_of(path=str(tmp_path / path)), tokenizer)


def test_open_file_that_changes_while_it_is_read_is_an_error(tmp_path, tokenizer):
    path = jsonl(tmp_path, rows_of(20))
    opened = open_one(config_of(path=path, num_problems=0), tokenizer)
    with open(path, "r+") as file:
        file.write("{torn")
    with pytest.raises(ValueError, match="row 1 of .* changed while the run read it: not JSON"):
        _ = opened.problems[0]


def test_open_task_held_out_is_distinct_and_the_same_for_every_seed(tokenizer):
    first = held(open_one(config_of(**SUMS), tokenizer))
    assert first == held(open_one(config_of(**SUMS, seed=5000), tokenizer))
    assert len(first) == len(set(first)) == 20
    assert all(is_held_out(q, 10) for q in first)
    # More problems are the same ones and others.
    assert held(open_one(config_of(**SUMS, num_problems=25), tokenizer))[:20] == first
    assert held(open_one(config_of(**SUMS, num_problems=0), tokenizer)) == []


def test_open_task_that_is_too_small_says_so(tokenizer, monkeypatch):
    monkeypatch.setattr(generated, "_MAX_DRAWS", 50)
    with pytest.raises(ValueError, match=r"only \d+ distinct held-out problems in 50 draws.*num_problems \(20\)"):
        open_one(config_of(**SUMS), tokenizer)


def test_open_task_with_prompts_too_long_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="up to 9 tokens.*leaves 4"):
        open_one(config_of(**SUMS, max_tokens=20, num_problems=3), tokenizer)


def test_open_task_that_can_not_be_trained_on_at_all_is_an_error(tokenizer):
    fields = SUMS | {"pattern": "()", "held_out_one_in": 2, "num_problems": 0}
    with pytest.raises(ValueError, match=r"of its first 2000 questions none can be trained on: ''"):
        open_one(config_of(**fields), tokenizer)


def mixture_of(tmp_path, **more):
    sources = {
        "big": PromptSource(path=jsonl(tmp_path, rows_of(200), "big.jsonl"), weight=3.0),
        "made": PromptSource(**SUMS, weight=1.0),
    }
    return sources | more


def test_open_mixture_holds_out_in_proportion_and_names_every_problem(tmp_path, tokenizer):
    opened = open_sources(config_of(mixture=mixture_of(tmp_path), num_problems=12), tokenizer)
    assert [(o.name, len(o.held_out), o.is_endless) for o in opened] == [("big", 9, False), ("made", 3, True)]
    for source in opened:
        assert {p.source for p in source.held_out} == {source.name}
    assert problem_at(opened[0], 3).source == "big"


def test_open_mixture_no_source_trains_on_what_another_evaluates(tmp_path, tokenizer):
    shared, held_by_hash = rows_of(200)[:60], [r for r in rows_of(200) if is_held_out(r["prompt"], 10)]
    beside = jsonl(tmp_path, [*shared, *rows_of(50, start=500)], "beside.jsonl")
    evals = jsonl(tmp_path, rows_of(200)[30:40], "eval.jsonl")
    mixture = mixture_of(tmp_path, beside=PromptSource(path=beside, eval_path=evals, weight=3.0))
    opened = {o.name: o for o in open_sources(config_of(mixture=mixture, num_problems=200), tokenizer)}
    assert set(held(opened["beside"])) == {r["prompt"] for r in rows_of(200)[30:40]}
    assert set(held(opened["big"])) == {r["prompt"] for r in held_by_hash}
    evaluated = {q for o in opened.values() for q in held(o)}
    for name in ("big", "beside"):
        assert not set(trained(opened[name])) & evaluated
    # Of its own rows the one with an evaluation file leaves out nothing else.
    assert len(trained(opened["beside"])) == 110 - len({r["prompt"] for r in shared} & evaluated)


def test_open_does_not_train_on_an_evaluated_question_with_another_system_message(tmp_path, tokenizer):
    rows = rows_of(60)
    system = {"role": "system", "content": "Be brief."}
    chats = [r | {"prompt": [system, {"role": "user", "content": r["prompt"]}]} for r in rows]
    plain, both = jsonl(tmp_path, rows[:20], "plain.jsonl"), jsonl(tmp_path, [*rows, *chats])
    by_hash = open_one(config_of(path=both, num_problems=60), tokenizer)
    assert held(by_hash) and not {q.split("\n")[-1] for q in trained(by_hash)} & set(held(by_hash))
    by_file = open_one(config_of(path=jsonl(tmp_path, chats, "chats.jsonl"), eval_path=plain), tokenizer)
    assert {q.split("\n")[-1] for q in trained(by_file)} == {r["prompt"] for r in rows[20:]}


def test_num_epochs_refuses_a_run_that_asks_rows_more_often_and_says_what_fits(tmp_path, tokenizer):
    rows = [r for r in rows_of(60) if not is_held_out(r["prompt"], 10)][:20]
    fields: dict[str, Any] = dict(path=jsonl(tmp_path, rows), num_problems=0, num_epochs=3)
    assert len(open_one(config_of(**fields, num_updates=60), tokenizer).problems) == 20
    with pytest.raises(
        ValueError, match=r"run.num_updates: expected at most 60 updates of 1 .*20 rows .*num_epochs=3.*got 61"
    ):
        open_one(config_of(**fields, num_updates=61), tokenizer)
    config = config_of(**fields, num_updates=60)
    wide = dataclasses.replace(
        config, rounds=dataclasses.replace(config.rounds, groups_per_round=2, groups_per_update=2)
    )
    with pytest.raises(ValueError, match="at most 30 updates of 2 groups"):
        open_one(wide, tokenizer)


def test_num_epochs_of_a_mixture_counts_each_files_share(tmp_path, tokenizer):
    rows = [r for r in rows_of(60) if not is_held_out(r["prompt"], 10)][:20]
    mixture = {"file": PromptSource(path=jsonl(tmp_path, rows), weight=1.0), "made": PromptSource(**SUMS, weight=3.0)}
    fields: dict[str, Any] = dict(mixture=mixture, num_problems=0, num_epochs=1)
    open_sources(config_of(**fields, num_updates=80), tokenizer)
    with pytest.raises(ValueError, match="at most 80 updates"):
        open_sources(config_of(**fields, num_updates=81), tokenizer)


def test_open_file_counts_questions_with_several_answers(tmp_path, tokenizer):
    rows = [*rows_of(30), {"prompt": "what is 1 + 1? ", "answer": 3}, {"prompt": "what is 2 + 2?", "answer": 4.0}]
    opened = open_one(config_of(path=jsonl(tmp_path, rows), num_problems=0), tokenizer)
    assert [one.num_contradicting for one in opened.looked_at] == [1]


def test_rows_set_aside_beyond_the_share_are_refused_with_the_lengths_and_the_field_to_raise(tmp_path, tokenizer):
    long = [{"prompt": f"{n:03}" + "x" * 70, "answer": 1} for n in range(20)]
    rows = [*rows_of(75), *long, *[{"prompt": f"q{n}"} for n in range(5)]]
    path = jsonl(tmp_path, rows)
    config = config_of(path=path, num_problems=0, held_out_one_in=10**6)
    (found,) = open_one(config, tokenizer).looked_at
    found.check_num_bad(0.25)
    with pytest.raises(ValueError) as refusal:
        found.check_num_bad(0.24)
    text = str(refusal.value)
    assert "25 of 100 rows" in text and "20 prompts are empty or too long" in text
    assert "longest 73; at most 48 fit: raise model.max_tokens and packing.row_tokens, " in text
    assert "or lower sampling.max_response_tokens)" in text
    assert "5 for other reasons (row 96: no field 'answer'" in text and "--config.prompts.max_bad_share" in text
