"""Guessing a number (`configs.environments.guess`)."""

from collections.abc import Mapping
from typing import Any

from actor.environments.protocol import Step
from bridge.chat_template import Message
from configs.environments.guess import hint


class Guess:
    """One number to find."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's question says all."""
        self._row = row
        self._secret = int(row["answer"])
        self._low, self._high = int(row["low"]), int(row["high"])
        """What the answers so far leave."""
        self._num_guesses = 0
        return []

    def step(self, action: str) -> Step:
        """One guess: 1 and the end for the right one, else whether the number is higher or lower."""
        self._num_guesses += 1
        guess = _number(action)
        info = {"guess": guess, "secret": self._secret}
        if guess == self._secret:
            return Step(reward=1.0, done=True, info=info)
        reward = 0.0
        if guess is not None and self._low <= guess <= self._high:
            reward = float(self._row["possible_reward"])
            self._low, self._high = (guess + 1, self._high) if self._secret > guess else (self._low, guess - 1)
        done = self._num_guesses >= self._row["max_guesses"]
        said = hint(self._secret, guess, self._row["style"])
        return Step(messages=[{"role": "user", "content": said}], reward=reward, done=done, info=info)

    def close(self) -> None:
        """Nothing is held."""


def _number(text: str) -> int | None:
    text = text.strip().removesuffix(".")
    return int(text) if len(text) <= 9 and text.isascii() and text.removeprefix("-").isdigit() else None
