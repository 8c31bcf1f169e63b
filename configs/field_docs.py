"""Documentation of config fields, read from the docstrings below them."""

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from configs.overrides import type_name
from configs.schema import Config

_ONE_OF = re.compile(r"one of `([A-Z_]+)`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldDoc:
    """Path, default, type and docstring of a config field."""

    path: str
    """Dotted path, for example `rounds.groups_per_round`."""
    default: Any
    """Default of the section, before any preset. None if the field has no default."""
    kind: str
    """Type name, or the choices separated by "|"."""
    meaning: str
    """Paragraphs separated by empty lines. Empty if the field has no docstring."""


@functools.cache
def field_docs() -> dict[str, FieldDoc]:
    """Returns all config fields by path, in source order."""
    return {doc.path: doc for doc in _docs(Config, "")}


def _docs(section: Any, prefix: str) -> Iterator[FieldDoc]:
    hints, texts = typing.get_type_hints(section), meanings(section)
    names = vars(sys.modules[section.__module__])
    for field in dataclasses.fields(section):
        kind, path = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from _docs(kind, f"{path}.")
            continue
        default: Any = None if field.default is dataclasses.MISSING else field.default
        yield FieldDoc(
            path=path, default=default, kind=type_name(kind), meaning=_with_choices(texts.get(field.name, ""), names)
        )


def _with_choices(meaning: str, names: Mapping[str, Any]) -> str:
    """Replaces "one of `NAME`" by the members of a constant in the section's module."""
    return _ONE_OF.sub(lambda found: f"one of {', '.join(sorted(names[found[1]]))}", meaning)


def meanings(section: Any) -> dict[str, str]:
    """Returns the docstring of each field of a section and its bases. Each paragraph is one line."""
    bases = [base for base in reversed(section.__mro__[1:]) if dataclasses.is_dataclass(base)]
    found = {name: text for base in bases for name, text in meanings(base).items()}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            paragraphs = below.value.value.split("\n\n")
            found[field.target.id] = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return found
