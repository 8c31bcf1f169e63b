"""Verifiers by the name that a `Task` gives; a module is imported when its name is first asked for."""

import importlib
import math
import numbers
from collections.abc import Callable

from bridge.types import Finish, Task
from configs import extension

Verifier = Callable[[str, Task, Finish], float]
"""The reward of a response, from its text, its task and why it ended."""

MODULES = {
    "exact": "actor.verifiers.exact",
    "math": "actor.verifiers.math",
    "reasoning_gym": "actor.verifiers.reasoning_gym",
}

OWN_VERIFIER = extension.Signature(takes=("response_text", "task"), constants=("finish",), returns="float")
"""A user's own need not take `finish`: with `prompts.truncated=zero` it is only asked about completed responses."""


def load(name: str) -> Verifier:
    """The `score` function of a verifier, or a user's own, named `module:function`.

    Raises:
      ValueError: no such verifier; or (in one line) why the user's own can't be used.
    """
    if extension.is_own(name):
        return _own(extension.load("prompts.verifier", name, OWN_VERIFIER))
    if name not in MODULES:
        raise ValueError(f"no verifier {name!r}; there are {', '.join(sorted(MODULES))}")
    return importlib.import_module(MODULES[name]).score


def _own(function: Callable[..., float]) -> Verifier:
    takes_finish = "finish" in extension.constant_defaults(function, OWN_VERIFIER)

    def score(response_text: str, task: Task, finish: Finish) -> float:
        return function(response_text, task, **({"finish": finish} if takes_finish else {}))

    return score


def reward(returned: object) -> float:
    """What a verifier returned, as a reward.

    Raises:
      ValueError: it is no finite number.
    """
    if not isinstance(returned, numbers.Real) or not math.isfinite(returned):
        raise ValueError(f"a verifier must return a finite number, got {returned!r}")
    return float(returned)
