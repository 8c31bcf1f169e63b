import json

import pytest

from actor.sandbox import languages
from bridge import code_tests
from bridge.code_tests import Printed, Returned, language_of, read

PRINTED = {"input": "1 2\n", "output": "3\n"}
CALLED = {"call": "f", "args": [1], "kwargs": {"b": 2}, "returns": 3}


def test_cases_of_our_own_form_are_read_as_they_stand():
    got = read({"tests": [PRINTED, {"input": ["1", "2"], "output": [3]}], "language": "C++", "solution": "x"})
    assert got.cases == (Printed(stdin="1 2\n", stdout="3\n"), Printed(stdin="1\n2", stdout="3"))
    assert (got.language, got.compare, got.tolerance, got.code_in, got.solution) == ("cpp", "tokens", 1e-6, None, "x")
    assert not got.are_calls
    calls = read({"tests": [CALLED], "compare": "float", "tolerance": 0.5, "code_in": "text"})
    assert calls.cases == (Returned(function="f", arguments=[1], keywords={"b": 2}, wanted=(3,)),)
    assert calls.are_calls and (calls.compare, calls.tolerance, calls.code_in) == ("float", 0.5, "text")


@pytest.mark.parametrize(
    "metadata",
    [
        {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]},
        {"tests": {"inputs": ["1 2\n", "3\n4"], "outputs": ["3\n", ["7"]]}},
        {"input_output": json.dumps({"inputs": ["1 2\n", "3\n4"], "outputs": ["3\n", "7"]})},
        {
            "tests": json.dumps(
                [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, {"input": "3\n4", "output": "7"}]
            )
        },
    ],
)
def test_columns_and_columns_of_text_are_the_same_cases(metadata):
    assert read(metadata).cases == (Printed(stdin="1 2\n", stdout="3\n"), Printed(stdin="3\n4", stdout="7"))


@pytest.mark.parametrize(
    ("metadata", "arguments", "keywords", "wanted"),
    [
        ({"inputs": [[[1, 2], 3]], "outputs": [4], "fn_name": "f"}, [[1, 2], 3], {}, (4,)),
        ({"inputs": [[1]], "outputs": [[4]], "fn_name": "f"}, [1], {}, ([4], 4)),
        ({"inputs": [[1]], "outputs": [[4, 5]], "fn_name": "f"}, [1], {}, ([4, 5],)),
        ({"inputs": [{"a": 1}], "outputs": [4], "fn_name": "f"}, [], {"a": 1}, (4,)),
        ({"inputs": ['[1, 2]\n"x"'], "outputs": ["[3]"], "fn_name": "f"}, [[1, 2], "x"], {}, ([3],)),
        ({"tests": [{"input": "1\n2", "output": "3", "testtype": "functional"}], "func_name": "f"}, [1, 2], {}, (3,)),
        ({"tests": [{"input": "1\n2", "output": "3"}], "fn_name": "f"}, [1, 2], {}, (3,)),
    ],
)
def test_calls_of_data_sets_forms_have_arguments_and_what_may_be_returned(metadata, arguments, keywords, wanted):
    assert read(metadata).cases == (Returned(function="f", arguments=arguments, keywords=keywords, wanted=wanted),)


@pytest.mark.parametrize(
    ("solutions", "want"), [(["a", "b"], "a"), ('["a", "b"]', "a"), ([], ""), ("", ""), (None, "")]
)
def test_first_of_several_solutions_is_the_rows_own(solutions, want):
    assert read({"tests": [PRINTED], "solutions": solutions}).solution == want


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, r"metadata.tests: verifier code requires test cases, got none"),
        ({"tests": []}, "got none"),
        ({"tests": 3}, "metadata.tests must be a list of cases"),
        ({"tests": "{"}, "metadata.tests must be JSON"),
        ({"tests": ["x"]}, r"metadata.tests\[0\] must be an object"),
        ({"tests": [PRINTED, {"input": "x"}]}, r"metadata.tests\[1\]: expected input and output, or call and returns"),
        ({"tests": [{"input": 3, "output": "x"}]}, "text, or lists of lines"),
        ({"tests": [{"call": "f", "args": [1]}]}, "`returns` is missing"),
        ({"tests": [{"call": "f()", "returns": 1}]}, "expected the name of a function"),
        ({"tests": [{"call": "f", "args": 1, "returns": 1}]}, "args must be a list"),
        ({"tests": [PRINTED, CALLED]}, "all cases must be calls, or all standard input"),
        ({"tests": [PRINTED], "language": "cobol"}, "language: expected one of bash, c, cpp, .*, got 'cobol'"),
        ({"tests": [CALLED], "language": "c"}, "calls require python"),
        ({"tests": [PRINTED], "compare": "fuzzy"}, "metadata.compare must be one of exact, tokens, float"),
        ({"tests": [PRINTED], "tolerance": float("nan")}, "metadata.tolerance"),
        ({"tests": [PRINTED], "code_in": "mind"}, "metadata.code_in must be one of block, text"),
        ({"tests": [PRINTED], "solution": 3}, "metadata.solution must be text"),
        ({"tests": [PRINTED], "solutions": [3]}, "metadata.solutions must be a list of programs"),
        ({"inputs": ["1"], "outputs": []}, "lists of one length"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "arguments of a call must be a list"),
    ],
)
def test_metadata_that_says_no_test_cases_is_refused_by_its_field(metadata, said):
    with pytest.raises(ValueError, match=said):
        read(metadata)


def test_languages_by_name_are_those_of_the_sandbox():
    assert set(code_tests.LANGUAGES) == set(languages.LANGUAGES)
    assert set(code_tests.ALIASES.values()) <= set(code_tests.LANGUAGES)
    assert language_of(" Py ") == "python" and language_of("C++") == "cpp"


NULLS = {"call": None, "args": None, "kwargs": None, "returns": None, "input": None, "output": None, "testtype": None}


def test_null_is_absent_whatever_the_key():
    printed = {"tests": [NULLS | PRINTED], "tolerance": None, "compare": None, "language": None, "inputs": None}
    assert read(printed).cases == read({"tests": [PRINTED]}).cases
    called = NULLS | CALLED | {"kwargs": {"b": 2, "of_another_row": None}}
    assert read({"tests": [called]}).cases == read({"tests": [CALLED]}).cases
    returns_nothing = NULLS | {"call": "f", "args": [None, 1]}
    assert read({"tests": [returns_nothing]}).cases[0] == Returned(
        function="f", arguments=[None, 1], keywords={}, wanted=(None,)
    )
    with pytest.raises(ValueError, match="requires test cases"):
        read({"tests": None, "input_output": None, "inputs": None})
