"""Built-in environments `guess` and `calculator`."""

import re
from collections.abc import Mapping
from typing import Any

from actor.environments.protocol import Step
from actor.environments.tool_parsers import ToolCall, parse
from bridge.text.chat_template import Message
from configs.tasks.calculator import evaluate, result, show
from configs.tasks.guess import hint

_ANSWER = re.compile(r"(?:answer[ \t]*(?:is|:|=)?[ \t]*)?(-?\d+)\.?", re.IGNORECASE)


class Calculator:
    """Expression to evaluate; a turn without a tool call is the answer."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Stores the row; its question is the whole prompt."""
        self._row = row
        self._has_called = False
        return []

    def step(self, action: str) -> Step:
        """Returns results or errors of the calls; without calls the episode ends, with reward 1 if right."""
        row = self._row
        parsed = parse(row["parser"], action, (row["tool"],), thinking=None)
        if parsed.error:
            return self._tell(f"Error: {parsed.error}")
        if not parsed.calls:
            stated = _ANSWER.fullmatch(action.strip())
            is_right = stated is not None and stated.group(1) == row["answer"]
            return Step(reward=float(is_right), done=True, info={"right": is_right, "called": self._has_called})
        results = [_work_out(call) for call in parsed.calls]
        reward = 0.0
        if not self._has_called and not any(r.startswith("Error") for r in results):
            self._has_called, reward = True, float(row["call_reward"])
        return self._tell("\n".join(results), reward)

    def close(self) -> None:
        """Does nothing."""

    def _tell(self, text: str, reward: float = 0.0) -> Step:
        return Step(messages=[{"role": "user", "content": result(text, self._row["style"])}], reward=reward)


def _work_out(call: ToolCall) -> str:
    expression = call.arguments.get("expression", call.arguments.get("input"))
    if not isinstance(expression, str):
        return "Error: the call has no text as its expression"
    try:
        return show(evaluate(expression))
    except ValueError as e:
        return f"Error: {e}"


class Guess:
    """Search for one number."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Stores the row; its question is the whole prompt."""
        self._row = row
        self._secret = int(row["answer"])
        self._low, self._high = int(row["low"]), int(row["high"])
        self._num_guesses = 0
        return []

    def step(self, action: str) -> Step:
        """Plays one guess: the right one ends with reward 1, others get a hint (higher or lower)."""
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
        """Does nothing."""


def _number(text: str) -> int | None:
    text = text.strip().removesuffix(".")
    return int(text) if len(text) <= 9 and text.isascii() and text.removeprefix("-").isdigit() else None
