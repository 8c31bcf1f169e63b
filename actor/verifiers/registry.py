"""Verifiers by the name that a `Task` gives; a module is imported when its name is first asked for."""

import importlib
from collections.abc import Callable

from bridge.types import Task

Verifier = Callable[[str, Task], float]

MODULES = {
    "exact": "actor.verifiers.exact",
    "math": "actor.verifiers.math",
    "reasoning_gym": "actor.verifiers.reasoning_gym",
}


def load(name: str) -> Verifier:
    """The `score` function of a verifier.

    Raises:
      ValueError: no such verifier.
    """
    if name not in MODULES:
        raise ValueError(f"no verifier {name!r}; there are {', '.join(sorted(MODULES))}")
    return importlib.import_module(MODULES[name]).score
