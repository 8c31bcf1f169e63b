"""Verifiers by the name that a `Task` gives; a module is imported when its name is first asked for."""

import importlib
import math
import numbers
from collections.abc import Callable

from bridge.types import Task
from configs import extension

Verifier = Callable[[str, Task], float]

MODULES = {
    "exact": "actor.verifiers.exact",
    "math": "actor.verifiers.math",
    "reasoning_gym": "actor.verifiers.reasoning_gym",
}

OWN_VERIFIER = extension.Signature(takes=("response_text", "task"), returns="float")


def load(name: str) -> Verifier:
    """The `score` function of a verifier, or a user's own, named `module:function`.

    Raises:
      ValueError: no such verifier; or (in one line) why the user's own can't be used.
    """
    if extension.is_own(name):
        return extension.load("prompts.verifier", name, OWN_VERIFIER)
    if name not in MODULES:
        raise ValueError(f"no verifier {name!r}; there are {', '.join(sorted(MODULES))}")
    return importlib.import_module(MODULES[name]).score


def reward(returned: object) -> float:
    """What a verifier returned, as a reward.

    Raises:
      ValueError: it is no finite number.
    """
    if not isinstance(returned, numbers.Real) or not math.isfinite(returned):
        raise ValueError(f"a verifier must return a finite number, got {returned!r}")
    return float(returned)
