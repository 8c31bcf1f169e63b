"""Guessing a number: each wrong guess is answered with higher or lower."""

import dataclasses
import random
from collections.abc import Callable

from configs.tasks.rows import Args, EpisodeRow, Style, Turn, draw, read_args

NAME = "guess"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuessArgs:
    """What games are drawn."""

    max_value: int = 99
    """Numbers are from 0 to this one."""
    min_size: int = 6
    max_size: int = 31
    """Numbers to choose from, at least and at most."""
    max_guesses: int = 0
    """0: as many as halving needs at the worst."""
    possible_reward: float = 0.0
    """What a wrong guess earns that no answer before had ruled out; the right one earns 1."""
    style: str = "words"

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.max_size <= self.max_value + 1:
            raise ValueError(
                "environment guess wants 1 <= min_size <= max_size <= max_value + 1, got "
                f"{self.min_size}, {self.max_size}, {self.max_value + 1}"
            )
        if self.max_guesses < 0 or self.style not in ("words", "short"):
            raise ValueError(f"environment guess wants max_guesses >= 0 and style words or short, got {self}")


def rows(seed: int, args: Args) -> Callable[[int], EpisodeRow]:
    """Row i as a function of (seed, i).

    Raises:
      ValueError: an argument is none.
    """
    wanted = read_args(GuessArgs, NAME, args)

    def row(index: int) -> EpisodeRow:
        random_ = draw(seed, index)
        size = random_.randint(wanted.min_size, wanted.max_size)
        low = random_.randint(0, wanted.max_value + 1 - size)
        high = low + size - 1
        secret = random_.randint(low, high)
        guesses = wanted.max_guesses or size.bit_length()
        if wanted.style == "short":
            question = f"{low}-{high}:"
        else:
            question = (
                f"I am thinking of a whole number from {low} to {high}. You have {guesses} guesses; after each I say "
                "whether it is higher or lower. Reply with your guess, a number and nothing else."
            )
        metadata = {
            "low": low,
            "high": high,
            "max_guesses": guesses,
            "possible_reward": wanted.possible_reward,
            "style": wanted.style,
            "seed": index,
        }
        return EpisodeRow(question=question, answer=str(secret), metadata=metadata)

    return row


def hint(secret: int, guess: int | None, style: Style) -> str:
    """What is said to a wrong guess; None is no number."""
    if guess is None:
        return "?:" if style == "short" else "That is not a number. Guess again."
    word = "higher" if secret > guess else "lower"
    return {"higher": ">:", "lower": "<:"}[word] if style == "short" else f"It is {word}. Guess again."


def example(row: EpisodeRow, random_: random.Random) -> list[Turn]:
    """A game as it may go: guesses at random among those that are possible still, for warming up a small model."""
    secret, low, high = int(row.answer), row.metadata["low"], row.metadata["high"]
    said: list[Turn] = []
    for left in reversed(range(row.metadata["max_guesses"])):
        guess = random_.randint(low, high)
        said.append(Turn(str(guess), by_policy=True))
        if guess == secret or not left:
            break
        said.append(Turn(hint(secret, guess, row.metadata["style"]), by_policy=False))
        low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
    return said
