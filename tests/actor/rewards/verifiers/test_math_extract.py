import pytest

from actor.rewards.verifiers.math_extract import extract_answer

FRACTION = r"\frac{\sqrt{3}}{2}"


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        # marked: the last one decides, whatever follows
        (r"\boxed{4}", "4"),
        (r"So $x = \boxed{4}$. But wait, let me see whether 5", "4"),
        (r"\boxed{3}, no: \boxed{4}", "4"),
        (r"\boxed{4}. The answer is 5.", "4"),
        (rf"\boxed{{{FRACTION}}}", FRACTION),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{4}", "4"),
        (r"\boxed 4.", "4"),
        ("He has 3 left.\n#### 72", "72"),
        ("\\boxed{3}\n#### 1,000  ", "1,000"),
        ("#### 72\nor \\boxed{3}", "3"),
        # marked, but not closed or empty
        (r"\boxed{3}, no: \boxed{4", None),
        (r"\boxed{}", None),
        # said
        ("The answer is 4.", "4"),
        ("the answer is 3.5. Then 4", "3.5"),
        ("The final answer is: **4**", "4"),
        ("**Answer:** 4", "4"),
        ("Answer = -1/2", "-1/2"),
        ("### Final Answer\n\n$-4$", "-4"),
        ("We look for the answer\n3 + 1 = 4", None),
        ("The answer is therefore 42 apples.", "42"),
        ("The answer to the question is 4, since 2 + 2 = 4", "4"),
        ("The answer would be x = 4", "x = 4"),
        ("The answer is\n\\[\n\\frac{1}{2}\n\\]", r"\frac{1}{2}"),
        ("The answers are $1$, $2$ and \\(3\\).", "1, 2, 3"),
        ("The answer is 4 or 5", "4, 5"),
        ("The answer is $5.", "5"),
        ("The answer is 5. No, the answer is 4. I am sure of the answer.", "4"),
        ("The answer is not 4", None),
        ("The answer is unknown, maybe 4", None),
        ("I don't know the answer. Perhaps 4", None),
        # nothing else
        (" 42\n", "42"),
        (r"$\frac12$", r"\frac12"),
        ("1/3", "1/3"),
        # running text
        ("We try x = 3, then 3 + 1 = 4", None),
        ("1\n2\n3", None),
        ("#### Step 3: it is 4", None),
        ("#### Conclusion", None),
        ("", None),
    ],
)
def test_conclusion_is_what_the_text_states_as_its_answer(text, stated):
    assert extract_answer(text) == stated
