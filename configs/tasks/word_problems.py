"""Word problems of one to three steps with small whole numbers, similar to GSM8K: rows for verifier=math.

A row is a function of (seed, index). A problem is a chain: a person has some things, each sentence changes their number
by a term or a factor, and the question asks for the result. The answer is a short solution that ends in `#### N`, as in
GSM8K; the response, for supervised fine-tuning, ends as the prompt asks. Numbers and steps alone decide whether a
problem is held out, so training never sees it in other words.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable
from typing import Any

HELD_OUT_ONE_IN = 10
MAX_VALUE = 200
"""Largest number of things at any step. The smallest is 0."""

_NAMES = {"Ann": "she", "Ben": "he", "Mia": "she", "Tom": "he", "Zoe": "she", "Sam": "he", "Eva": "she", "Max": "he"}
_THINGS = ("apples", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
_INSTRUCTION = 'Think in short steps, and end with "The answer is" and the number.'


@dataclasses.dataclass(frozen=True)
class _Step:
    """Change of the number of things."""

    sentences: tuple[str, ...]
    apply: Callable[[int, int], int]
    sign: str
    low: int
    high: int
    """Largest number drawn for the step; low is the smallest."""


_STEPS = {
    "gain": _Step(
        ("{who} gets {n} more {things}", "{who} buys another {n} {things}", "{who} finds {n} {things}"),
        lambda x, n: x + n,
        "+",
        3,
        60,
    ),
    "loss": _Step(
        ("{who} gives {n} {things} to a friend", "{who} loses {n} {things}", "{who} sells {n} of the {things}"),
        lambda x, n: x - n,
        "-",
        3,
        60,
    ),
    "times": _Step(
        ("then {who} collects until there are {n} times as many", "{who} swaps the {things} for {n} times as many"),
        lambda x, n: x * n,
        "*",
        2,
        5,
    ),
}


def train_row(seed: int, index: int, *, num_steps: int) -> dict[str, Any]:
    """Returns a training row."""
    return _row(random.Random(f"train.{seed}.{num_steps}.{index}"), num_steps, is_held_out=False)


def held_out_row(seed: int, index: int, *, num_steps: int) -> dict[str, Any]:
    """Returns a held-out row."""
    return _row(random.Random(f"held_out.{seed}.{num_steps}.{index}"), num_steps, is_held_out=True)


def _row(drawn: random.Random, num_steps: int, *, is_held_out: bool) -> dict[str, Any]:
    while True:
        first = drawn.randint(4, 80)
        steps = [(name, drawn.randint(_STEPS[name].low, _STEPS[name].high)) for name in _kinds(drawn, num_steps)]
        values = [first]
        for name, number in steps:
            values.append(_STEPS[name].apply(values[-1], number))
        if all(0 <= value <= MAX_VALUE for value in values) and _holds_out(first, steps) == is_held_out:
            break
    name = drawn.choice(list(_NAMES))
    who, things = _NAMES[name], drawn.choice(_THINGS)
    sentences = [f"{name} has {first} {things}"]
    for kind, number in steps:
        sentence = drawn.choice(_STEPS[kind].sentences).format(who=who, n=number, things=things)
        sentences.append(sentence[0].upper() + sentence[1:])
    question = f"{'. '.join(sentences)}. How many {things} does {name} have now? {_INSTRUCTION}"
    lines = [
        f"{before} {_STEPS[kind].sign} {number} = {after}"
        for before, (kind, number), after in zip(values, steps, values[1:], strict=False)
    ]
    return {
        "prompt": question,
        "answer": "\n".join([*lines, f"#### {values[-1]}"]),
        "response": "\n".join([*lines, f"The answer is {values[-1]}."]),
        "metadata": {"steps": num_steps},
    }


def _kinds(drawn: random.Random, num_steps: int) -> list[str]:
    """Returns step kinds without adjacent repeats, because two gains are one."""
    kinds: list[str] = []
    while len(kinds) < num_steps:
        kinds.append(drawn.choice([k for k in _STEPS if not kinds or k != kinds[-1]]))
    return kinds


def _holds_out(first: int, steps: list[tuple[str, int]]) -> bool:
    digest = hashlib.sha256(repr((first, steps)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0
