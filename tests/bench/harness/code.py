"""Hash of the code that a result was measured on."""

import ast
import functools
import hashlib
import pathlib
from collections.abc import Iterable

PROJECT = pathlib.Path(__file__).resolve().parents[3]
PACKAGES = ("actor", "bridge", "configs", "launch", "learner")
POSTGRES = "bridge/store/postgres"
"""The store's second database; a bench whose runs keep their store in a file does not execute it."""
SCHEDULE = (
    *("actor/admission.py", "actor/background.py", "actor/leases.py", "actor/loop.py", "actor/responses.py"),
    *("actor/sampling.py", "actor/serving.py", "actor/vllm", "actor/weight_updates.py"),
    *("bridge/heartbeat_types.py", "bridge/store/claim.py", "bridge/store/group_blobs.py", "bridge/store/open.py"),
    *("bridge/store/sql", "bridge/store/sqlite_database.py", "bridge/store/sqlite_schema.py"),
    *("bridge/store/store_types.py", "configs/schema.py", "configs/sections/schedule.py"),
    *("learner/policy_trainer.py", "learner/publish", "learner/schedule", "learner/train.py"),
)
"""Code that decides when a ticket is issued, sampled and trained; what the schedule benches compare."""
RIG = (
    "launch/tools/plan/sim",
    "tests/bench/rig",
    "tests/bench/harness/sessions.py",
    "tests/bench/harness/estimates.py",
)
"""Code that runs and measures sessions; the paced engine is the planner's."""
LEARNING = (
    *SCHEDULE,
    *("actor/rewards", "configs/presets", "learner/model", "learner/objective", "learner/update"),
    "tests/bench/harness/estimates.py",
)
"""Code that decides what a run learns."""
PLANNER = ("launch/tools/plan", "actor/admission.py", "bridge/store/claim.py", "configs/schema.py", "learner/schedule")
"""Code that the planner simulates with."""
_SUFFIXES = (".py", ".sql")


def code_hash(paths: Iterable[str], root: pathlib.Path = PROJECT) -> str:
    """Returns a hash of Python and SQL files that changes with what they do, not with docstrings, comments or layout.

    A folder is taken without its tests (test_*.py). Raises FileNotFoundError if a path does not exist.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted({file for path in paths for file in _files(root / path)}):
        digest.update(f"{file.relative_to(root)}\0".encode() + _content(file).encode() + b"\0")
    return digest.hexdigest()


def changed_since(time_s: float, paths: Iterable[str], root: pathlib.Path = PROJECT) -> str:
    """Returns a file of `paths` that was written after a Unix time in seconds; empty if there is none."""
    files = sorted({file for path in paths for file in _files(root / path)})
    return next((str(f.relative_to(root)) for f in files if f.stat().st_mtime > time_s), "")


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
