"""`math` against the forms of answers that were judged by hand (`math_forms.jsonl`)."""

import pytest

from actor.rewards.types import Context, Response
from actor.rewards.verifiers import math
from bridge.rollout_types import Task
from tests.actor.rewards.verifiers import math_agreement, math_forms

PAIRS = math_forms.pairs()
DIFFERING = {
    r"0.\overline{142857}": "0.142857",  # six digits of a rounded number are right
    r"25\text{ m/s}": r"25 \frac{\text{m}}{\text{s}}",
}
"""Gold answers and responses in a box of which our verdict is the other one."""


def test_forms_are_at_least_500_of_which_half_are_wrong():
    assert len(PAIRS) >= 500 and sum(not one["is_right"] for one in PAIRS) >= len(PAIRS) / 2
    assert len({(one["gold"], one["response"]) for one in PAIRS}) == len(PAIRS)


@pytest.mark.heavy
def test_math_gives_each_form_the_verdict_that_is_wanted():
    verdicts = math_agreement.judge(PAIRS, timeout_s=60.0).of_pairs
    differing = {(one["gold"], one["response"]) for one in PAIRS if verdicts[one["id"]] != float(one["is_right"])}
    assert differing == {(gold, math_forms.boxed(text)) for gold, text in DIFFERING.items()}


SAME = [
    ("ABD", "A, B, D"),
    ("CAB", "CAB"),
    (r"\text{(A) } 12", "A"),
    (r"(B) \text{vitamin C.}", "B"),
    ("A^T", "A^{T}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}"),
    (r"\\frac{1}{2}", "0.5"),
    ("5", "x = 5"),
    ("5", "x = 2 + 3 = 5"),
    ("5", "AB = 5"),
    ("2x", r"\frac{dy}{dx} = 2x"),
    ("(2, 5)", "(a, b) = (2, 5)"),
    ("55", r"\sum_{k=1}^{10} k"),
    ("10", "5+5=10"),
    ("1/2", "1:2"),
    ("1:2", r"\frac{1}{2}"),
    ("3:5", "6:10"),
    ("10:30", r"10{:}30\text{ a.m.}"),
    ("2024-03-01", "2024-03-01"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1) \text{ or } (2,\infty)"),
    (r"[0,1]\cup[2,3]", r"[0,1] \text{ or } [2,3]"),
    (r"(0,1) \text{ or } (2,3)", r"(0,1)\cup(2,3)"),
    (r"x\in(0,1)\cup(2,3)", r"x\in(0,1) \text{ or } x\in(2,3)"),
    (r"x < 1 \text{ or } x > 2", r"(-\infty,1) \text{ or } (2,\infty)"),
    (r"(1,2) \text{ or } (3,4)", r"(3,4) \text{ or } (1,2)"),
    ("1e6", "1000000"),
    ("-1e-5", "-0.00001"),
    ("1e-06", "0.000001"),
    ("5e3", "5000"),
    ("N/A", "N/A"),
    (r"250\text{ ml}", r"250\text{ cm}^3"),
    (r"1\text{ m}^3", r"1000\text{ liters}"),
    ("z=1+2i", "z=2i+1"),
    ("x^2-4x+13=0", "2x^2+26=8x"),
    (r"x=\infty", r"x=\infty"),
    (r"\frac{dy}{dx}=2x", r"\frac{dy}{dx}=x+x"),
]
DIFFERENT = [
    (r"\text{CAB}", "ABC"),
    (r"\text{BDAC}", "ABCD"),
    ("CAB", "ABC"),
    (r"\text{(A) } 12, \text{(C) } 13", "A"),
    ("A) 12, C) 13", "A"),
    ("A^T", "A"),
    ("A^{T}", "A"),
    ("x^T y", "xy"),
    (r"(AB)^{\top}", "AB"),
    (r"a=1 \\ b=2", "b=2"),
    (r"a=1 \\ b=2", r"a=3 \\ b=2"),
    (r"1 \\ 2", "2"),
    ("x=1 y=2", "2"),
    ("x+y=5", "5"),
    ("x(x+1)=6", "6"),
    ("x+y=1,000", "1000"),
    ("5", "6 = 5"),
    ("10", "5+6=10"),
    ("10:30", "1/3"),
    ("1/3", "10:30"),
    ("10:30", "1:3"),
    ("10:30", "3:30"),
    ("5", "|x| = 5"),
    ("2024-03-01", "2020"),
    ("2020", "2024-03-01"),
    (r"(0,1)\cup(2,3)", r"(0,1) \text{ or } (2,4)"),
    (r"x\in(0,1)\cup(2,3)", r"x\in(0,1) \text{ or } y\in(2,3)"),
    (r"(1,2) \text{ or } (3,4)", r"(1,2) \text{ or } (3,5)"),
    ("1e6", "100000"),
    (r"250\text{ ml}", r"250\text{ cm}"),
    (r"1\text{ m}^3", r"1\text{ liter}"),
    ("z=1+2i", "z=1-2i"),
    (r"w=e^{i\pi/3}", r"w=e^{i\pi/4}"),
    ("z=1+2i, w=3", "z=5-2i, w=3"),
    ("x^2-4x+13=0", "x^2-4x+5=0"),
    ("x^2-2x+5=0", "1=0"),
    ("z^2=-1", "z^2=-4"),
    (r"x=\infty", r"x=-\infty"),
    (r"\frac{dy}{dx}=2x", r"\frac{dy}{dx}=3x"),
]


@pytest.mark.parametrize(("gold", "text", "is_same"), [(*p, True) for p in SAME] + [(*p, False) for p in DIFFERENT])
def test_math_compares_an_answer_as_a_whole(gold, text, is_same):
    response = Response(text=math_forms.boxed(text), finish="stop", num_tokens=1)
    assert math.score(response, Task.judged_by("math", answer=gold), Context()).value == float(is_same)
