"""A verifier worker that asks math-verify as it is: `python -m tests.actor.verifiers.library_worker`.

`library` gets the gold answer as LaTeX (in "$", as its manual wants), `library_bare` as it stands in the data;
`library_patient` is `library` without the library's own time limits, which call what a busy machine does late wrong.
"""

from typing import Any

import math_verify

from actor.verifiers import worker
from bridge.types import Finish, Task


def _patient(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def load(name: str) -> Any:
    def score(response_text: str, task: Task, finish: Finish) -> float:
        del finish
        gold = task.answer if name == "library_bare" else f"${task.answer}$"
        if name == "library_patient":
            return float(math_verify.verify(_patient(gold), _patient(response_text), timeout_seconds=None))
        return float(math_verify.verify(math_verify.parse(gold), math_verify.parse(response_text)))

    return score


if __name__ == "__main__":
    worker.main(load)
