"""Verifiers by name, the user's own, gold responses."""

import importlib
import json
import re
from collections.abc import Callable
from typing import Any

from actor.rewards.types import Context, Response, Score, Verifier
from actor.rewards.verifiers.code_block import fenced
from bridge import code_tests
from bridge.rollout_types import Task
from configs import custom_functions
from configs.sections import RewardsConfig


def gold_response(name: str, task: Task, settings: RewardsConfig) -> str:
    """A text that verifier `name` should find to be right; empty if the row has none.

    Args:
      name: a verifier's; one that isn't ours is given the answer as the row has it.
      task: that it is the answer to.
      settings: say where programs are looked for.

    Raises:
      ValueError: the row's test cases are none.
    """
    if name == "code":
        tests = code_tests.read(json.loads(task.metadata))
        in_block = (tests.code_in or settings.code_in) == "block"
        return fenced(tests.solution, tests.language) if tests.solution and in_block else tests.solution
    if name == "math" and task.answer:
        # In LaTeX's own marks it is found already; a box would hide them.
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
"""Each is a function that takes a response, its task and the context, and returns a number or a `Score`."""


PREPARED = ("code",)
"""Their modules have a function `prepare` besides, which takes `RewardsConfig`: what takes time before the first
response."""
OWN_VERIFIER = custom_functions.Signature(
    takes=("response_text", "task"), constants=("finish", "num_tokens", "thinking", "message"), returns="float"
)
"""A custom verifier: `response_text` is the response's answer; of the constants it takes those that it names."""


def load(name: str) -> Verifier:
    """The verifier of a name, or a user's own, named `module:function`.

    Raises:
      ValueError: no such verifier; or (in one line) why the user's own can't be used.
    """
    if custom_functions.is_custom(name):
        return _own(custom_functions.load("prompts.verifier", name, OWN_VERIFIER))
    if name not in MODULES:
        raise ValueError(f"no verifier {name!r}; there are {', '.join(sorted(MODULES))}")
    module, function = MODULES[name].split(":")
    return _scored(getattr(importlib.import_module(module), function))


def prepare(name: str, settings: RewardsConfig) -> None:
    """Makes what a verifier needs besides its module; raises what the verifier does."""
    if name in PREPARED:
        importlib.import_module(MODULES[name].partition(":")[0]).prepare(settings)


def _scored(function: Callable[[Response, Task, Context], Any]) -> Verifier:
    def score(response: Response, task: Task, context: Context) -> Score:
        returned = function(response, task, context)
        return returned if isinstance(returned, Score) else Score.of(returned)

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
