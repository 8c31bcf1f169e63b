"""Sums and differences of numbers below a hundred, asked in words: rows for verifier=math.

A row's numbers are its `size` at most, one of `SIZES`: a small model finds rewards in small numbers long before it can
add large ones. A row is a function of (seed, index). Which pairs of numbers are held out is decided by the pair alone,
so that none of them is trained on, however it is asked. Each fourth of the held-out problems comes in a kind of
question that is trained, `TRAINED`, in turn; the others in three that are not, `UNSEEN`.
"""

import hashlib
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


TRAINED: Mapping[str, Ask] = {
    "what_is": lambda a, sign, b: f"What is {a} {sign} {b}?",
    "calculate": lambda a, sign, b: f"Calculate {a} {sign} {b}.",
    "equation": lambda a, sign, b: f"{a} {sign} {b} = ?",
    "sum_of": _sum_of,
    "work_out": _work_out,
    "marbles": _marbles,
}
"""By name, the questions that are trained on."""


def _in_words(a: int, sign: str, b: int) -> str:
    return f"How much is {a} {'plus' if sign == '+' else 'minus'} {b}?"


def _as_order(a: int, sign: str, b: int) -> str:
    order = f"Add {b} to {a}" if sign == "+" else f"Subtract {b} from {a}"
    return f"{order}."


def _as_story(a: int, sign: str, b: int) -> str:
    then = f"gets {b} more" if sign == "+" else f"gives {b} away"
    return f"Ann has {a} apples and {then}. How many apples has she now?"


UNSEEN: Mapping[str, Ask] = {"in_words": _in_words, "as_order": _as_order, "as_story": _as_story}
"""By name, those that are only asked of a held-out pair."""

SIZES = (9, 20, 50, 99)
"""Of a row's numbers the largest there may be; each as often as another."""

HELD_OUT_ONE_IN = 10
"""Pairs of numbers."""


def train_row(seed: int, index: int) -> dict[str, Any]:
    """A row to train on."""
    return _row(random.Random(f"train.{seed}.{index}"), TRAINED, is_held_out=False)


def held_out_row(seed: int, index: int) -> dict[str, Any]:
    """A held-out row: each fourth is of a kind that is trained on."""
    kinds = {"trained": list(TRAINED.values())[index // 4 % len(TRAINED)], **UNSEEN}
    kind = list(kinds)[index % 4]
    return _row(random.Random(f"held_out.{seed}.{index}"), {kind: kinds[kind]}, is_held_out=True)


def _row(drawn: random.Random, kinds: Mapping[str, Ask], *, is_held_out: bool) -> dict[str, Any]:
    size = drawn.choice(SIZES)
    while True:
        a, b = drawn.randint(1, size), drawn.randint(1, size)
        sign = drawn.choice("+-")
        if sign == "-":
            a, b = max(a, b), min(a, b)
        if _holds_out(a, sign, b) == is_held_out:
            break
    kind = drawn.choice(list(kinds))
    answer = a + b if sign == "+" else a - b
    return {"prompt": kinds[kind](a, sign, b), "answer": answer, "metadata": {"kind": kind, "size": size}}


def _holds_out(a: int, sign: str, b: int) -> bool:
    """By the pair, in either order."""
    digest = hashlib.sha256(f"{min(a, b)}{sign}{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0
