import dataclasses
import decimal
import json
import math

import pytest

from learner.data.parse_row import parse_row
from learner.data.problem import RawProblem
from tests.learner.data.rooms import form_of

GOOD = {"prompt": "1+1", "answer": "2"}
ENTRY = {"question": "1+1", "metadata": {"source_dataset": "chain_sum"}}


def parsed(row, **prompts) -> RawProblem:
    raw = parse_row(7, row, form_of(**prompts))
    assert isinstance(raw, RawProblem), raw
    return raw


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("2", "2"),
        ("2.0", "2.0"),  # text is compared as it was written
        (4, "4"),
        (0.5, "0.5"),
        (42.0, "42"),
        (-0.0, "0"),
        (1e16, "10000000000000000"),
        (1e-7, "0.0000001"),
        (1.5e20, "150000000000000000000"),
        (decimal.Decimal("42.00"), "42"),
        (decimal.Decimal("18.90"), "18.9"),
        (decimal.Decimal("1E+3"), "1000"),
    ],
)
def test_parse_row_keeps_question_answer_and_number(answer, want):
    raw = parsed({"prompt": "1+1", "answer": answer, "other": None})
    assert (raw.row, raw.question, raw.messages, raw.task.answer) == (7, "1+1", (), want)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x"}, r"no field 'answer', or it is null or NaN \(fields: prompt\)"),
        ({"question": "x"}, "no field 'prompt' and no field 'answer'"),
        ({"prompt": None, "answer": "1"}, "no field 'prompt'"),
        ({"prompt": "x", "answer": math.nan}, "no field 'answer', or it is null or NaN"),
        ({"prompt": "x", "answer": decimal.Decimal("NaN")}, "no field 'answer', or it is null or NaN"),
        ({"prompt": math.nan, "answer": "1"}, "no field 'prompt', or it is null or NaN"),
        ({"prompt": "x", "answer": math.inf}, "'answer' must be finite, got inf"),
        ({"prompt": "  ", "answer": "1"}, "'prompt' is empty"),
        ({"prompt": 7, "answer": "1"}, "text or a list of messages, got int"),
        ({"prompt": [], "answer": "1"}, "text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "every message needs a role and a content"),
        ({"prompt": ["hi"], "answer": "1"}, "every message needs a role and a content"),
        ({"prompt": "x", "answer": ""}, "'answer' must be text or a number"),
        ({"prompt": "x", "answer": True}, "'answer' must be text or a number, got True"),
        ({"prompt": "x", "answer": ["1"]}, "'answer' must be text or a number"),
        ({"prompt": "half a \ud83d", "answer": "1"}, "must be valid Unicode text"),
        ({"prompt": "x", "answer": "\ud83d"}, "must be valid Unicode text"),
        ({"prompt": [{"role": "user", "content": "\udc00"}], "answer": "1"}, "must be valid Unicode text"),
        (GOOD | {"rewards": "exact"}, "'rewards' must be a list, or JSON of one, got 'exact'"),
        (GOOD | {"rewards": '{"name": "exact"}'}, "'rewards' must be a list of 1 to 64 {name, weight}, got {'name'"),
        (GOOD | {"rewards": ["exact"]}, "'rewards': every part is {name, weight}, got 'exact'"),
        (GOOD | {"rewards": [{"weight": 1}]}, "every part is {name, weight}"),
        (GOOD | {"rewards": [{"name": "exact", "wieght": 2}]}, "every part is {name, weight}"),
        (GOOD | {"rewards": [{"name": "exakt"}]}, "no verifier 'exakt'; there are code, exact, .*math"),
        (GOOD | {"rewards": [{"name": "os:system"}]}, "no verifier 'os:system'"),
        (GOOD | {"rewards": [{"name": "exact"}, {"name": "exact"}]}, "names 'exact' twice"),
        (GOOD | {"rewards": [{"name": "exact", "weight": "2"}]}, "weight of 'exact' must be a finite number"),
        (GOOD | {"rewards": [{"name": "exact", "weight": True}]}, "weight of 'exact' must be a finite number"),
        (GOOD | {"rewards": [{"name": "exact", "weight": 0}]}, "not 0, got 0"),
        (GOOD | {"rewards": [{"name": "exact", "weight": float("nan")}]}, "not 0, got nan"),
        (GOOD | {"rewards": [{"name": "exact", "weight": 10**400}]}, "must be a finite number"),
        (GOOD | {"rewards": [{"name": "reasoning_gym"}]}, "needs the library's entry as metadata"),
        (GOOD | {"metadata": "text"}, "'metadata' must be an object, or JSON of one, got 'text'"),
        (GOOD | {"metadata": "[1]"}, "'metadata' must be an object"),
        (GOOD | {"metadata": 3}, "'metadata' must be an object"),
    ],
)
def test_parse_row_malformed_row_gives_the_reason(row, reason):
    found = parse_row(7, row, form_of())
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)


