"""Environments by name; a module is imported when its name is first asked for, in the processes that play it."""

import importlib
from collections.abc import Callable

from actor.environments.protocol import Environment
from configs import extension

CLASSES = {
    "guess": "actor.environments.shipped.guess:Guess",
    "calculator": "actor.environments.shipped.calculator:Calculator",
    "textarena": "actor.environments.shipped.textarena:TextArena",
    "verifiers": "actor.environments.shipped.verifiers:Verifiers",
}

OWN_ENVIRONMENT = extension.Signature(takes=(), returns="an environment with reset, step and close", may_be_class=True)


def may_be_apart(name: str) -> bool:
    """Whether an environment may need libraries that don't go together with the engine's (`environments.python`)."""
    return extension.is_own(name) or name == "verifiers"


def load(name: str) -> Callable[[], Environment]:
    """The class of an environment, or the user's own, named `module:Class`.

    Raises:
      ValueError: no such environment; or (in one line) why it can't be used.
    """
    if extension.is_own(name):
        made = extension.load("environment", name, OWN_ENVIRONMENT)
        missing = [m for m in ("reset", "step", "close") if isinstance(made, type) and not hasattr(made, m)]
        if missing:
            raise ValueError(f"environment={name} has no {' and no '.join(missing)} (actor/environments/protocol.py)")
        return made
    if name not in CLASSES:
        raise ValueError(f"no environment {name!r}; there are {', '.join(sorted(CLASSES))}")
    module, _, attribute = CLASSES[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as e:
        raise ValueError(f"environment={name} does not import: {extension.one_line(e)}") from e
