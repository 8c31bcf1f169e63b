r"""Makes `math_pairs.jsonl`: `python -m tests.actor.rewards.verifiers.make_math_pairs`.

A line is a gold answer, a response, how that ended, and whether it is right. No verifier and no computer algebra is
asked: of a pair from a template it follows from how the pair was made (exact arithmetic of Python's `fractions`), the
others are judged by hand, with the reason where it isn't plain.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from tests.actor.rewards.verifiers import math_pairs_by_hand

FILE = Path(__file__).with_name("math_pairs.jsonl")


def pair(kind: str, gold: str, response: str, is_right: bool, **more: str) -> dict[str, Any]:
    """One line; `more` is `why`, `finish`, or `limitation`: why our verifier says the other thing."""
    finish = more.pop("finish", "length" if kind == "truncated" else "stop")
    return {"kind": kind, "gold": gold, "response": response, "finish": finish, "is_right": is_right, **more}


def boxed(expression: str) -> str:
    return rf"So we get $\boxed{{{expression}}}$."


def pairs() -> list[dict[str, Any]]:
    """All of them, each with a name of its own."""
    made = [
        *fractions(),
        *decimals(),
        *percents(),
        *thousands(),
        *mixed_numbers(),
        *scientific(),
        *radicals(),
        *sets(),
        *tuples(),
        *intervals(),
        *polynomials(),
        *matrices(),
        *units(),
        *truncated(),
        *by_hand(),
    ]
    counts: dict[str, int] = {}
    for one in made:
        counts[one["kind"]] = counts.get(one["kind"], 0) + 1
        one["id"] = f"{one['kind']}-{counts[one['kind']]}"
    if len({(one["gold"], one["response"]) for one in made}) != len(made):
        raise ValueError("a pair is there twice")
    return [{"id": one.pop("id"), **one} for one in made]


def fractions() -> Iterator[dict[str, Any]]:
    """Written otherwise they are right; upside down, with another sign, or a bit beside they are not."""
    for a, b in ((1, 2), (3, 4), (-7, 8), (22, 7)):
        gold, sign, n = rf"\frac{{{a}}}{{{b}}}", "-" if a < 0 else "", abs(a)
        same = [f"{a}/{b}", rf"{sign}\dfrac{{{n}}}{{{b}}}", rf"\tfrac{{{3 * a}}}{{{3 * b}}}", rf"\frac{{{-a}}}{{{-b}}}"]
        if n < 10 and b < 10:
            same.append(rf"{sign}\frac{n}{b}")
        if (decimal := terminating(Fraction(a, b))) is not None:
            same.append(decimal)
        for text in same:
            yield pair("fraction", gold, boxed(text), True)
        for other in (Fraction(b, a), Fraction(-a, b), Fraction(a, b + 1)):
            yield pair("fraction", gold, boxed(f"{other.numerator}/{other.denominator}"), False)


def decimals() -> Iterator[dict[str, Any]]:
    for text, number in (("0.5", "1/2"), ("-2.25", "-9/4"), ("0.001", "1/1000")):
        value = Fraction(number)
        for same in (
            f"{text}0",
            f"{text}000",
            number,
            text.replace("0.", ".", 1) if "0." in text[:3] else f"{text}0000",
        ):
            yield pair("decimal", text, boxed(same), True)
        for other in (value + Fraction(1, 100), value / 10, value * 10, -value):
            yield pair("decimal", text, boxed(terminating(other) or ""), False)


def percents() -> Iterator[dict[str, Any]]:
    for number in (50, 12.5, 150):
        share = terminating(Fraction(str(number)) / 100)
        for gold, text in ((rf"{number}\%", rf"{number}\%"), (rf"{number}\%", share), (share, rf"{number}\%")):
            yield pair("percent", str(gold), boxed(str(text)), True)
        yield pair("percent", rf"{number}\%", boxed(str(number)), True, why="what is asked for is a percentage")
        yield pair("percent", str(number), boxed(rf"{number}\%"), True, why="what is asked for is a percentage")
        yield pair("percent", rf"{number}\%", boxed(rf"{number / 10}\%"), False)
        yield pair("percent", str(share), boxed(str(number)), False, why="a hundred times too much")


def thousands() -> Iterator[dict[str, Any]]:
    for number in (1000, 12345, 9876543):
        for text in (
            f"{number:,}",
            f"{number:,}".replace(",", "{,}"),
            f"{number:,}".replace(",", r"\,"),
            f"{number}.0",
        ):
            yield pair("thousands", str(number), boxed(text), True)
        yield pair("thousands", str(number), f"#### {number:,}", True)
        yield pair("thousands", str(number), boxed(f"{number + 1:,}"), False)
        yield pair("thousands", str(number), boxed(f"{number:,}".replace(",", ".")), False, why="a decimal point")


def mixed_numbers() -> Iterator[dict[str, Any]]:
    for whole, a, b in ((1, 1, 2), (3, 2, 5)):
        value = whole + Fraction(a, b)
        gold = f"{value.numerator}/{value.denominator}"
        yield pair("mixed", gold, boxed(rf"{whole}\frac{{{a}}}{{{b}}}"), True)
        yield pair("mixed", rf"{whole}\frac{{{a}}}{{{b}}}", boxed(gold), True)
        yield pair("mixed", gold, boxed(f"{whole} {a}/{b}"), True)
        yield pair("mixed", gold, boxed(rf"{whole}+\frac{{{a}}}{{{b}}}"), True)
        yield pair("mixed", gold, boxed(rf"{whole} \cdot \frac{{{a}}}{{{b}}}"), False)
        yield pair("mixed", gold, boxed(rf"\frac{{{whole}{a}}}{{{b}}}"), False)


def scientific() -> Iterator[dict[str, Any]]:
    for mantissa, exponent in (("1.2", 5), ("3", -4), ("-6.02", 3)):
        plain = f"{Decimal(mantissa).scaleb(exponent):f}"
        notation = rf"{mantissa} \times 10^{{{exponent}}}"
        yield pair("scientific", plain, boxed(notation), True)
        yield pair("scientific", notation, boxed(plain), True)
        yield pair("scientific", plain, boxed(rf"{mantissa} \cdot 10^{{{exponent}}}"), True)
        yield pair("scientific", plain, boxed(f"{mantissa}e{exponent}"), True)
        yield pair("scientific", plain, boxed(rf"{mantissa} \times 10^{{{-exponent}}}"), False)
        yield pair("scientific", plain, boxed(rf"{mantissa} \times 10^{{{exponent + 1}}}"), False)


def radicals() -> Iterator[dict[str, Any]]:
    for outer, inner in ((2, 2), (3, 5), (5, 3)):
        square = outer * outer * inner
        gold = rf"{outer}\sqrt{{{inner}}}"
        for text in (rf"\sqrt{{{square}}}", rf"{outer} \cdot \sqrt{{{inner}}}", rf"\sqrt{{{inner}}} \cdot {outer}"):
            yield pair("radical", gold, boxed(text), True)
        yield pair("radical", rf"\frac{{1}}{{\sqrt{{{inner}}}}}", boxed(rf"\frac{{\sqrt{{{inner}}}}}{{{inner}}}"), True)
        yield pair("radical", gold, boxed(rf"{outer}\sqrt{{{inner + 1}}}"), False)
        yield pair("radical", gold, boxed(rf"-{outer}\sqrt{{{inner}}}"), False)
        yield pair("radical", gold, boxed(rf"\sqrt{{{outer * inner}}}"), False)


def sets() -> Iterator[dict[str, Any]]:
    for numbers in ((1, 2), (-3, 0, 5)):
        gold = rf"\{{{', '.join(map(str, numbers))}\}}"
        back = ", ".join(map(str, reversed(numbers)))
        yield pair("set", gold, boxed(rf"\{{{back}\}}"), True)
        yield pair("set", gold, boxed(rf"\left\{{ {back} \right\}}"), True)
        yield pair("set", gold, boxed(back), True, why="a list of the solutions")
        yield pair("set", gold, boxed(rf"\{{{back}, 9\}}"), False)
        yield pair("set", gold, boxed(rf"\{{{numbers[0]}\}}"), False)
        yield pair("set", gold, boxed(str(numbers[-1])), False)


def tuples() -> Iterator[dict[str, Any]]:
    for numbers in ((1, 2), (3, -1, 4), (0, 7)):
        gold = f"({', '.join(map(str, numbers))})"
        yield pair("tuple", gold, boxed(rf"\left({','.join(map(str, numbers))}\right)"), True)
        yield pair("tuple", gold, boxed(f"({', '.join(f'{n}.0' for n in numbers)})"), True)
        yield pair("tuple", gold, boxed(f"({', '.join(map(str, reversed(numbers)))})"), False)
        yield pair("tuple", gold, boxed(f"({', '.join(map(str, (*numbers, 1)))})"), False)
        yield pair("tuple", gold, boxed(f"({', '.join(map(str, (*numbers[:-1], numbers[-1] + 1)))})"), False)


def intervals() -> Iterator[dict[str, Any]]:
    for low, high in (("0", "1"), ("-2", "5"), ("-3", r"\infty")):
        opening, closing = "[", ")" if high == r"\infty" else "]"
        gold = f"{opening}{low}, {high}{closing}"
        yield pair("interval", gold, boxed(rf"\left{opening}{low},{high}\right{closing}"), True)
        yield pair("interval", gold, boxed(rf"x \in {gold}"), True)
        yield pair("interval", gold, boxed(f"({low}, {high}{closing}"), False)
        if high == r"\infty":
            yield pair("interval", gold, boxed(rf"x \ge {low}"), True)
            yield pair("interval", gold, boxed(f"x > {low}"), False)
        else:
            yield pair("interval", gold, boxed(rf"{low} \le x \le {high}"), True)
            yield pair("interval", gold, boxed(rf"{low} \le x < {high}"), False)
            yield pair("interval", gold, boxed(f"[{high}, {low}]"), False)


def polynomials() -> Iterator[dict[str, Any]]:
    """(x + a)(x + b), multiplied out and not."""
    for a, b in ((1, 1), (2, -3), (-4, 5)):
        s, p = a + b, a * b
        gold = f"x^2{s:+}x{p:+}"
        yield pair("polynomial", gold, boxed(f"(x{a:+})(x{b:+})"), True)
        yield pair("polynomial", gold, boxed(f"{p}{s:+}x+x^{{2}}"), True)
        yield pair("polynomial", f"(x{a:+})(x{b:+})", boxed(gold), True)
        yield pair("polynomial", gold, boxed(f"x^2{-s:+}x{p:+}"), False)
        yield pair("polynomial", gold, boxed(f"(x{a:+})(x{b + 1:+})"), False)
        yield pair("polynomial", gold, boxed(f"y^2{s:+}y{p:+}"), False, why="another variable")


def matrices() -> Iterator[dict[str, Any]]:
    def matrix(rows: list[list[str]], brackets: str = "pmatrix") -> str:
        body = r" \\ ".join(" & ".join(row) for row in rows)
        return rf"\begin{{{brackets}}} {body} \end{{{brackets}}}"

    for rows in ([["1", "2"], ["3", "4"]], [["5"], ["-6"]]):
        yield pair("matrix", matrix(rows), boxed(matrix(rows, "bmatrix")), True)
        yield pair("matrix", matrix(rows), boxed(matrix([[f"{n}.0" for n in row] for row in rows])), True)
        yield pair("matrix", matrix(rows), boxed(matrix(rows[::-1])), False)
        yield pair("matrix", matrix(rows), boxed(matrix([list(column) for column in zip(*rows, strict=True)])), False)


def units() -> Iterator[dict[str, Any]]:
    for unit in (r"\text{ cm}", r"\,\mathrm{kg}", r"\text{ apples}", r"^\circ"):
        yield pair("unit", "45", boxed(f"45{unit}"), True)
        yield pair("unit", f"45{unit}", boxed("45"), True)
        yield pair("unit", f"45{unit}", boxed(f"54{unit}"), False)
    for text in (r"\$45", "\\$45.00", r"45\text{ dollars}"):
        yield pair("unit", "45", boxed(text), True)
    yield pair("unit", "45", boxed(r"\$4500"), False)


def truncated() -> Iterator[dict[str, Any]]:
    """A response that is right, cut off: what is left states nothing, or half a number."""
    for gold, response in (
        ("1234", r"Hence it is \boxed{1234}"),
        (r"\frac{12}{35}", r"Hence it is \boxed{\frac{12}{35}}"),
        (r"\{10, 25\}", r"Hence they are \boxed{\{10, 25\}}"),
        ("(3, 14)", r"Hence it is \boxed{(3, 14)}"),
    ):
        yield pair("truncated", gold, response, True)
        for cut in (1, 2, 4):
            yield pair("truncated", gold, response[:-cut], False)
    for gold, response in (
        ("3.1416", "The answer is 3.1416"),
        ("12345", "The answer is 12,345"),
        ("7200", "#### 7200"),
    ):
        yield pair("truncated", gold, response, True, finish="stop")
        for cut in (1, 3):
            yield pair("truncated", gold, response[:-cut], False)


def by_hand() -> Iterator[dict[str, Any]]:
    for kind, gold, response, is_right, *why in math_pairs_by_hand.PAIRS:
        yield pair(kind, gold, response, is_right, **({"why": why[0]} if why else {}))
    for kind, gold, response, is_right, why in math_pairs_by_hand.LIMITATIONS:
        yield pair(kind, gold, response, is_right, limitation=why)


def terminating(value: Fraction) -> str | None:
    """As a decimal; None if it has no end."""
    scaled = value * 10**9
    return f"{Decimal(scaled.numerator).scaleb(-9).normalize():f}" if scaled.denominator == 1 else None


def lines() -> str:
    """The file's text."""
    return "".join(f"{json.dumps(one)}\n" for one in pairs())


if __name__ == "__main__":
    FILE.write_text(lines())
