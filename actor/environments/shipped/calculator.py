"""Arithmetic with a calculator at hand (`configs.environments.calculator`)."""

import re
from collections.abc import Mapping
from typing import Any

from actor.environments.protocol import Step
from actor.environments.tools import ToolCall, parse
from bridge.chat_template import Message
from configs.environments.arithmetic import evaluate, show
from configs.environments.calculator import result

_ANSWER = re.compile(r"(?:answer[ \t]*(?:is|:|=)?[ \t]*)?(-?\d+)\.?", re.IGNORECASE)


class Calculator:
    """One expression to work out; a turn without a call is the answer."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's question says all."""
        self._row = row
        self._has_called = False
        return []

    def step(self, action: str) -> Step:
        """Results of the calls in it, or what is wrong with them; without any: 1 for the right answer, and the end."""
        row = self._row
        parsed = parse(row["parser"], action, (row["tool"],))
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
        """Nothing is held."""

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
