"""TextArena games against random legal opponents.

Other seats play random legal moves (`_Opponent`), so that the reward is the policy's alone. Over both seats of a game
with a winner, rewards would sum to a constant for any policy.
"""

import copy
import itertools
import random
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY
from textarena.wrappers import ActionFormattingWrapper

from actor.environments.protocol import Step
from bridge.text.chat_template import Message

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
    """Candidate moves of one player."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def see(self, messages: Iterable[str]) -> None:
        """Remembers the bracketed words of messages."""
        for message in messages:
            moves = [m for m in _BRACKETS.findall(message) if not _SPEAKER.fullmatch(m)]
            if moves:
                self._shown = list(dict.fromkeys([*moves, *self._shown]))[:MAX_REMEMBERED]

    @property
    def moves(self) -> list[str]:
        """Bracketed moves, latest shown first, generic ones (numbers, pairs) last."""
        return [f"[{move}]" for move in dict.fromkeys([*self._shown, *_PLAIN])]


MAX_MOVES_OF_OTHERS = 200
"""Maximum opponent moves between two policy moves."""
INVALID_REWARD = -1.0
"""Reward of TextArena for an invalid move that ends the game."""


class TextArena:
    """TextArena game, played from the policy's seat."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Returns the rules and the start, as the policy's seat sees them."""
        game, seed = str(row["game"]), int(row["seed"])
        if game not in ENV_REGISTRY:
            raise ValueError(f"TextArena {textarena.__version__} has no game {game!r}")
        random.seed(seed)  # some games draw before they use their own seed
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        self._seat = int(row["seat"])
        self._seen: list[str] = []
        self._others = {i: _Opponent(seed + i) for i in range(int(row["num_players"])) if i != self._seat}
        self._game: Any = textarena.make(game)
        while isinstance(self._game, textarena.Wrapper):  # these wrappers would show the whole history each time
            self._game = self._game.env
        if ActionFormattingWrapper in (ENV_REGISTRY[game].default_wrappers or ()):
            self._game = ActionFormattingWrapper(self._game)
        num_players = int(row["num_players"])
        self._game.reset(num_players=num_players, seed=seed)
        _check_players(game, self._game.state, num_players)
        if self._let_others_move():
            raise ValueError(f"{game} was over before the policy's first move")
        return self._look()

    def step(self, action: str) -> Step:
        """Plays one move of the policy, which is invalid if the game raises, and those of the others."""
        try:
            done, _ = self._game.step(action=action)
        except (MemoryError, OSError):
            raise
        except Exception as e:  # games may raise anything at an invalid move
            return Step(reward=INVALID_REWARD, done=True, info={"raised": f"{type(e).__name__}: {e}"})
        if not done and not self._let_others_move():
            return Step(messages=self._look())
        rewards, info = self._game.close()
        earned = (rewards or {}).get(self._seat, 0.0)
        if isinstance(earned, str):  # some games put the reason of an invalid move in place of the reward
            earned = INVALID_REWARD
        return Step(reward=float(earned), done=True, info={"game": info})

    def close(self) -> None:
        """Does nothing."""

    def _let_others_move(self) -> bool:
        """Plays opponents until the policy's turn; returns True if the game ended before."""
        for _ in range(MAX_MOVES_OF_OTHERS):
            player, new = self._game.get_observation()
            if player == self._seat:
                self._seen += self._read(new)
                return False
            other = self._others[player]
            other.see(self._read(new))
            done, _ = self._game.step(action=other.move(self._game))
            if done:
                return True
        raise ValueError(f"the other players moved {MAX_MOVES_OF_OTHERS} times without the policy")

    def _read(self, new: Any) -> list[str]:
        """Returns a seat's new messages from the game and other players, without its own moves."""
        own = self._game.state.current_player_id
        names = self._game.state.role_mapping
        return [
            f"[{'GAME' if sender == textarena.GAME_ID else names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in new
            if not (kind is textarena.ObservationType.PLAYER_ACTION and sender == own)
        ]

    def _look(self) -> list[Message]:
        seen, self._seen = "\n".join(self._seen), []
        return [{"role": "user", "content": seen or "[GAME] It is your turn."}]


class _Opponent(Bracketed):
    """Random legal player: tries shown and generic moves on a copy of the game."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def move(self, game: Any) -> str:
        """Returns a move that the game accepts; any move if none was found."""
        moves = self.moves
        self._random.shuffle(moves)
        return next((m for m in moves if takes(game, m)), moves[0])


def _check_players(game: str, state: Any, num_players: int) -> None:
    """Raises ValueError for a player count that the game accepts but with which it breaks later."""
    wanted = 1 if isinstance(state, textarena.SinglePlayerState) else max(2, state.num_players)
    if num_players != wanted:
        raise ValueError(f"{game} is played by {wanted} players, not by {num_players}")


def takes(game: Any, move: str) -> bool:
    """Returns True if a game accepts a move; leaves the game and the random state unchanged."""
    chance = random.getstate()
    refused: list[bool] = []
    try:
        trial = copy.deepcopy(game)
        trial.state.set_invalid_move = lambda *_, **__: refused.append(True)
        trial.step(action=move)
    except Exception:  # games may raise anything at an invalid move
        return False
    finally:
        random.setstate(chance)
    return not refused
