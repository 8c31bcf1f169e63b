"""Sums and differences of numbers below a hundred, in words: rows for verifier=math, with worked answers.

Each row draws its numbers up to a size, one of `SIZES`: a given one, for a curriculum, or a random one. A row is a
function of (seed, index, size). The pair of numbers alone decides whether it is held out, so training never sees the
pair in any wording. One in four held-out problems uses a wording of training (`TRAINED`), the others one of `UNSEEN`.
"""

import hashlib
import itertools
import random
from collections.abc import Mapping
from typing import Any

TRAINED: Mapping[str, tuple[str, str]] = {
    "what_is": ("What is {a} + {b}?", "What is {a} - {b}?"),
    "calculate": ("Calculate {a} + {b}.", "Calculate {a} - {b}."),
    "equation": ("{a} + {b} = ?", "{a} - {b} = ?"),
    "sum_of": ("What is the sum of {a} and {b}?", "What is the difference between {a} and {b}?"),
    "work_out": ("Work out {a} plus {b}.", "Work out {a} minus {b}."),
    "marbles": (
        "Tom has {a} marbles. He finds {b} more. How many marbles are there then?",
        "Tom has {a} marbles. He loses {b} of them. How many marbles are there then?",
    ),
    "pencils": (
        "Mia has {a} pencils. She buys {b} more. How many pencils does she have now?",
        "Mia has {a} pencils. She hands out {b}. How many pencils does she have now?",
    ),
    "birds": (
        "{a} birds sit in a tree and {b} more come. How many birds are there now?",
        "{a} birds sit in a tree and {b} fly off. How many birds are there now?",
    ),
    "put_or_take": ("Put {b} on top of {a}.", "Take {b} from {a}."),
    "increase_or_reduce": ("Increase {a} by {b}.", "Reduce {a} by {b}."),
    "larger_or_smaller": ("Which number is {b} larger than {a}?", "Which number is {b} smaller than {a}?"),
    "how_much": ("How much is {a} plus {b}?", "How much is {a} minus {b}?"),
    "add_or_subtract": ("Add {b} to {a}.", "Subtract {b} from {a}."),
    "apples": (
        "Ann has {a} apples and gets {b} more. How many apples has she now?",
        "Ann has {a} apples and gives {b} away. How many apples has she now?",
    ),
}
"""Question wordings used in training, of a sum and of a difference, by name."""

UNSEEN: Mapping[str, tuple[str, str]] = {
    "unknown": ("Let x = {a} + {b}. Find x.", "Let x = {a} - {b}. Find x."),
    "count_on": (
        "Start at {a} and count up by {b}. Where do you end?",
        "Start at {a} and count down by {b}. Where do you end?",
    ),
    "till": (
        "A shop has {a} euros in the till and takes in {b} euros. How many euros are in the till?",
        "A shop has {a} euros in the till and pays out {b} euros. How many euros are in the till?",
    ),
}
"""Question wordings used only for held-out pairs, by name. No setting was chosen by a response to them."""

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


def _row(drawn: random.Random, kinds: Mapping[str, tuple[str, str]], size: int, *, is_held_out: bool) -> dict[str, Any]:
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
        "prompt": kinds[kind][sign == "-"].format(a=a, b=b),
        "answer": a + b if sign == "+" else a - b,
        "response": worked_answer(a, sign, b),
        "metadata": {"kind": kind, "size": size},
    }


def _holds_out(a: int, sign: str, b: int) -> bool:
    """Returns True if the pair, in either order, is held out."""
    digest = hashlib.sha256(f"{min(a, b)}{sign}{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0
