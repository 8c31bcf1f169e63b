"""Small functions to write, with test cases: rows for verifier=code that a tiny model learns.

Row i is a function of (seed, i). A question is in words, its answer one short Python function; which questions are held
out is decided by their text, so that a held-out one is a new combination of words and numbers that were all seen.
"""

import random
from collections.abc import Callable
from typing import Any

_STEPS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda x, n: x + n),
    "minus": ("-", lambda x, n: x - n),
    "times": ("*", lambda x, n: x * n),
}
LOOP_SHARE = 0.25
"""Of the rows; an answer to such a one may never end."""
NUM_TESTS = 3
MAX_NUMBER = 99


def row(seed: int, index: int) -> dict[str, Any]:
    """Row `index`: a prompt, and as metadata its test cases and a solution."""
    drawn = random.Random(f"{seed}.{index}")
    question, solution, function = (_loop if drawn.random() < LOOP_SHARE else _formula)(drawn)
    numbers = drawn.sample(range(2, MAX_NUMBER), NUM_TESTS)
    tests = [{"call": "f", "args": [x], "returns": function(x)} for x in numbers]
    return {"prompt": f"{question}:", "metadata": {"tests": tests, "solution": solution, "code_in": "text"}}


def _formula(drawn: random.Random) -> tuple[str, str, Callable[[int], int]]:
    """Two steps, as in "times 3 plus 14"."""
    (first, m), (second, n) = ((drawn.choice(list(_STEPS)), drawn.randint(1, MAX_NUMBER)) for _ in range(2))
    (sign, step), (next_sign, next_step) = _STEPS[first], _STEPS[second]
    solution = f"def f(x):return (x{sign}{m}){next_sign}{n}"
    return f"{first} {m} {second} {n}", solution, lambda x: next_step(step(x, m), n)


def _loop(drawn: random.Random) -> tuple[str, str, Callable[[int], int]]:
    """One step again and again, as in "minus 3 while over 14"."""
    down, bound = drawn.randint(1, 9), drawn.randint(9, MAX_NUMBER)

    def function(x: int) -> int:
        while x > bound:
            x -= down
        return x

    return f"minus {down} while over {bound}", f"def f(x):\n while x>{bound}:x-={down}\n return x", function
