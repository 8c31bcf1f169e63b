"""What a calculator can work out: an expression of numbers, read as Python's grammar and bounded. Nothing is run."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
MAX_BITS = 512
"""Of a numerator or denominator."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
}


def evaluate(text: str) -> Fraction:
    """The value of an expression of numbers, + - * / // % ** and parentheses.

    Raises:
      ValueError: says in a few words what is wrong with it.
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
    """A value as a calculator shows it: whole, or with up to ten digits."""
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
