"""Small functions with test cases: rows for verifier=code that a tiny model learns.

Row i is a function of (seed, i): a question in words and one short Python function as its answer. The text of a
question decides whether it is held out. Held-out questions are new combinations of known words and numbers.
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
"""Share of rows with loops. A wrong answer to them may not terminate."""
NUM_TESTS = 3
MAX_NUMBER = 99


def row(seed: int, index: int) -> dict[str, Any]:
    """Returns row `index`: a prompt, with test cases and a solution as metadata."""
    drawn = random.Random(f"{seed}.{index}")
    question, solution, function = (_loop if drawn.random() < LOOP_SHARE else _formula)(drawn)
    numbers = drawn.sample(range(2, MAX_NUMBER), NUM_TESTS)
    tests = [{"call": "f", "args": [x], "returns": function(x)} for x in numbers]
    return {"prompt": f"{question}:", "metadata": {"tests": tests, "solution": solution, "code_in": "text"}}


def _formula(drawn: random.Random) -> tuple[str, str, Callable[[int], int]]:
    """Returns two steps, for example "times 3 plus 14"."""
    (first, m), (second, n) = ((drawn.choice(list(_STEPS)), drawn.randint(1, MAX_NUMBER)) for _ in range(2))
    (sign, step), (next_sign, next_step) = _STEPS[first], _STEPS[second]
    solution = f"def f(x):return (x{sign}{m}){next_sign}{n}"
    return f"{first} {m} {second} {n}", solution, lambda x: next_step(step(x, m), n)


def _loop(drawn: random.Random) -> tuple[str, str, Callable[[int], int]]:
    """Returns a repeated step, for example "minus 3 while over 14"."""
    down, bound = drawn.randint(1, 9), drawn.randint(9, MAX_NUMBER)

    def function(x: int) -> int:
        while x > bound:
            x -= down
        return x

    return f"minus {down} while over {bound}", f"def f(x):\n while x>{bound}:x-={down}\n return x", function
