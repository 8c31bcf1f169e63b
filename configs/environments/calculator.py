"""Arithmetic with a calculator at hand: what the model can't work out itself, it asks a tool for."""

import dataclasses
import json
import random
from collections.abc import Callable

from configs.environments.arithmetic import evaluate, show
from configs.environments.row import Args, Row, Said, draw, read_args

NAME = "calculator"
PARSERS = ("hermes", "llama3", "tag")
"""How a call is written; `actor/environments/tools.py` reads them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalculatorArgs:
    """What problems are drawn, and how the tool is called."""

    num_terms: int = 3
    min_value: int = 10
    max_value: int = 99
    operators: str = "+-*"
    """Of which each is drawn with the same chance."""
    parser: str = "tag"
    """One of `PARSERS`."""
    tool: str = "calculator"
    """Its name in calls."""
    call_reward: float = 0.0
    """What the first call earns that gives a number; the right answer earns 1."""
    style: str = "words"

    def __post_init__(self) -> None:
        if self.num_terms < 1 or not 0 <= self.min_value <= self.max_value:
            raise ValueError(f"environment calculator wants num_terms >= 1 and 0 <= min_value <= max_value, got {self}")
        if not self.operators or set(self.operators) - set("+-*"):
            raise ValueError(f"environment calculator wants operators out of + - *, got {self.operators!r}")
        if self.parser not in PARSERS or self.style not in ("words", "short") or not self.tool.isidentifier():
            raise ValueError(
                f"environment calculator wants parser {', '.join(PARSERS)}, style words or short and a tool that is a "
                f"name, got {self.parser!r}, {self.style!r} and {self.tool!r}"
            )


def rows(seed: int, args: Args) -> Callable[[int], Row]:
    """Row i as a function of (seed, i).

    Raises:
      ValueError: an argument is none.
    """
    wanted = read_args(CalculatorArgs, NAME, args)

    def row(index: int) -> Row:
        random_ = draw(seed, index)
        terms = [str(random_.randint(wanted.min_value, wanted.max_value)) for _ in range(wanted.num_terms)]
        signs = [random_.choice(wanted.operators) for _ in terms[1:]]
        expression = terms[0] + "".join(s + t for s, t in zip(signs, terms[1:], strict=True))
        metadata = {
            "expression": expression,
            "parser": wanted.parser,
            "tool": wanted.tool,
            "call_reward": wanted.call_reward,
            "style": wanted.style,
            "seed": index,
        }
        question = f"{expression}=" if wanted.style == "short" else _words(expression, wanted)
        return Row(question=question, answer=show(evaluate(expression)), metadata=metadata)

    return row


def call(parser: str, tool: str, expression: str) -> str:
    """A call as the parser reads it."""
    if parser == "tag":
        return f"<{tool}>{expression}</{tool}>"
    arguments = {"expression": expression}
    if parser == "hermes":
        return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    return "<|python_tag|>" + json.dumps({"name": tool, "parameters": arguments})


def example(row: Row, random_: random.Random) -> list[Said]:
    """An episode as it may go: the tool is asked, its result repeated; for warming up a small model."""
    del random_
    data = row.metadata
    return [
        Said(call(data["parser"], data["tool"], data["expression"]), by_policy=True),
        Said(result(row.answer, data["style"]), by_policy=False),
        Said(row.answer, by_policy=True),
    ]


def result(value: str, style: str) -> str:
    """A tool's answer as it is shown."""
    return f"{value}:" if style == "short" else value


def _words(expression: str, wanted: CalculatorArgs) -> str:
    return (
        f"What is {expression}? You can call a calculator by writing\n{call(wanted.parser, wanted.tool, '1+2*3')}\n"
        "and nothing else; its result is told to you. When you know the answer, reply with the number and nothing else."
    )
