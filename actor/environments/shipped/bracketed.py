"""Moves of any game that stand in square brackets: those that a player was shown, and the plainest there can be."""

import itertools
import re
from collections.abc import Iterable

_BRACKETS = re.compile(r"\[([^\[\]\n]{1,40})\]")
_SPEAKER = re.compile(r"GAME|Player( \d+)?")
_PLAIN = (
    *(str(i) for i in range(10)),
    *(f"{i} {j}" for i, j in itertools.product(range(4), repeat=2)),
    *(f"{i}, {j}" for i, j in itertools.product(range(3), repeat=2)),
    "pass",
    "skip",
    "accept",
)
MAX_REMEMBERED = 64


class Bracketed:
    """What one player may try."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def see(self, messages: Iterable[str]) -> None:
        """Remembers the bracketed words in what it is shown."""
        for message in messages:
            moves = [m for m in _BRACKETS.findall(message) if not _SPEAKER.fullmatch(m)]
            if moves:
                self._shown = list(dict.fromkeys([*moves, *self._shown]))[:MAX_REMEMBERED]

    @property
    def moves(self) -> list[str]:
        """In brackets, the latest shown first, plain ones (numbers, pairs of them) last."""
        return [f"[{move}]" for move in dict.fromkeys([*self._shown, *_PLAIN])]
