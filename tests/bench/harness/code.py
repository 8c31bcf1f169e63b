"""Hash of the code that a result was measured on."""

import ast
import functools
import hashlib
import pathlib
from collections.abc import Iterable

PROJECT = pathlib.Path(__file__).resolve().parents[3]
ROOMS = ("actor", "bridge", "configs", "launch", "learner")
"""All packages of the product."""
SCHEDULE = (
    "actor/admission.py",
    "actor/loop.py",
    "actor/sampling.py",
    "actor/weight_updates.py",
    "bridge/store",
    "learner/schedule",
    "learner/train.py",
)
"""Code that decides when a ticket is issued, sampled and trained; what the schedule benches compare."""
RIG = "tests/bench/rig"
LEARNING = (*SCHEDULE, "configs/presets", "learner/objective", "learner/update")
"""Code that decides what a run learns."""
_SUFFIXES = (".py", ".sql")


def code_hash(paths: Iterable[str], root: pathlib.Path = PROJECT) -> str:
    """Returns a hash of Python and SQL files that changes with what they do, not with docstrings, comments or layout.

    A folder is taken without its tests (test_*.py).

    Args:
      paths: files and folders, relative to `root`.
      root: the project's folder.

    Raises:
      FileNotFoundError: one of the paths does not exist.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted({file for path in paths for file in _files(root / path)}):
        digest.update(f"{file.relative_to(root)}\0".encode() + _content(file).encode() + b"\0")
    return digest.hexdigest()


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_dir():
        return [f for f in path.rglob("*") if f.suffix in _SUFFIXES and not f.name.startswith("test_")]
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    return [path]


def _content(file: pathlib.Path) -> str:
    text = file.read_text()
    return _normalized(text) if file.suffix == ".py" else text


@functools.lru_cache(maxsize=4096)
def _normalized(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_text(s)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """True for a docstring, or a field's documentation."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
