"""Sums and differences of numbers below a hundred, in words: rows for verifier=math, with worked answers.

Each row draws its numbers up to a size, one of `SIZES`: a given one, for a curriculum, or a random one. A row is a
function of (seed, index, size). The pair of numbers alone decides whether it is held out, so training never sees the
pair in any wording. One in four held-out problems uses a wording of training (`TRAINED`), the others one of `UNSEEN`.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Ask = Callable[[int, str, int], str]


def _sum_of(a: int, sign: str, b: int) -> str:
    return f"What is the {'sum of' if sign == '+' else 'difference between'} {a} and {b}?"


def _work_out(a: int, sign: str, b: int) -> str:
    return f"Work out {a} {'plus' if sign == '+' else 'minus'} {b}."


def _marbles(a: int, sign: str, b: int) -> str:
    then = f"finds {b} more" if sign == "+" else f"loses {b} of them"
    return f"Tom has {a} marbles. He {then}. How many marbles are there then?"


def _pencils(a: int, sign: str, b: int) -> str:
    then = f"She buys {b} more." if sign == "+" else f"She hands out {b}."
    return f"Mia has {a} pencils. {then} How many pencils does she have now?"


def _birds(a: int, sign: str, b: int) -> str:
    return f"{a} birds sit in a tree and {b} {'more come' if sign == '+' else 'fly off'}. How many birds are there now?"


def _put_or_take(a: int, sign: str, b: int) -> str:
    return f"Put {b} on top of {a}." if sign == "+" else f"Take {b} from {a}."


def _increase_or_reduce(a: int, sign: str, b: int) -> str:
    return f"{'Increase' if sign == '+' else 'Reduce'} {a} by {b}."


def _larger_or_smaller(a: int, sign: str, b: int) -> str:
    return f"Which number is {b} {'larger' if sign == '+' else 'smaller'} than {a}?"


def _how_much(a: int, sign: str, b: int) -> str:
    return f"How much is {a} {'plus' if sign == '+' else 'minus'} {b}?"


def _add_or_subtract(a: int, sign: str, b: int) -> str:
    return f"Add {b} to {a}." if sign == "+" else f"Subtract {b} from {a}."


def _apples(a: int, sign: str, b: int) -> str:
    then = f"gets {b} more" if sign == "+" else f"gives {b} away"
    return f"Ann has {a} apples and {then}. How many apples has she now?"


TRAINED: Mapping[str, Ask] = {
    "what_is": lambda a, sign, b: f"What is {a} {sign} {b}?",
    "calculate": lambda a, sign, b: f"Calculate {a} {sign} {b}.",
    "equation": lambda a, sign, b: f"{a} {sign} {b} = ?",
    "sum_of": _sum_of,
    "work_out": _work_out,
    "marbles": _marbles,
    "pencils": _pencils,
    "birds": _birds,
    "put_or_take": _put_or_take,
    "increase_or_reduce": _increase_or_reduce,
    "larger_or_smaller": _larger_or_smaller,
    "how_much": _how_much,
    "add_or_subtract": _add_or_subtract,
    "apples": _apples,
}
"""Question wordings used in training, by name."""


def _count_on(a: int, sign: str, b: int) -> str:
    return f"Start at {a} and count {'up' if sign == '+' else 'down'} by {b}. Where do you end?"


def _till(a: int, sign: str, b: int) -> str:
    then = f"takes in {b} euros" if sign == "+" else f"pays out {b} euros"
    return f"A shop has {a} euros in the till and {then}. How many euros are in the till?"


UNSEEN: Mapping[str, Ask] = {
    "unknown": lambda a, sign, b: f"Let x = {a} {sign} {b}. Find x.",
    "count_on": _count_on,
    "till": _till,
}
"""Question wordings used only for held-out pairs, by name. No setting was chosen by a result on them."""

SIZES = (9, 20, 50, 99)
"""Upper bounds of the numbers in a row."""

HELD_OUT_ONE_IN = 10
"""Inverse share of held-out pairs of numbers."""


def train_row(seed: int, index: int, *, size: int = 0) -> dict[str, Any]:
    """Returns a training row; size 0: a random one."""
    return _row(random.Random(f"train.{seed}.{size}.{index}"), TRAINED, size, is_held_out=False)


def held_out_row(seed: int, index: int, *, size: int = 0) -> dict[str, Any]:
    """Returns a held-out row; size 0: a random one. One in four uses a wording of training."""
    kinds = {"trained": list(TRAINED.values())[index // 4 % len(TRAINED)], **UNSEEN}
    kind = list(kinds)[index % 4]
    return _row(random.Random(f"held_out.{seed}.{size}.{index}"), {kind: kinds[kind]}, size, is_held_out=True)


def worked_answer(a: int, sign: str, b: int) -> str:
    """Returns the answer in steps, one per line: first the tens of b, then its ones, and the result alone."""
    numbers = [n for n in (b // 10 * 10, b % 10) if n]
    values = list(itertools.accumulate(numbers, lambda x, n: x + n if sign == "+" else x - n, initial=a))
    steps = [f"{x} {sign} {n} = {y}" for x, n, y in zip(values, numbers, values[1:], strict=False)]
    return "\n".join([*steps, str(values[-1])])


def _row(drawn: random.Random, kinds: Mapping[str, Ask], size: int, *, is_held_out: bool) -> dict[str, Any]:
    size = size or drawn.choice(SIZES)
    while True:
        a, b = drawn.randint(1, size), drawn.randint(1, size)
        sign = drawn.choice("+-")
        if sign == "-":
            a, b = max(a, b), min(a, b)
        if _holds_out(a, sign, b) == is_held_out:
            break
    kind = drawn.choice(list(kinds))
    return {
        "prompt": kinds[kind](a, sign, b),
        "answer": a + b if sign == "+" else a - b,
        "response": worked_answer(a, sign, b),
        "metadata": {"kind": kind, "size": size},
    }


def _holds_out(a: int, sign: str, b: int) -> bool:
    """Returns True if the pair, in either order, is held out."""
    digest = hashlib.sha256(f"{min(a, b)}{sign}{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0
