"""Picks the code block of a response that is its program."""

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterator, Sequence

from bridge.code_tests import ALIASES, CodeIn

_FENCE = re.compile(r"^(?P<before>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$")


_MAX_PARSED_CHARS = 200_000
"""A longer block is looked at by its text alone."""


_READS = {
    "python": r"\binput\s*\(|\bstdin\b|\bopen\(0|\bfileinput\b",
    "javascript": r"\bstdin\b|\breadline\b|\breadFileSync\(0",
    "bash": r"\bread\b|\bcat\b|\bmapfile\b|/dev/stdin",
    "perl": r"<>|\bSTDIN\b",
    "ruby": r"\bgets\b|\bSTDIN\b|\$stdin\b|\bARGF\b",
}
"""A sign that a program reads standard input, by language; of the other languages, that it has a `main`. Of Python it
is for text that does not parse."""


_OPENS = frozenset({"open", "fdopen", "read", "FileIO", "Path"})
"""Functions that read a file; of standard input it is 0 or /dev/stdin."""


def program_text(
    text: str, language: str, code_in: CodeIn, *, functions: Collection[str] = (), reads: bool = False
) -> str | None:
    """Returns the program that a response gives as its answer; None if it gives none.

    With `code_in=text` it is the whole text. With `code_in=block` it is the last fenced block, as in LiveCodeBench, of
    those that can be the program. These are the blocks marked as of the language; without any, those marked as of none;
    without those, the one block that exists. Of them, where there are such:

    - `functions`: those that define one of the functions that the test cases call (EvalPlus's entry point). A block
      marked as of none counts where no marked one defines it. Definitions that it lacks come from the other blocks.
    - `reads`: those that read standard input.

    A block that only demonstrates is neither. A block that is not closed ends with the text.
    """
    if code_in == "text":
        return text if text.strip() else None
    blocks = [(ALIASES.get(name.lower(), name.lower()), body) for name, body in _blocks(text) if body.strip()]
    named = [body for name, body in blocks if name == language]
    unnamed = [body for name, body in blocks if not name]
    candidates = named or unnamed or ([blocks[0][1]] if len(blocks) == 1 else [])
    if not candidates:
        return None
    if functions:
        for group in (named, unnamed):
            if defining := [i for i, body in enumerate(group) if _defines(body, functions)]:
                return _with_definitions(group, defining[-1])
    chosen = len(candidates) - 1
    if reads:
        chosen = max((i for i, body in enumerate(candidates) if _reads(body, language)), default=chosen)
    return _with_definitions(candidates, chosen) if language == "python" else candidates[chosen]


def fenced(program: str, language: str) -> str:
    """A response that gives a program as its answer, whatever is in it."""
    longest = max((len(marks) for marks in re.findall("`+", program)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{program}\n{marks}\n"


def _blocks(text: str) -> list[tuple[str, str]]:
    """Returns (the fence's mark, the content) of each block, without the fence's own indentation."""
    found: list[tuple[str, str, list[str]]] = []
    before = marks = ""
    for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n"):
        if marks:
            inner = line[_num_shared(line, before) :]
            if _closes(inner, marks):
                marks = ""
            else:
                found[-1][2].append(line)
        elif (opening := _FENCE.match(line)) and not (opening["marks"][0] == "`" and "`" in opening["info"]):
            before, marks = opening["before"], opening["marks"]
            info = opening["info"].split()
            found.append((info[0].partition("{")[0] if info else "", before, []))
    return [(name, _without(lines, before)) for name, before, lines in found]


def _closes(line: str, marks: str) -> bool:
    end = line.strip()
    return len(end) >= len(marks) and not end.strip(marks[0]) and len(line) - len(line.lstrip()) <= 3


def _without(lines: Sequence[str], before: str) -> str:
    """Lines without what stands before their fence (CommonMark 4.5), or as much of it as the first line has."""
    before = before[: next((_num_shared(line, before) for line in lines if line.strip()), 0)]
    return "".join(f"{line[_num_shared(line, before) :]}\n" for line in lines)


def _num_shared(line: str, before: str) -> int:
    """Characters at a line's beginning that are the fence's: quotation marks, and white space up to its column."""
    at = 0
    while at < min(len(line), len(before)) and (line[at] in " \t" or line[at] == before[at] == ">"):
        at += 1
    return at


def _defines(body: str, functions: Collection[str]) -> bool:
    tree = _parsed(body)
    if tree is None:  # a wrong answer, and still the answer
        names = "|".join(re.escape(name.rpartition(".")[2]) for name in functions)
        return re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+(?:{names})\b", body, re.MULTILINE) is not None
    return any(_has(tree.body, name.split(".")) for name in functions)


def _reads(body: str, language: str) -> bool:
    """Returns True if a program reads standard input; comments, texts and another stream put in its place do not."""
    tree = _parsed(body) if language == "python" else None
    if tree is None:
        return re.search(_READS.get(language, r"\bmain\b"), body) is not None
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import)]
    sys_names = {"sys"} | {a.asname or a.name for node in imports for a in node.names if a.name == "sys"}
    streams = [node for node in nodes if isinstance(node, ast.Attribute) and _is_stdin(node, sys_names)]
    if any(not isinstance(node.ctx, ast.Load) for node in streams):  # another is put there; one kept for later is none
        kept = {id(node.value) for node in nodes if isinstance(node, ast.Assign)}
        streams = [node for node in streams if id(node) not in kept]
    if any(isinstance(node.ctx, ast.Load) for node in streams):
        return True
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == "input"]
    is_own = any(not isinstance(node.ctx, ast.Load) for node in names) or any(
        isinstance(node, ast.FunctionDef) and node.name == "input" for node in nodes
    )
    is_argument = any(isinstance(node, ast.arg) and node.arg == "input" for node in nodes)
    if names and not is_own and not is_argument:  # also handed on: map(input, ...), read = input
        return True
    return any(_is_read(node, is_own) for node in nodes)


