"""The program in a response; text in, text out."""

import re

from bridge.code_tests import ALIASES, CodeIn

_FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,}|~{3,})[ \t]*(?P<name>[^\s`{]*)[^\n`]*$", re.MULTILINE)


def program_text(text: str, language: str, code_in: CodeIn) -> str | None:
    """The program that a response gives as its answer; None if it gives none.

    With `code_in=block` it is the last fenced block that is marked as of the language; without any the last that is
    marked as of none; without that the one block that there is. A block that is not closed ends with the text. With
    `code_in=text` it is the whole text.
    """
    if code_in == "text":
        return text if text.strip() else None
    blocks = [(ALIASES.get(name.lower(), name.lower()), body) for name, body in _blocks(text) if body.strip()]
    named = [body for name, body in blocks if name == language]
    unnamed = [body for name, body in blocks if not name]
    if named or unnamed:
        return (named or unnamed)[-1]
    return blocks[0][1] if len(blocks) == 1 else None


def fenced(program: str, language: str) -> str:
    """A response that gives a program as its answer, whatever is in it."""
    longest = max((len(marks) for marks in re.findall("`+", program)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{program}\n{marks}\n"


def _blocks(text: str) -> list[tuple[str, str]]:
    """(what the fence is marked with, what is in it) of each block."""
    found = []
    at = 0
    while opening := _FENCE.search(text, at):
        begin = min(len(text), opening.end() + 1)
        marks = opening["marks"]
        closing = re.compile(rf"^ {{0,3}}{re.escape(marks[0])}{{{len(marks)},}}[ \t]*$", re.MULTILINE).search(
            text, begin
        )
        found.append((opening["name"], text[begin : closing.start() if closing else len(text)]))
        if closing is None:
            break
        at = closing.end()
    return found
