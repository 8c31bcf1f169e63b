"""How the product's files are cut and named: what a reader may rely on to find a thing in one guess."""

import ast
import collections
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
FILES = tuple(
    path
    for package in ("learner", "actor", "bridge", "configs", "launch")
    for path in sorted((REPO / package).rglob("*.py"))
)
MAX_LINES = 400


def name(path: Path) -> str:
    """A file's path below the root."""
    return str(path.relative_to(REPO))


def test_no_file_is_longer_than_a_reader_takes_in_at_once():
    too_long = {name(path): n for path in FILES if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert too_long == {}


def test_no_two_modules_share_a_name_with_two_meanings():
    """`configs/sections/X.py` and `configs/tasks/X.py` configure X; `protocol.py` and `cli.py` are their room's."""
    found = collections.defaultdict(list)
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py", "protocol.py", "cli.py") and path.parts[-3] != "configs":
            found[path.name].append(name(path))
    assert {k: v for k, v in found.items() if len(v) > 1} == {}


@pytest.mark.heavy
def test_no_two_public_classes_share_a_name():
    found = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name(path))
    assert {k: v for k, v in found.items() if len(v) > 1} == {}


@pytest.mark.parametrize("room", sorted({path.parent for path in FILES}), ids=name)
def test_every_room_says_what_it_is(room):
    """One sentence in its `__init__.py`."""
    init = room / "__init__.py"
    assert init.is_file() and ast.get_docstring(ast.parse(init.read_text()))
