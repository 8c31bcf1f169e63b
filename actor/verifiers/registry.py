"""Verifiers by the name that a task gives; a module is imported when its name is first asked for."""

import importlib
from collections.abc import Callable
from typing import Any

from actor.verifiers.judged import Context, Response, Score, Verifier
from bridge.types import Task
from configs import extension
from configs.sections import RewardsConfig

MODULES = {
    "code": "actor.verifiers.code.verifier",
    "exact": "actor.verifiers.exact",
    "format": "actor.verifiers.format",
    "math": "actor.verifiers.math",
    "reasoning_gym": "actor.verifiers.reasoning_gym",
}
"""Each has a function `score` that takes a response, its task and the context, and returns a number or a `Score`."""

PREPARED = ("code",)
"""Their modules have a function `prepare` besides, which takes `RewardsConfig`: what takes time before the first
response."""
OWN_VERIFIER = extension.Signature(
    takes=("response_text", "task"), constants=("finish", "num_tokens", "thinking", "message"), returns="float"
)
"""A custom verifier: `response_text` is the response's answer; of the constants it takes those that it names."""


def load(name: str) -> Verifier:
    """The verifier of a name, or a user's own, named `module:function`.

    Raises:
      ValueError: no such verifier; or (in one line) why the user's own can't be used.
    """
    if extension.is_own(name):
        return _own(extension.load("prompts.verifier", name, OWN_VERIFIER))
    if name not in MODULES:
        raise ValueError(f"no verifier {name!r}; there are {', '.join(sorted(MODULES))}")
    return _scored(importlib.import_module(MODULES[name]).score)


def prepare(name: str, settings: RewardsConfig) -> None:
    """Makes what a verifier needs besides its module; raises what the verifier does."""
    if name in PREPARED:
        importlib.import_module(MODULES[name]).prepare(settings)


def _scored(function: Callable[[Response, Task, Context], Any]) -> Verifier:
    def score(response: Response, task: Task, context: Context) -> Score:
        returned = function(response, task, context)
        return returned if isinstance(returned, Score) else Score.of(returned)

    return score


def _own(function: Callable[..., Any]) -> Verifier:
    named = extension.constant_defaults(function, OWN_VERIFIER)

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
