import hashlib
import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bridge.types import RewardPart
from configs import schema, sections
from learner.data import problems
from learner.data.problems import (
    BadRow,
    ReasoningGymSource,
    is_held_out,
    load_file,
    load_held_out,
    max_prompt_tokens,
    read_rows,
    tokenize,
    write_quarantine,
)
from learner.data.tokenizer import load_tokenizer
from tests.learner.model_folder import VOCAB_SIZE, make_model_folder

PROMPTS = sections.PromptsConfig()
TWO_TERMS: dict[str, Any] = dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2)
SUMS = sections.PromptsConfig(task="chain_sum", task_args=TWO_TERMS, pattern=r":\s*(.*=)")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("model") / "m"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[go]"
    folder = make_model_folder(tmp_path_factory.mktemp("model") / "m", chat_template=template)
    return load_tokenizer(folder, vocab_size=VOCAB_SIZE)


def jsonl(folder, rows, name="rows.jsonl"):
    file = folder / name
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(file)


def parquet(folder, rows, name="rows.parquet"):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def config_of(path, *, num_problems=256, max_tokens=64, seed=0, **prompts):
    return schema.Config(
        preset="test",
        run=sections.RunConfig(seed=seed),
        prompts=sections.PromptsConfig(path=path, **prompts),
        model=sections.ModelConfig(max_tokens=max_tokens),
        evaluation=sections.EvaluationConfig(num_problems=num_problems),
        publish=sections.PublishConfig(probe_every_n_publishes=10 if num_problems else 0),
    )


def sums_config(*, num_problems=20, seed=0):
    return schema.Config(
        preset="test",
        run=sections.RunConfig(seed=seed),
        prompts=SUMS,
        evaluation=sections.EvaluationConfig(num_problems=num_problems),
        publish=sections.PublishConfig(probe_every_n_publishes=10 if num_problems else 0),
    )


GOOD = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": 4}, {"prompt": "1/2", "answer": 0.5}]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_read_rows_good_rows_keep_their_order_numbers_and_answers(tmp_path, write):
    rows = [r | {"answer": str(r["answer"])} for r in GOOD] if write is parquet else GOOD
    good, bad = read_rows(write(tmp_path, rows), PROMPTS)
    assert [(r.row, r.question, r.task.answer) for r in good] == [(1, "1+1", "2"), (2, "2+2", "4"), (3, "1/2", "0.5")]
    assert bad == [] and {r.task.rewards for r in good} == {(RewardPart("exact"),)}


def test_read_rows_parquet_numbers_are_answers(tmp_path):
    good, bad = read_rows(parquet(tmp_path, [{"prompt": "a", "answer": 3}, {"prompt": None, "answer": 4}]), PROMPTS)
    assert [(r.row, r.task.answer) for r in good] == [(1, "3")]
    assert [b.row for b in bad] == [2]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{torn", "not JSON"),
        ("[1, 2]", "not a JSON object but list"),
        ({"prompt": "x"}, r"no field 'answer' \(fields: prompt\)"),
        ({"question": "x"}, "no field 'prompt' and no field 'answer'"),
        ({"prompt": None, "answer": "1"}, "no field 'prompt'"),
        ({"prompt": "  ", "answer": "1"}, "'prompt' is empty"),
        ({"prompt": 7, "answer": "1"}, "text or a list of messages, got int"),
        ({"prompt": [], "answer": "1"}, "text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "every message needs a role and a content"),
        ({"prompt": ["hi"], "answer": "1"}, "every message needs a role and a content"),
        ({"prompt": "x", "answer": ""}, "'answer' must be text or a number"),
        ({"prompt": "x", "answer": True}, "'answer' must be text or a number, got True"),
        ({"prompt": "x", "answer": ["1"]}, "'answer' must be text or a number"),
        ({"prompt": "half a \ud83d", "answer": "1"}, "no Unicode text"),
        ({"prompt": "x", "answer": "\ud83d"}, "no Unicode text"),
        ({"prompt": [{"role": "user", "content": "\udc00"}], "answer": "1"}, "no Unicode text"),
    ],
)
def test_read_rows_malformed_row_is_set_aside_with_its_number(tmp_path, row, reason):
    # Blank lines are no rows but count as lines, so that a number leads to the line in an editor.
    good, bad = read_rows(jsonl(tmp_path, [GOOD[0], "", row, GOOD[1]]), PROMPTS)
    assert [r.row for r in good] == [1, 4]
    assert [b.row for b in bad] == [3]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(bad[0].reason)


