"""Arithmetic expressions: rows of the environment `calculator`."""

import ast
import dataclasses
import json
import operator
import random
from collections.abc import Callable
from fractions import Fraction

from configs.tasks.rows import Args, EpisodeRow, Turn, draw, read_args

MAX_CHARS = 200
MAX_BITS = 512
"""Largest bit length of a numerator or denominator."""


_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
}


def evaluate(text: str) -> Fraction:
    """Returns the value of an expression of numbers, + - * / // % ** and parentheses.

    Raises ValueError, with a short reason, if the expression is invalid.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError as e:
        raise ValueError("division by zero") from e
    except (SyntaxError, RecursionError, MemoryError) as e:  # the last two for deep nesting
        raise ValueError("not an expression") from e


def show(value: Fraction) -> str:
    """Returns a value as a calculator shows it: whole, or with up to ten digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))  # 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(op)](_value(left), _value(right))))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * size > MAX_BITS:
        raise ValueError("exponent too large, or not whole")
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("number too large")
    return value


NAME = "calculator"
PARSERS = ("hermes", "llama3", "tag")
"""Tool call formats, parsed by `actor/environments/tool_parsers.py`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalculatorArgs:
    """Arguments of the calculator rows."""

    num_terms: int = 3
    min_value: int = 10
    max_value: int = 99
    operators: str = "+-*"
    """Operators, drawn uniformly."""
    parser: str = "tag"
    """Tool call format, one of `PARSERS`."""
    tool: str = "calculator"
    """Tool name in calls."""
    call_reward: float = 0.0
    """Reward of the first call with a numeric result. The right answer receives 1."""
    style: str = "words"

    def __post_init__(self) -> None:
        if self.num_terms < 1 or not 0 <= self.min_value <= self.max_value:
            raise ValueError(
                f"environment calculator: expected num_terms >= 1 and 0 <= min_value <= max_value, got {self}"
            )
        if not self.operators or set(self.operators) - set("+-*"):
            raise ValueError(f"environment calculator: expected operators from + - *, got {self.operators!r}")
        if self.parser not in PARSERS or self.style not in ("words", "short") or not self.tool.isidentifier():
            raise ValueError(
                f"environment calculator: expected parser {', '.join(PARSERS)}, style words or short, and an "
                f"identifier as tool, got {self.parser!r}, {self.style!r} and {self.tool!r}"
            )


def rows(seed: int, args: Args) -> Callable[[int], EpisodeRow]:
    """Returns row i as a function of (seed, i). Raises ValueError for an invalid argument."""
    wanted = read_args(CalculatorArgs, NAME, args)

    def row(index: int) -> EpisodeRow:
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
        return EpisodeRow(question=question, answer=show(evaluate(expression)), metadata=metadata)

    return row


def call(parser: str, tool: str, expression: str) -> str:
    """Returns a tool call in the format of the parser."""
    if parser == "tag":
        return f"<{tool}>{expression}</{tool}>"
    arguments = {"expression": expression}
    if parser == "hermes":
        return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    return "<|python_tag|>" + json.dumps({"name": tool, "parameters": arguments})


def example(row: EpisodeRow, random_: random.Random) -> list[Turn]:
    """Returns an example episode for warming up a small model: a tool call, its result, and the answer."""
    del random_
    data = row.metadata
    return [
        Turn(call(data["parser"], data["tool"], data["expression"]), by_policy=True),
        Turn(result(row.answer, data["style"]), by_policy=False),
        Turn(row.answer, by_policy=True),
    ]


def result(value: str, style: str) -> str:
    """Returns the tool result as shown to the policy."""
    return f"{value}:" if style == "short" else value


def _words(expression: str, wanted: CalculatorArgs) -> str:
    return (
        f"What is {expression}? You can call a calculator by writing\n{call(wanted.parser, wanted.tool, '1+2*3')}\n"
        "and nothing else; its result is told to you. When you know the answer, reply with the number and nothing else."
    )
