"""Mutation testing: does a test fail when one line of the product changes?

  python -m tests.mutations --seed=1 --count=60
  python -m tests.mutations --seed=1 --count=60 --wider --only=learner/schedule

Each mutant (a changed comparison, boolean operator, constant, negated condition or removed statement, drawn at random)
runs in a git worktree of HEAD against the tests of its room, the folder below `tests/` that mirrors its own; with
--wider a survivor also meets all tests of its package and tests/integration. A test that fails without the mutant, too,
is left out. Progress goes to stderr; the last line of stdout is a JSON object with the counts and the survivors.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("actor", "bridge", "configs", "launch", "learner")
TIERS = "(unit or integration) and not engine"
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A replacement within one line."""

    file: str
    line: int
    start: int
    """UTF-8 byte offset in the line."""
    end: int
    kind: str
    new: str

    def apply(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.new.encode() + line[self.end :]
        return b"".join(lines).decode()


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Returns every mutant of a file that changes one line, in the order of the lines."""
    found: list[Mutant] = []
    lines = source.encode().splitlines()

    def add(kind: str, start: ast.expr | ast.stmt, end: ast.expr | ast.stmt, new: str, *, between: str = "") -> None:
        """Replaces the nodes' text, or the one operator between the end of `start` and the beginning of `end`."""
        assert start.end_lineno and start.end_col_offset is not None and end.end_col_offset is not None
        first, last = (start.end_lineno, end.lineno) if between else (start.lineno, end.end_lineno)
        if first != last:
            return
        a, b = (start.end_col_offset, end.col_offset) if between else (start.col_offset, end.end_col_offset)
        if between:
            at = lines[first - 1][a:b].decode().find(between)
            if at < 0:  # behind a parenthesis of another line
                return
            a, b = a + at, a + at + len(between)
        found.append(Mutant(file, first, a, b, kind, new))

    def visit(node: ast.AST) -> None:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                old, new = COMPARISONS[type(op)]
                add("comparison", left, right, new, between=old)
            case ast.BoolOp(op=op, values=[left, right]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                add("boolean", left, right, new, between=old)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                add("boolean", node, node, f"({ast.unparse(operand)})")
            case ast.Constant(value=bool(value)):
                add("constant", node, node, str(not value))
            case ast.Constant(value=int(value) | float(value)):
                add("constant", node, node, repr(value + 1 if isinstance(value, int) else value * 2 or 1.0))
            case ast.Expr(value=ast.Constant()):  # a docstring
                return
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logging" | "flags")))):
                return
            case ast.Expr() | ast.AugAssign() | ast.Raise():
                add("removed statement", node, node, "pass")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            add("negation", node.test, node.test, f"(not ({ast.unparse(node.test)}))")
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "format_spec", "type_params"):
                continue
            for part in child if isinstance(child, list) else [child]:
                if isinstance(part, ast.AST):
                    visit(part)

    visit(ast.parse(source))
    return found


def changes_code(mutant: Mutant, source: str) -> bool:
    """Returns True if a mutant is another program; within an f-string, Python 3.11 has no offsets of a line."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except (SyntaxError, UnicodeDecodeError):
        return False


def draw(files: dict[str, str], *, count: int, seed: int) -> list[Mutant]:
    """Returns mutants: a line that has some is drawn with equal chance, then one of its mutants."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for file, source in sorted(files.items()):
        for mutant in mutants_of(file, source):
            by_line.setdefault((file, mutant.line), []).append(mutant)
    rng, drawn = random.Random(seed), []
    for line in rng.sample(sorted(by_line), len(by_line)):
        mutant = rng.choice(by_line[line])
        if changes_code(mutant, files[mutant.file]):
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


def room_of(file: str, root: pathlib.Path) -> list[str]:
    """Returns the tests of a product file's room: the nearest folder of tests/ that mirrors its own."""
    folder = pathlib.PurePath("tests", file).parent
    while not any((root / folder).glob("**/test_*.py")):
        folder = folder.parent
    if len(folder.parts) > 2:
        return [str(folder)]
    return sorted(str(path.relative_to(root)) for path in (root / folder).glob("test_*.py"))


class Bench:
    """A worktree in which mutants meet their tests."""

    def __init__(self, root: pathlib.Path, limit_s: float) -> None:
        self._root, self._limit_s = root, limit_s
        self._is_broken: dict[str, bool] = {}
        """Of tests that failed with a mutant, True for those that fail without one."""
        self._stamp_s = time.time()

    def killer(self, mutant: Mutant, tests: list[str]) -> str | None:
        """Returns the first test that fails because of a mutant, or None."""
        path = self._root / mutant.file
        original = path.read_text()
        while True:
            self._write(path, mutant.apply(original))
            failed = self._first_failure(tests)
            self._write(path, original)
            if failed is None or not self._fails_anyway(failed):
                return failed

    def _write(self, path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        self._stamp_s += 2  # bytecode is valid for a time in whole seconds and a size
        os.utime(path, (self._stamp_s, self._stamp_s))

    def _fails_anyway(self, test: str) -> bool:
        if test not in self._is_broken:
            self._is_broken[test] = "::" in test and self._first_failure([test]) is not None
        return self._is_broken[test]

    def _first_failure(self, tests: list[str]) -> str | None:
        broken = [f"--deselect={test}" for test, is_broken in self._is_broken.items() if is_broken]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "-m",
            TIERS,
            *broken,
            *tests,
        ]
        environment = os.environ | {"PYTHONPATH": str(self._root), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        process = subprocess.Popen(
            command,
            cwd=self._root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode in (0, 5):
            return None
        named = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", out, re.MULTILINE)
        return named[1] if named else f"pytest ended with {process.returncode}: {out[-300:]}"


@contextlib.contextmanager
def worktree() -> Iterator[pathlib.Path]:
    """A worktree of HEAD with this checkout's virtual environment."""
    with tempfile.TemporaryDirectory(prefix="sluice-mutants-") as folder:
        path = pathlib.Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "-q", "--detach", path], cwd=ROOT, check=True)
        try:
            (path / ".venv").symlink_to((ROOT / ".venv").resolve())
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", path], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="draw from files whose path begins so")
    parser.add_argument(
        "--wider", action="store_true", help="survivors meet their package's tests and tests/integration"
    )
    parser.add_argument(
        "--limit_s", type=float, default=1800.0, help="a mutant whose tests take longer counts as killed"
    )
    args = parser.parse_args()

    start_s = time.monotonic()
    outcomes: Counter[tuple[str, str]] = Counter()
    survivors = []
    with worktree() as root:
        listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=root, check=True, capture_output=True, text=True)
        names = [name for name in listed.stdout.split() if name.endswith(".py") and name.startswith(args.only)]
        bench = Bench(root, args.limit_s)
        for mutant in draw({name: (root / name).read_text() for name in names}, count=args.count, seed=args.seed):
            old = (root / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
            package = mutant.file.partition("/")[0]
            killer = bench.killer(mutant, room_of(mutant.file, root))
            if killer is None and args.wider:
                killer = bench.killer(mutant, [f"tests/{package}", "tests/integration"])
            outcomes[package, "survived" if killer is None else "killed"] += 1
            what = f"{mutant.file}:{mutant.line} {mutant.kind} -> {mutant.new!r} in {old!r}"
            if killer is None:
                survivors.append(what)
            print(f"{'SURVIVED' if killer is None else 'killed'} {what} by {killer}", file=sys.stderr, flush=True)
    counts = {
        name: sum(n for (_, outcome), n in outcomes.items() if outcome == name) for name in ("killed", "survived")
    }
    by_package = {p: {o: outcomes[p, o] for o in ("killed", "survived")} for p in sorted({p for p, _ in outcomes})}
    seconds = round(time.monotonic() - start_s)
    print(
        json.dumps({"seed": args.seed, **counts, "by_package": by_package, "seconds": seconds, "survivors": survivors})
    )


if __name__ == "__main__":
    main()