def _is_stdin(node: ast.Attribute, sys_names: Collection[str]) -> bool:
    if node.attr not in ("stdin", "__stdin__"):
        return False
    of = node.value
    return isinstance(of, ast.Call) or (isinstance(of, ast.Name) and of.id in sys_names)  # __import__("sys").stdin


def _is_read(node: ast.AST, is_own: bool) -> bool:
    """Returns True for an import or a call that reads; `is_own`: `input` is the program's own name."""
    if isinstance(node, ast.Import):
        return any(alias.name == "fileinput" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module == "fileinput" or (node.module == "sys" and any(a.name == "stdin" for a in node.names))
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "input":
        return isinstance(node.func, ast.Name) and not is_own
    if name not in _OPENS or not node.args or not isinstance(node.args[0], ast.Constant):
        return False
    given = node.args[0].value
    return given == "/dev/stdin" or (type(given) is int and given == 0)


def _has(statements: Sequence[ast.stmt], path: Sequence[str]) -> bool:
    """Returns True if the statements define what a dotted path names, or a class Solution with such a method."""
    first, *rest = path
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            is_it = statement.name == first and (not rest or bool(statement.bases) or _has(statement.body, rest))
            if is_it or (statement.name == "Solution" and not rest and _has(statement.body, path)):
                return True
        elif first in _bound(statement) or any(_has(inner, path) for inner in _inner(statement)):
            return True
    return False


def _inner(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """The lists of statements within an if, try, with or loop, whose names are those of the text around it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, ())
    for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield branch.body


def _with_definitions(blocks: Sequence[str], chosen: int) -> str:
    """A block behind the definitions that it needs and only other blocks have, the nearest block before it first."""
    tree = _parsed(blocks[chosen])
    if tree is None:
        return blocks[chosen]
    known = [(i, parsed) for i, body in enumerate(blocks) if i != chosen and (parsed := _parsed(body)) is not None]
    known.sort(key=lambda one: (one[0] > chosen, abs(one[0] - chosen)))
    definitions: dict[str, tuple[int, ast.stmt]] = {}
    for i, statement in ((i, statement) for i, other in known for statement in other.body):
        for name in _bound(statement):
            definitions.setdefault(name, (i, statement))
    has = set(dir(builtins)).union(*map(_bound, tree.body))
    needed: list[tuple[int, int, str]] = []
    missing = _free_names(blocks[chosen]) - has
    while missing:
        name = missing.pop()
        has.add(name)
        if name in definitions:
            i, statement = definitions[name]
            source = _source(blocks[i], statement)
            needed.append((i, statement.lineno, source))
            has |= _bound(statement)
            missing = (missing | _free_names(source)) - has
    return "".join(f"{source}\n" for *_, source in sorted(needed)) + blocks[chosen]


def _parsed(body: str) -> ast.Module | None:
    if len(body) > _MAX_PARSED_CHARS:
        return None
    try:
        symtable.symtable(body, "answer", "exec")  # refuses more than the parser
        return ast.parse(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement defines; none of one that does more than define."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = (node for target in targets for node in ast.walk(target))
        return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if isinstance(statement, ast.Try):  # an import, and what stands for it where it fails
        within = [_bound(one) for inner in _inner(statement) for one in inner if not isinstance(one, ast.Pass)]
        return set[str]().union(*within) if all(within) else set()
    return set()


def _free_names(source: str) -> set[str]:
    """Global names that a source text uses."""
    tables = [symtable.symtable(source, "answer", "exec")]
    found: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        at_top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global())}
    return found


def _source(body: str, statement: ast.stmt) -> str:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)])
    return "\n".join(body.split("\n")[first - 1 : statement.end_lineno])