def test_parse_row_fields_are_named_by_the_config():
    raw = parsed({"q": "x", "a": "y", "prompt": "no"}, prompt_field="q", answer_field="a", verifier="math")
    assert (raw.question, raw.task.answer, parts_of(raw)) == ("x", "y", {"math": 1.0})


@pytest.mark.parametrize("where", ["conclusion", "text"])
def test_parse_row_tells_the_math_verifier_where_the_answer_is(where):
    raw = parsed({"prompt": "2+2?", "answer": 4}, verifier="math", answer_in=where)
    assert json.loads(raw.task.metadata) == {"answer_in": where}


def test_parse_row_conversation_is_kept_as_messages():
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U", "name": "someone"}]
    raw = parsed({"prompt": chat, "answer": "1"})
    assert raw.question == "S\nU"
    assert raw.messages == tuple(chat)


@pytest.mark.parametrize("metadata", [{"tests": [1, "ä"]}, '{"tests": [1, "\\u00e4"]}'])
def test_parse_row_metadata_goes_to_the_verifiers_as_an_object_or_json(metadata):
    assert json.loads(parsed(GOOD | {"metadata": metadata}).task.metadata) == {"tests": [1, "ä"]}
    assert json.loads(parsed(GOOD | {"metadata": metadata}, metadata_field="").task.metadata) == {}


def parts_of(raw):
    return {part.name: part.weight for part in raw.task.rewards}


def test_parse_row_rewards_are_the_rows_own_or_the_configs():
    own = GOOD | {"rewards": [{"name": "math", "weight": 0.5}, {"name": "my:score"}]}
    assert parts_of(parsed(own, rewards={"my:score": 2.0})) == {"math": 0.5, "my:score": 1.0}
    assert parts_of(parsed(GOOD, rewards={"exact": 2.0, "my:score": -1.0})) == {"exact": 2.0, "my:score": -1.0}
    assert parts_of(parsed(own, rewards_field="", verifier="math")) == {"math": 1.0}
    in_json = GOOD | {"rewards": json.dumps(own["rewards"])}
    assert parts_of(parsed(in_json, rewards={"my:score": 2.0})) == {"math": 0.5, "my:score": 1.0}
    for absent in (None, "", [], "[]"):
        assert parts_of(parsed(GOOD | {"rewards": absent}, verifier="math")) == {"math": 1.0}


def test_parse_row_teacher_is_the_rows_own_or_its_sources():
    form = dataclasses.replace(form_of(teacher_field="from"), teachers=frozenset({"a", "b"}))
    form = dataclasses.replace(form, source=dataclasses.replace(form.source, teacher="b"))
    assert "from" in form.columns
    for own, want in (({"from": "a"}, "a"), ({"from": None}, "b"), ({"from": ""}, "b"), ({}, "b")):
        raw = parse_row(1, GOOD | own, form)
        assert isinstance(raw, RawProblem) and raw.task.teacher == want
    for unknown in ("c", ["a"], 3):
        assert str(parse_row(1, GOOD | {"from": unknown}, form)).startswith("'from': no teacher ")
    assert parsed(GOOD | {"from": "c"}).task.teacher == ""  # the column is not read


