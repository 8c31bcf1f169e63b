"""Word problems: right answers, by reading the stories again."""

import re

import pytest

from configs.tasks import word_problems


def read(story: str) -> int:
    """What somebody has in the end, by the words of the sentences."""
    first, *rest = story.split(". How many")[0].split(". ")
    (have,) = map(int, re.findall(r"\d+", first))
    for sentence in rest:
        (number,) = map(int, re.findall(r"\d+", sentence))
        if "times as many" in sentence:
            have *= number
        elif re.search(r"gives|loses|sells", sentence):
            have -= number
        else:
            assert re.search(r"gets|buys|finds", sentence), sentence
            have += number
        assert 0 <= have <= word_problems.MAX_VALUE
    return have


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("make", [word_problems.train_row, word_problems.held_out_row])
def test_solution_ends_in_the_right_number_and_its_steps_are_right(make, num_steps):
    for index in range(200):
        row = make(1, index, num_steps=num_steps)
        *steps, last = row["answer"].splitlines()
        assert last == f"#### {read(row['prompt'])}" and len(steps) == num_steps
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right)


def test_held_out_problem_is_never_trained_on_in_other_words():
    def numbers(make) -> set[tuple[str, ...]]:
        """A problem's steps, which its solution spells out."""
        rows = (make(0, index, num_steps=1) for index in range(6000))
        return {tuple(row["answer"].splitlines()) for row in rows}

    trained, held_out = numbers(word_problems.train_row), numbers(word_problems.held_out_row)
    assert len(trained) > 1000 and len(held_out) > 100 and not trained & held_out
