"""The shipped environments that make their own rows, by name."""

import random
from collections.abc import Callable

from configs.environments import calculator, guess, textarena
from configs.environments.row import Args, Row, Said

ROWS: dict[str, Callable[[int, Args], Callable[[int], Row]]] = {
    guess.NAME: guess.rows,
    calculator.NAME: calculator.rows,
    textarena.NAME: textarena.rows,
}
"""Called with a seed and arguments they give a function from an index to its row."""

EXAMPLES: dict[str, Callable[[Row, random.Random], list[Said]]] = {
    guess.NAME: guess.example,
    calculator.NAME: calculator.example,
}
"""How an episode of a row may go, for warming up a small model."""


def rows(name: str, *, seed: int, args: Args) -> Callable[[int], Row]:
    """The rows of an environment, each a function of (seed, index).

    Raises:
      ValueError: it makes none, or refuses the arguments.
    """
    if name not in ROWS:
        raise ValueError(
            f"environment {name!r} makes no rows of its own, want one of {', '.join(ROWS)}, or a file's rows"
        )
    return ROWS[name](seed, args)
