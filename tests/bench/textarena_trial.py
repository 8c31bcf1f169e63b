"""The adapter of TextArena with the policy's seat played as the other seats are; for `textarena_games`."""

from collections.abc import Mapping
from typing import Any

from actor.environments.builtin.textarena import Bracketed, TextArena, takes
from actor.environments.protocol import Step
from bridge.text.chat_template import Message

NAME = f"{__name__}:Trial"


class Trial(TextArena):
    """One game; what it raises at a move is an error here."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """As the adapter does."""
        said = super().reset(row)
        self._own = Bracketed()
        self._own.see(m["content"] for m in said)
        self._is_first, self._is_alone = True, row["num_players"] == 1
        return said

    def step(self, action: str) -> Step:
        """A legal move, or where none is found that of the number `action` among what was tried.

        Raises:
          ValueError: whoever plays this seat besides the policy would lose by its first move, as it finds no legal one.
          RuntimeError: what the game raised.
        """
        moves = self._own.moves
        legal = next((m for m in moves if takes(self._game, m)), "")
        if self._is_first and not legal and not self._is_alone:
            raise ValueError("no legal move was found for the last seat")
        self._is_first = False
        seen = super().step(legal or moves[int(action)])
        if "raised" in seen.info:
            raise RuntimeError(seen.info["raised"])
        self._own.see(m["content"] for m in seen.messages)
        return seen
