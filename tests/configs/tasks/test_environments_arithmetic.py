from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.tasks.calculator import evaluate, show

NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_evaluate_of_whole_numbers_is_pythons(text):
    assert evaluate(text) == eval(text, {"__builtins__": {}})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("10/5", "2"),
        (" 1 + 1 ", "2"),
    ],
)
def test_show_of_a_value(text, shown):
    assert show(evaluate(text)) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1/0", "division by zero"),
        ("5%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "exponent too large"),
        ("(10**100)**100", "exponent too large"),
        ("9" * 190, "number too large"),
        ("*".join(["9" * 40] * 4), "number too large"),
        ("2**0.5", "exponent too large, or not whole"),
        ("1" * 201, "longer than 200"),
        ("(" * 150 + "1" + ")" * 49, "not an expression"),
        ("__import__('os')", "only numbers"),
        ("a+1", "only numbers"),
        ("'a'*3", "only numbers"),
        ("True+1", "only numbers"),
        ("1j", "only numbers"),
        ("[1]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("", "not an expression"),
        ("1+", "not an expression"),
        ("1\x00", "not an expression|null"),
        ("1e999", "inf"),
    ],
)
def test_evaluate_of_what_is_none_says_so(text, said):
    with pytest.raises(ValueError, match=said):
        evaluate(text)


def test_evaluate_is_exact():
    assert evaluate("0.1*3") == Fraction(3, 10)
