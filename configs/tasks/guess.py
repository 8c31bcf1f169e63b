"""Number guessing, where each wrong guess is answered with higher or lower."""

import dataclasses
import random
from collections.abc import Callable

from configs.tasks.rows import Args, EpisodeRow, Style, Turn, draw, read_args

NAME = "guess"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuessArgs:
    """Arguments of the guessing rows."""

    max_value: int = 99
    """Largest number; the smallest is 0."""
    min_size: int = 6
    max_size: int = 31
    """Largest range of numbers to choose from; min_size is the smallest."""
    max_guesses: int = 0
    """Guesses per game. 0: as many as bisection needs in the worst case."""
    possible_reward: float = 0.0
    """Reward of a wrong guess that earlier hints did not rule out. The right guess receives 1."""
    style: str = "words"

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.max_size <= self.max_value + 1:
            raise ValueError(
                "environment guess: expected 1 <= min_size <= max_size <= max_value + 1, got "
                f"{self.min_size}, {self.max_size}, {self.max_value + 1}"
            )
        if self.max_guesses < 0 or self.style not in ("words", "short"):
            raise ValueError(f"environment guess: expected max_guesses >= 0 and style words or short, got {self}")


def rows(seed: int, args: Args) -> Callable[[int], EpisodeRow]:
    """Returns row i as a function of (seed, i). Raises ValueError for an invalid argument."""
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
    """Returns the reply to a wrong guess. A guess of None is not a number."""
    if guess is None:
        return "?:" if style == "short" else "That is not a number. Guess again."
    word = "higher" if secret > guess else "lower"
    return {"higher": ">:", "lower": "<:"}[word] if style == "short" else f"It is {word}. Guess again."


def example(row: EpisodeRow, random_: random.Random) -> list[Turn]:
    """Returns an example game for warming up a small model: random guesses among the possible numbers."""
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
