"""Extraction of a response's program from its code blocks."""

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterator, Sequence

from bridge.code_tests import ALIASES, CodeIn

_FENCE = re.compile(r"^(?P<before>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$")
_TAGGED = re.compile(r"(?<=<answer>)[ \t]*(?=```|~~~)")
"""Place before a fence that opens on the line of an answer's tag."""

_MAX_PARSED_CHARS = 200_000
"""Maximum characters of a parsed block; a longer block is only searched as text."""


_READS = {
    "python": r"\binput\s*\(|\bstdin\b|\bopen\(0|\bfileinput\b",
    "javascript": r"\bstdin\b|\breadline\b|\breadFileSync\(0",
    "bash": r"\bread\b|\bcat\b|\bmapfile\b|/dev/stdin",
    "perl": r"<>|\bSTDIN\b",
    "ruby": r"\bgets\b|\bSTDIN\b|\$stdin\b|\bARGF\b",
}
"""Patterns that show that a program reads standard input, by language; for other languages, that it has a `main`.
Python's is for unparsable text."""


_OPENS = frozenset({"open", "fdopen", "read", "FileIO", "Path"})
"""Functions that read a file; standard input is 0 or /dev/stdin."""


def program_text(
    text: str, language: str, code_in: CodeIn, *, functions: Collection[str] = (), reads: bool = False
) -> str | None:
    """Returns the program that a response gives as its answer; None if it gives none.

    With `code_in=text` it is the whole text. With `code_in=block` it is the last candidate among the fenced blocks, as
    in LiveCodeBench. Candidates are blocks marked with the language, else unmarked blocks, else the only block. The
    following arguments prefer some candidates:

    * `functions`: blocks that define a function called by the test cases (EvalPlus's entry point). An unmarked block
      counts if no marked block defines it. Missing definitions are taken from the other blocks.
    * `reads`: blocks that read standard input.

    Blocks that only demonstrate usage have neither property. An unclosed block ends with the text.
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
    """Returns a response with the program in a fenced block; the fence is longer than any in the program."""
    longest = max((len(marks) for marks in re.findall("`+", program)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{program}\n{marks}\n"


def _blocks(text: str) -> list[tuple[str, str]]:
    """Returns (language mark, content) of each block, without the fence's indentation."""
    found: list[tuple[str, str, list[str]]] = []
    before = marks = ""
    text = _TAGGED.sub("\n", text.replace("\r\n", "\n"))
    for line in text.removesuffix("\n").split("\n"):
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
    end = line.strip().removesuffix("</answer>").rstrip()
    return len(end) >= len(marks) and not end.strip(marks[0]) and len(line) - len(line.lstrip()) <= 3


def _without(lines: Sequence[str], before: str) -> str:
    """Returns lines without their fence's prefix (CommonMark 4.5), or without the part that the first line has."""
    before = before[: next((_num_shared(line, before) for line in lines if line.strip()), 0)]
    return "".join(f"{line[_num_shared(line, before) :]}\n" for line in lines)


def _num_shared(line: str, before: str) -> int:
    """Returns the length of a line's prefix that is its fence's: quote marks, and white space up to its column."""
    at = 0
    while at < min(len(line), len(before)) and (line[at] in " \t" or line[at] == before[at] == ">"):
        at += 1
    return at


def _defines(body: str, functions: Collection[str]) -> bool:
    tree = _parsed(body)
    if tree is None:  # a wrong answer, but still the answer
        names = "|".join(re.escape(name.rpartition(".")[2]) for name in functions)
        return re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+(?:{names})\b", body, re.MULTILINE) is not None
    return any(_has(tree.body, name.split(".")) for name in functions)


def _reads(body: str, language: str) -> bool:
    """Returns True if a program reads standard input; comments, strings and a replaced stream do not count."""
    tree = _parsed(body) if language == "python" else None
    if tree is None:
        return re.search(_READS.get(language, r"\bmain\b"), body) is not None
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import)]
    sys_names = {"sys"} | {a.asname or a.name for node in imports for a in node.names if a.name == "sys"}
    streams = [node for node in nodes if isinstance(node, ast.Attribute) and _is_stdin(node, sys_names)]
    # the program replaces stdin; saving the old stream is no read
    if any(not isinstance(node.ctx, ast.Load) for node in streams):
        kept = {id(node.value) for node in nodes if isinstance(node, ast.Assign)}
        streams = [node for node in streams if id(node) not in kept]
    if any(isinstance(node.ctx, ast.Load) for node in streams):
        return True
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == "input"]
    is_own = any(not isinstance(node.ctx, ast.Load) for node in names) or any(
        isinstance(node, ast.FunctionDef) and node.name == "input" for node in nodes
    )
    is_argument = any(isinstance(node, ast.arg) and node.arg == "input" for node in nodes)
    if names and not is_own and not is_argument:  # also passed on: map(input, ...), read = input
        return True
    return any(_is_read(node, is_own) for node in nodes)


def _is_stdin(node: ast.Attribute, sys_names: Collection[str]) -> bool:
    if node.attr not in ("stdin", "__stdin__"):
        return False
    of = node.value
    return isinstance(of, ast.Call) or (isinstance(of, ast.Name) and of.id in sys_names)  # __import__("sys").stdin


def _is_read(node: ast.AST, is_own: bool) -> bool:
    """Returns True for an import or a call that reads; `is_own`: the program defines its own `input`."""
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
    """Returns True if the statements define the dotted path, or a class Solution with such a method."""
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
    """Yields the statement lists within an if, try, with or loop, which share the enclosing scope."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, ())
    for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield branch.body


def _with_definitions(blocks: Sequence[str], chosen: int) -> str:
    """Returns a block preceded by missing definitions from other blocks, those of the nearest earlier block first."""
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
        symtable.symtable(body, "answer", "exec")  # rejects more than the parser
        return ast.parse(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _bound(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement defines; empty if the statement does more than define."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = (node for target in targets for node in ast.walk(target))
        return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if isinstance(statement, ast.Try):  # an import with its fallback
        within = [_bound(one) for inner in _inner(statement) for one in inner if not isinstance(one, ast.Pass)]
        return set[str]().union(*within) if all(within) else set()
    return set()


def _free_names(source: str) -> set[str]:
    """Returns the global names that a source text uses."""
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
