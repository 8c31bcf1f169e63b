"""Verifiers by name, custom verifiers, reference responses."""

import importlib
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from actor.rewards.types import Context, Response, Score, Verifier, answer_key
from actor.rewards.verifiers.code_block import fenced
from actor.rewards.verifiers.math_extract import solution_answer
from bridge import code_tests
from bridge.rollout_types import Task
from configs import custom_functions
from configs.sections import RewardsConfig


def gold_response(name: str, task: Task, settings: RewardsConfig) -> str:
    """Returns a text that verifier `name` should score as right; empty if the row has none.

    A custom verifier receives the row's answer unchanged. Raises ValueError if the row's test cases are invalid.
    """
    if name == "code":
        tests = code_tests.read(json.loads(task.metadata))
        in_block = (tests.code_in or settings.code_in) == "block"
        return fenced(tests.solution, tests.language) if tests.solution and in_block else tests.solution
    if name == "math" and task.answer and not solution_answer(task.answer):
        # Answers in LaTeX delimiters are found as they are; a box would hide the delimiters.
        is_marked = re.search(r"(?<!\\)(?:\$|\\[(\[])|\\boxed", task.answer)  # \$18.90 is money
        return f"The answer is {task.answer}" if is_marked else f"\\boxed{{{task.answer}}}"
    return task.answer


MODULES = {
    "code": "actor.rewards.verifiers.code:score",
    "exact": "actor.rewards.verifiers.text_match:score_exact",
    "format": "actor.rewards.verifiers.text_match:score_format",
    "math": "actor.rewards.verifiers.math:score",
    "reasoning_gym": "actor.rewards.verifiers.reasoning_gym:score",
}
"""Functions that take a response, its task and the context, and return a number or a `Score`."""


PREPARED = ("code",)
"""Verifiers whose module has `prepare(RewardsConfig)` for slow preparation before the first response."""
OWN_VERIFIER = custom_functions.Signature(
    takes=("response_text", "task"), constants=("finish", "num_tokens", "thinking", "message"), returns="float"
)
"""Signature of a custom verifier: `response_text` is the response's answer; constants are passed if it names them."""


def load(name: str) -> Verifier:
    """Returns a verifier by name, or a custom one by `module:function`; raises ValueError if it is unusable."""
    if custom_functions.is_custom(name):
        return _own(custom_functions.load("prompts.verifier", name, OWN_VERIFIER))
    if name not in MODULES:
        raise ValueError(f"no verifier {name!r}; expected one of {', '.join(sorted(MODULES))}")
    module, function = MODULES[name].split(":")
    return _scored(getattr(importlib.import_module(module), function))


def prepare(name: str, settings: RewardsConfig) -> None:
    """Runs a verifier's `prepare`, if it has one, and raises its errors."""
    if name in PREPARED:
        importlib.import_module(MODULES[name].partition(":")[0]).prepare(settings)


def _scored(function: Callable[[Response, Task, Context], Any]) -> Verifier:
    def score(response: Response, task: Task, context: Context) -> Score:
        returned = function(response, task, context)
        if not isinstance(returned, Score):
            return Score.of(returned)
        answer = None if returned.answer is None else answer_key(returned.answer)
        return msgspec.structs.replace(returned, value=Score.of(returned.value).value, answer=answer)

    return score


def _own(function: Callable[..., Any]) -> Verifier:
    named = custom_functions.constant_defaults(function, OWN_VERIFIER)

    def score(response: Response, task: Task, context: Context) -> Any:
        del context
        constants = {
            "finish": response.finish,
            "num_tokens": response.num_tokens,
            "thinking": response.thinking,
            "message": response.message,
        }
        return function(response.answer, task, **{n: v for n, v in constants.items() if n in named})

    return _scored(score)
