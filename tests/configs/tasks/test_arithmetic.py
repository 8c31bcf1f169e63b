"""Sums and differences: right answers, by reading the questions again, and pairs that are held out however asked."""

import functools
import re

import pytest

from configs.tasks import arithmetic

DEVELOPMENT_ROW = functools.partial(arithmetic.held_out_row, unseen=arithmetic.DEVELOPMENT)


def pair_of(question: str) -> tuple[str, tuple[int, int]]:
    """The operation and the numbers that a question asks for, read by other rules than it was written by."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    assert len(numbers) == 2, question
    is_difference = re.search(
        r" - |minus|loses|hands out|fly off|Take|Reduce|smaller|Subtract|away|get off|drawn out|How much longer"
        r"|carried out|less|difference|gap|decreased|without|taken|give \d|ago|of them girls|sells|colder|lower|shorter"
        r"|has walked|lighter|leave|How many more|drive out|eats|lent out|count down|pays out|back|falls|Deduct",
        question,
    )
    if re.match(r"Add|Subtract|Take|Which|What number|Put|Deduct|\d+ (added|taken)|Zoe has", question):
        numbers.reverse()
    return "-" if is_difference else "+", (numbers[0], numbers[1])


@pytest.mark.parametrize("size", [0, 9, 99])
@pytest.mark.parametrize("make", [arithmetic.train_row, arithmetic.held_out_row, DEVELOPMENT_ROW])
def test_answers_are_right_and_numbers_as_large_as_the_size_at_most(make, size):
    for index in range(400):
        row = make(3, index, size=size)
        sign, (a, b) = pair_of(row["prompt"])
        assert row["answer"] == (a + b if sign == "+" else a - b) >= 0
        assert 1 <= min(a, b) <= max(a, b) <= row["metadata"]["size"]
        assert row["metadata"]["size"] == (size or row["metadata"]["size"])


@pytest.mark.parametrize("size", [9, 99])
def test_every_step_of_a_worked_answer_is_right_and_the_last_is_the_answer(size):
    for index in range(400):
        row = arithmetic.train_row(3, index, size=size)
        sign, (a, b) = pair_of(row["prompt"])
        steps = [re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", line) for line in row["response"].split("\n")]
        found = [(int(s[1]), s[2], int(s[3]), int(s[4])) for s in steps if s]
        assert len(found) == len(steps) and [s[0] for s in found] == [a, *(s[3] for s in found[:-1])]
        assert all(s[3] == (s[0] + s[2] if s[1] == "+" else s[0] - s[2]) and s[1] == sign for s in found)
        assert sum(s[2] for s in found) == b and found[-1][3] == row["answer"]


def test_pair_that_is_held_out_is_never_trained_on_in_either_order():
    def pairs(make) -> set[tuple[str, int, int]]:
        asked = (pair_of(make(0, index)["prompt"]) for index in range(4000))
        return {(sign, min(numbers), max(numbers)) for sign, numbers in asked}

    trained, held_out, development = map(pairs, (arithmetic.train_row, arithmetic.held_out_row, DEVELOPMENT_ROW))
    assert trained and held_out and development and not trained & (held_out | development)


def test_three_quarters_of_the_held_out_rows_are_of_kinds_that_are_not_trained():
    kinds = [arithmetic.held_out_row(0, index)["metadata"]["kind"] for index in range(256)]
    assert {kind: kinds.count(kind) for kind in kinds} == {"trained": 64, **dict.fromkeys(arithmetic.UNSEEN, 64)}
    sizes = [arithmetic.train_row(0, index)["metadata"]["size"] for index in range(400)]
    assert {size: sizes.count(size) > 70 for size in sizes} == dict.fromkeys(arithmetic.SIZES, True)
    trained = {arithmetic.train_row(0, index)["metadata"]["kind"] for index in range(400)}
    assert trained == set(arithmetic.TRAINED) and not trained & {*arithmetic.UNSEEN, *arithmetic.DEVELOPMENT}
    kinds = [DEVELOPMENT_ROW(0, index)["metadata"]["kind"] for index in range(252)]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("trained", *arithmetic.DEVELOPMENT), 42)


def test_row_is_a_function_of_seed_and_index():
    assert arithmetic.train_row(1, 7) == arithmetic.train_row(1, 7)
    assert len({arithmetic.train_row(seed, 7)["prompt"] for seed in range(5)}) == 5
