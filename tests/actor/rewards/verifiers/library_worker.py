"""A verifier worker that asks math-verify as it is: `python -m tests.actor.rewards.verifiers.library_worker`.

`library` gets the gold answer as LaTeX (in "$", as its manual wants), `library_bare` as it stands in the data;
`library_patient` is `library` without the library's own time limits, which call what a busy machine does late wrong.
"""

from typing import Any

import math_verify

from actor.rewards import verifier_worker
from actor.rewards.types import Context, Response, Score
from bridge.rollout_types import Task


def _patient(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def load(name: str) -> Any:
    def score(response: Response, task: Task, context: Context) -> Score:
        del context
        gold = task.answer if name == "library_bare" else f"${task.answer}$"
        if name == "library_patient":
            return Score.of(math_verify.verify(_patient(gold), _patient(response.text), timeout_seconds=None))
        return Score.of(math_verify.verify(math_verify.parse(gold), math_verify.parse(response.text)))

    return score


if __name__ == "__main__":
    verifier_worker.main(load)