def test_read_rows_bytes_that_are_no_utf8_are_set_aside(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "\xff", "answer": "1"}\n' + json.dumps(GOOD[0]).encode())
    good, bad = read_rows(str(file), PROMPTS)
    assert [r.row for r in good] == [2] and [b.row for b in bad] == [1]


def test_read_rows_fields_are_named_by_the_config(tmp_path):
    prompts = sections.PromptsConfig(prompt_field="q", answer_field="a", verifier="math")
    (good,), _ = read_rows(jsonl(tmp_path, [{"q": "x", "a": "y", "prompt": "no"}]), prompts)
    assert (good.question, good.task.answer, good.task.rewards) == ("x", "y", (RewardPart("math"),))


@pytest.mark.parametrize("where", ["conclusion", "text"])
def test_read_rows_tell_the_math_verifier_where_the_answer_is(tmp_path, where):
    prompts = sections.PromptsConfig(verifier="math", answer_in=where)
    (row,), _ = read_rows(jsonl(tmp_path, [{"prompt": "2+2?", "answer": 4}]), prompts)
    assert json.loads(row.task.metadata) == {"answer_in": where}


def test_read_rows_without_a_good_row_names_the_first(tmp_path):
    path = jsonl(tmp_path, ["", {"prompt": "x"}, "nope"])
    with pytest.raises(ValueError, match=r"no usable row \(2 malformed; the first: row 2: no field 'answer'"):
        read_rows(path, PROMPTS)
    with pytest.raises(ValueError, match=r"no usable row \(0 malformed\)"):
        read_rows(jsonl(tmp_path, []), PROMPTS)


def test_read_rows_missing_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts file"):
        read_rows(str(tmp_path / "none.jsonl"), PROMPTS)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ValueError, match="must be .jsonl or .parquet"):
        read_rows(str(tmp_path / "x.csv"), PROMPTS)
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="is no parquet file"):
        read_rows(str(tmp_path / "x.parquet"), PROMPTS)


CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_read_rows_conversation_prompts_are_kept_as_messages(tmp_path, write, chat_tokenizer):
    (raw,), _ = read_rows(write(tmp_path, [{"prompt": CHAT, "answer": "1"}]), PROMPTS)
    assert raw.messages == tuple(CHAT) and raw.question == "S\nU"
    assert prompt_text(raw, chat_tokenizer, system_prompt="other") == "[system]S[user]U[go]"


def prompt_text(raw, tokenizer, **fields):
    return tokenizer.decode(tokenize(raw, tokenizer, sections.PromptsConfig(**fields)).prompt_tokens)


def test_tokenize_applies_the_chat_template_as_told(tmp_path, tokenizer, chat_tokenizer):
    (raw,), _ = read_rows(jsonl(tmp_path, [{"prompt": "Q", "answer": "1"}]), PROMPTS)
    assert prompt_text(raw, tokenizer) == "Q"
    assert prompt_text(raw, chat_tokenizer) == "[user]Q[go]"
    assert prompt_text(raw, chat_tokenizer, chat_template="off") == "Q"
    assert prompt_text(raw, chat_tokenizer, system_prompt="S") == "[system]S[user]Q[go]"
    assert prompt_text(raw, tokenizer, system_prompt="S: ") == "S: Q"
    with pytest.raises(ValueError, match="no chat template"):
        prompt_text(raw, tokenizer, chat_template="on")


