"""What the sources can print: their texts, with holes where values come in."""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
_FOLDERS = ("actor", "bridge", "configs", "launch", "learner")
_PERCENT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrfgex]")
_LEAST = 6
"""Letters of a text that says anything."""


@dataclasses.dataclass(frozen=True)
class Template:
    """A text of the sources."""

    parts: tuple[str, ...]
    """Between its holes."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(".*?".join(f"({re.escape(part)})" for part in self.parts))

    def covers(self, line: str) -> set[int]:
        """Where in a line its parts stand; nowhere, where not all do."""
        found = self.pattern.search(line)
        if found is None:
            return set()
        return {i for group in range(1, len(self.parts) + 1) for i in range(*found.span(group))}


@functools.cache
def templates() -> tuple[Template, ...]:
    found = {parts for folder in _FOLDERS for file in (REPO / folder).rglob("*.py") for parts in _texts(file)}
    return tuple(Template(parts) for parts in sorted(found) if sum(c.isalpha() for p in parts for c in p) >= _LEAST)


def said(line: str) -> list[Template]:
    """The texts that a line can be made of."""
    return [one for one in templates() if one.covers(line)]


def unsaid(line: str) -> str:
    """What of a line comes from no text of the sources: values, if the line is one that is printed."""
    covered: set[int] = set()
    for one in templates():
        covered |= one.covers(line)
    return "".join("_" if i in covered else c for i, c in enumerate(line))


def _texts(file: Path) -> Iterator[tuple[str, ...]]:
    tree = ast.parse(file.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    apart = docstrings | inside
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield _parts("\0".join(_constants(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield _parts(_PERCENT.sub("\0", node.value))


def _constants(node: ast.JoinedStr) -> list[str]:
    texts, text = [], ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        else:
            texts.append(text)
            text = ""
    return [*texts, text]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split("\0") if part)
