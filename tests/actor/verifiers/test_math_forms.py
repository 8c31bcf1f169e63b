"""`math` against the forms of answers that were judged by hand (`math_forms.jsonl`)."""

import pytest

from tests.actor.verifiers import math_agreement, math_forms

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