def test_is_held_out_is_the_hash_of_the_stripped_text():
    for text in ("1 + 1 =", "zwölf", ""):
        number = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
        number = int.from_bytes(number.to_bytes(8, "big"), "little")
        for one_in in (2, 3, 10):
            assert is_held_out(text, one_in) == (number % one_in == 0)
            assert is_held_out(f"\n {text} ", one_in) == is_held_out(text, one_in)


def rows_of(count, *, start=0):
    return [{"prompt": f"what is {n} + {n}?", "answer": 2 * n} for n in range(start, start + count)]


def questions(found):
    return [p.question for p in found]


def test_load_file_splits_by_text_whatever_the_seed_and_the_order(tmp_path, tokenizer):
    rows = rows_of(200)
    again = [*reversed(rows), *rows[:50]]  # repeated rows fall on the same side
    train, held_out, bad = load_file(config_of(jsonl(tmp_path, rows)), tokenizer)
    train2, held_out2, _ = load_file(config_of(jsonl(tmp_path, again, "b.jsonl"), seed=5), tokenizer)
    assert not set(questions(train)) & set(questions(held_out))
    assert len(train) + len(held_out) == 200 and bad == []
    assert set(questions(held_out)) == set(questions(held_out2)) and set(questions(train)) == set(questions(train2))
    assert 5 <= len(held_out) <= 40  # one in ten


def test_load_file_eval_rows_never_train_even_with_other_blanks(tmp_path, tokenizer):
    rows = rows_of(10)
    evals = [{"prompt": f"  {rows[3]['prompt']}\n", "answer": 6}, *rows_of(2, start=50)]
    rows.append({"prompt": rows[4]["prompt"] + " ", "answer": 8})
    config = config_of(jsonl(tmp_path, rows), eval_path=jsonl(tmp_path, [*evals, rows[4], "torn"], "eval.jsonl"))
    train, held_out, bad = load_file(config, tokenizer)
    assert len(held_out) == 4 and [b.row for b in bad] == [5] and f"of {config.prompts.eval_path}: " in bad[0].reason
    assert sorted(questions(train)) == sorted(r["prompt"] for i, r in enumerate(rows_of(10)) if i not in (3, 4))


def test_load_file_prompts_too_long_are_set_aside_with_their_rows(tmp_path, tokenizer):
    config = config_of(jsonl(tmp_path, []), held_out_one_in=2)
    bound = max_prompt_tokens(config)
    assert bound == 64 - 16
    rows = [{"prompt": f"{n}".rjust(bound + extra, "x"), "answer": n} for n in range(20) for extra in (0, 1)]
    config = config_of(jsonl(tmp_path, rows), held_out_one_in=2)
    train, held_out, bad = load_file(config, tokenizer)
    assert {p.prompt_tokens.size for p in [*train, *held_out]} == {bound}
    assert sorted(b.row for b in bad) == list(range(2, 41, 2))
    assert {b.reason for b in bad} == {f"prompt has {bound + 1} tokens, want 1 to {bound}"}


def test_load_file_with_all_prompts_too_long_is_an_error(tmp_path, tokenizer):
    rows = [{"prompt": f"{n}" * 60, "answer": n} for n in range(10, 30)]
    with pytest.raises(ValueError, match="no prompt fits.*longer than 48 tokens"):
        load_file(config_of(jsonl(tmp_path, rows), held_out_one_in=2), tokenizer)


def test_load_file_that_leaves_nothing_held_out_is_an_error(tmp_path, tokenizer):
    rows = [r for r in rows_of(30) if not is_held_out(r["prompt"], 10)]
    with pytest.raises(ValueError, match=rf"{len(rows)} rows to train on and 0 held out"):
        load_file(config_of(jsonl(tmp_path, rows)), tokenizer)


def test_load_file_holds_out_no_more_than_asked(tmp_path, tokenizer):
    config = config_of(jsonl(tmp_path, rows_of(100)), held_out_one_in=2, num_problems=3)
    assert len(load_file(config, tokenizer)[1]) == 3