def test_parse_row_without_the_teacher_that_its_loss_needs_is_refused():
    form = dataclasses.replace(form_of(teacher_field="from"), teachers=frozenset({"a"}), needs_teacher=True)
    assert isinstance(parse_row(1, GOOD | {"from": "a"}, form), RawProblem)
    assert "no teacher in 'from'" in str(parse_row(1, GOOD, form))
    form = dataclasses.replace(form, source=dataclasses.replace(form.source, teacher="a"))
    assert isinstance(parse_row(1, GOOD, form), RawProblem)


def test_parse_row_of_reasoning_gym_needs_its_entry_and_takes_it():
    row = GOOD | {"rewards": [{"name": "reasoning_gym"}], "metadata": ENTRY}
    raw = parsed(row)
    assert parts_of(raw) == {"reasoning_gym": 1.0} and json.loads(raw.task.metadata) == ENTRY


def test_parse_row_of_an_environment_needs_no_answer_and_no_verifier():
    raw = parsed({"prompt": "play", "metadata": {"secret": 3}}, environment="guess")
    assert (raw.task.environment, raw.task.answer, raw.task.rewards) == ("guess", "", ())
    assert json.loads(raw.task.metadata) == {"secret": 3}
    judged = parsed({"prompt": "play", "answer": "3"}, environment="guess", rewards={"exact": 0.5})
    assert parts_of(judged) == {"exact": 0.5}


PRINTED = {"tests": [{"input": "1", "output": "1"}]}


def test_parse_row_of_code_needs_test_cases_and_no_answer():
    form = form_of(verifier="code")
    raw = parse_row(3, {"prompt": "write it", "metadata": PRINTED}, form)
    assert isinstance(raw, RawProblem) and json.loads(raw.task.metadata) == PRINTED and raw.task.answer == ""
    for metadata, said in (
        (None, "verifier code requires test cases"),
        ({"tests": [{"input": "1"}]}, "metadata.tests[0]: expected input and output"),
        (PRINTED | {"language": "cobol"}, "got 'cobol'"),
    ):
        why = parse_row(3, {"prompt": "write it", "metadata": metadata}, form)
        assert isinstance(why, str) and said in why
    assert "requires test cases" in str(parse_row(1, GOOD | {"rewards": [{"name": "code"}]}, form_of()))


def test_parse_row_null_is_absent_in_what_a_row_names_itself():
    padded = [{"name": "exact", "weight": None, "note": None}, {"name": "math", "weight": 2.0, "note": None}]
    task = parsed(GOOD | {"rewards": padded}).task
    assert [(part.name, part.weight) for part in task.rewards] == [("exact", 1.0), ("math", 2.0)]
    assert parsed({"prompt": "x", "answer": math.nan, "rewards": [{"name": "format"}]}).task.answer == ""


@pytest.mark.parametrize("pattern", ["(", 3])
def test_parse_row_format_that_is_no_regular_expression_is_refused(pattern):
    row = GOOD | {"rewards": [{"name": "format"}], "metadata": {"format": pattern}}
    assert "metadata format: expected a regular expression" in str(parse_row(1, row, form_of()))
    assert isinstance(parse_row(1, row | {"metadata": {"format": "<think>.*"}}, form_of()), RawProblem)


def test_parse_row_null_question_of_a_judged_rows_metadata_is_that_of_the_prompt():
    row = GOOD | {"metadata": {"question": None, "hint": None, "topic": "sums"}}
    task = parsed(row, verifier="judge").task
    assert json.loads(task.metadata) == {"question": GOOD["prompt"], "topic": "sums"}