def test_write_quarantine_appends_row_numbers_and_reasons(tmp_path):
    file = tmp_path / "quarantine.jsonl"
    write_quarantine(file, "a.jsonl", [BadRow(3, "torn")])
    write_quarantine(file, "a.jsonl", [BadRow(9, "empty")])
    assert [json.loads(x) for x in file.read_text().splitlines()] == [
        {"source": "a.jsonl", "row": 3, "reason": "torn"},
        {"source": "a.jsonl", "row": 9, "reason": "empty"},
    ]


def test_reasoning_gym_source_problem_is_a_function_of_seed_and_index():
    a, b = ReasoningGymSource(SUMS, seed=5), ReasoningGymSource(SUMS, seed=5)
    for index in (0, 3, problems.NUM_PROCEDURAL - 1):
        assert a[index] == b[index]
    assert a[0] != ReasoningGymSource(SUMS, seed=6)[0]


def test_reasoning_gym_source_shows_the_patterns_group_and_keeps_the_answer():
    raw = ReasoningGymSource(SUMS, seed=0)[7]
    sign = 1 if "+" in raw.question else -1
    left, right = (int(x) for x in raw.question.rstrip(" =").replace("-", "+").split("+"))
    assert int(raw.task.answer) == left + sign * right
    assert raw.question in json.loads(raw.task.metadata)["question"] and raw.question.endswith("=")


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (dict(task="nosuch"), "prompts.task='nosuch'"),
        (dict(task_args={"min_terms": 0}), "min_terms must be positive"),
        (dict(task_args={"colour": "red"}), "colour"),
        (dict(task_args={"seed": 3}), "seed"),
    ],
)
def test_reasoning_gym_source_unknown_task_or_arguments_are_refused(prompts, said):
    with pytest.raises(ValueError, match=said):
        ReasoningGymSource(sections.PromptsConfig(**prompts), seed=0)


def test_reasoning_gym_source_pattern_not_found_is_an_error():
    with pytest.raises(ValueError, match="is not in"):
        _ = ReasoningGymSource(sections.PromptsConfig(pattern="(zebra)"), seed=0)[0]


def test_load_held_out_is_distinct_held_out_and_the_same_for_every_seed(tokenizer):
    first = load_held_out(sums_config(seed=0), tokenizer)
    assert questions(first) == questions(load_held_out(sums_config(seed=5000), tokenizer))
    assert len(first) == len(set(questions(first))) == 20
    assert all(is_held_out(q, 10) for q in questions(first))
    # More problems are the same ones and others.
    assert questions(load_held_out(sums_config(num_problems=25), tokenizer))[:20] == questions(first)


def test_load_held_out_of_a_task_too_small_says_so(tokenizer, monkeypatch):
    monkeypatch.setattr(problems, "_MAX_DRAWS", 50)
    with pytest.raises(ValueError, match=r"only \d+ distinct held-out problems in 50 draws.*num_problems \(20\)"):
        load_held_out(sums_config(), tokenizer)


def test_load_held_out_with_prompts_too_long_is_an_error(tokenizer):
    config = schema.Config(
        preset="test",
        prompts=SUMS,
        model=sections.ModelConfig(max_tokens=20),
        evaluation=sections.EvaluationConfig(num_problems=3),
    )
    with pytest.raises(ValueError, match="up to 9 tokens.*leaves 4"):
        load_held_out(config, tokenizer)


def test_no_evaluation_wants_no_held_out_problems(tokenizer, tmp_path):
    assert load_held_out(sums_config(num_problems=0), tokenizer) == []
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    trained = [row for row in rows if not is_held_out(row["prompt"], 10)][:5]  # a file that leaves none to hold out
    train, held_out, bad = load_file(config_of(jsonl(tmp_path, trained), num_problems=0), tokenizer)
    assert {p.question for p in train} == {row["prompt"] for row in trained} and held_out == [] and bad == []
