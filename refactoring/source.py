"""Python sources as the tool sees them: top-level chunks, scopes, and edits of text by position."""

import ast
import dataclasses
import pathlib
import re

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclasses.dataclass(eq=False)
class Scope:
    kind: str
    parent: "Scope | None"
    bound: set[str] = dataclasses.field(default_factory=set)
    globals: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class Ref:
    """A name that is read, written or declared at a place of the text."""

    name: str
    scope: Scope
    node: ast.AST
    start: int
    end: int
    owner: Scope | None = None


@dataclasses.dataclass(eq=False)
class Alias:
    """One name that an import statement binds."""

    node: ast.Import | ast.ImportFrom
    scope: Scope
    module: str
    name: str | None  # of `from module import name`
    asname: str | None
    in_type_checking: bool

    @property
    def bound(self) -> str:
        if self.asname:
            return self.asname
        return self.name if self.name else self.module.partition(".")[0]


@dataclasses.dataclass(eq=False)
class Chunk:
    """A top-level statement with the comments above it and the string below it that documents it."""

    start: int
    end: int
    node: ast.stmt
    names: list[str]


class Source:
    def __init__(self, path: str, text: str):
        self.path, self.text = path, text
        self.module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.is_package = path.endswith("/__init__.py")
        self.tree = ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.top = Scope("module", None)
        self.refs: list[Ref] = []
        self.aliases: list[Alias] = []
        self.annotation_strings: list[ast.Constant] = []
        _Visitor(self).run()
        for ref in self.refs:
            ref.owner = _owner(ref)
        self.docstring, self.imports, self.type_blocks, self.chunks = self._split()
        self.defined = {name: chunk for chunk in self.chunks for name in chunk.names}

    def offset(self, line: int, col: int) -> int:
        text = self._lines[line - 1]
        if not text.isascii():
            col = len(text.encode()[:col].decode())
        return self._starts[line - 1] + col

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def line_start(self, line: int) -> int:
        return self._starts[line - 1]

    def _split(self):
        body = list(self.tree.body)
        doc = None
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            doc = body.pop(0)
        imports, blocks, chunks = [], [], []
        last_line = doc.end_lineno if doc else 0
        for node in body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            end = self._starts[node.end_lineno]
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append(node)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                blocks.append(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and chunks:
                chunks[-1].end = end
            else:
                while first - 1 > last_line and self._lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                # a comment that a blank line parts from the statement goes with it as well
                top = first
                while top - 1 > last_line and self._lines[top - 2].strip() in ("",) or (
                    top - 1 > last_line and self._lines[top - 2].startswith("#")
                ):
                    top -= 1
                    if self._lines[top - 1].startswith("#"):
                        first = top
                chunks.append(Chunk(self._starts[first - 1], end, node, _names(node)))
            last_line = node.end_lineno
        return doc, imports, blocks, chunks


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _owner(ref: Ref) -> Scope | None:
    scope: Scope | None = ref.scope
    first = True
    while scope is not None:
        if ref.name in scope.globals:
            while scope.parent:
                scope = scope.parent
            return scope
        if ref.name in scope.bound and (first or scope.kind != "class"):
            return scope
        scope, first = scope.parent, False
    return None


class _Visitor:
    def __init__(self, source: Source):
        self.s = source

    def run(self) -> None:
        for node in self.s.tree.body:
            self.visit(node, self.s.top)

    def ref(self, name: str, scope: Scope, node: ast.AST, start: int, *, bind: bool = False) -> None:
        if bind and name not in scope.globals:
            scope.bound.add(name)
        self.s.refs.append(Ref(name, scope, node, start, start + len(name)))

    def visit(self, node: ast.AST | None, scope: Scope) -> None:
        if node is None:
            return
        method = getattr(self, "_" + type(node).__name__, None)
        if method:
            method(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                self.visit(child, scope)

    def all(self, nodes, scope: Scope) -> None:
        for node in nodes:
            self.visit(node, scope)

    def _Name(self, node: ast.Name, scope: Scope) -> None:
        self.ref(node.id, scope, node, self.s.span(node)[0], bind=not isinstance(node.ctx, ast.Load))

    def _Constant(self, node: ast.Constant, scope: Scope) -> None:
        if isinstance(node.value, str):
            self.s.annotation_strings.append(node)

    def _definition(self, node, scope: Scope) -> None:
        start = self.s.offset(node.lineno, node.col_offset)
        found = re.compile(r"(?:async\s+)?(?:def|class)\s+").match(self.s.text, start)
        self.ref(node.name, scope, node, found.end(), bind=True)

    def _FunctionDef(self, node, scope: Scope) -> None:
        self.all(node.decorator_list, scope)
        self._definition(node, scope)
        self.visit(node.returns, scope)
        inner = self._arguments_of(node.args, scope)
        self._declare_globals(node, inner)
        self.all(node.body, inner)

    _AsyncFunctionDef = _FunctionDef

    def _Lambda(self, node: ast.Lambda, scope: Scope) -> None:
        self.visit(node.body, self._arguments_of(node.args, scope))

    def _arguments_of(self, args: ast.arguments, scope: Scope) -> Scope:
        inner = Scope("function", scope)
        self.all([*args.defaults, *(d for d in args.kw_defaults if d)], scope)
        for arg in [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]:
            if arg:
                self.visit(arg.annotation, scope)
                inner.bound.add(arg.arg)
        return inner

    def _declare_globals(self, node, inner: Scope) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Global):
                inner.globals.update(child.names)

    def _ClassDef(self, node: ast.ClassDef, scope: Scope) -> None:
        self.all([*node.decorator_list, *node.bases, *node.keywords], scope)
        self._definition(node, scope)
        self.all(node.body, Scope("class", scope))

    def _comprehension_of(self, node, scope: Scope) -> None:
        inner = Scope("comprehension", scope)
        for i, generator in enumerate(node.generators):
            self.visit(generator.iter, scope if i == 0 else inner)
            self.visit(generator.target, inner)
            self.all(generator.ifs, inner)
        for field in ("elt", "key", "value"):
            self.visit(getattr(node, field, None), inner)

    _ListComp = _SetComp = _DictComp = _GeneratorExp = _comprehension_of

    def _NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> None:
        self.visit(node.value, scope)
        while scope.kind == "comprehension":
            scope = scope.parent
        self.visit(node.target, scope)

    def _ExceptHandler(self, node: ast.ExceptHandler, scope: Scope) -> None:
        if node.name:
            scope.bound.add(node.name)
        self.visit(node.type, scope)
        self.all(node.body, scope)

    def _Global(self, node: ast.Global, scope: Scope) -> None:
        start, end = self.s.span(node)
        for found in re.finditer(r"\w+", self.s.text[start:end]):
            if found.group() != "global":
                self.ref(found.group(), scope, node, start + found.start())

    def _MatchAs(self, node: ast.MatchAs, scope: Scope) -> None:
        self.visit(node.pattern, scope)
        if node.name:
            scope.bound.add(node.name)

    def _MatchStar(self, node, scope: Scope) -> None:
        if node.name:
            scope.bound.add(node.name)

    def _MatchMapping(self, node, scope: Scope) -> None:
        self.all([*node.keys, *node.patterns], scope)
        if node.rest:
            scope.bound.add(node.rest)

    def _Import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            made = Alias(node, scope, alias.name, None, alias.asname, self._typing(node))
            scope.bound.add(made.bound)
            self.s.aliases.append(made)

    def _ImportFrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            made = Alias(node, scope, node.module, alias.name, alias.asname, self._typing(node))
            scope.bound.add(made.bound)
            self.s.aliases.append(made)

    def _typing(self, node: ast.AST) -> bool:
        parent = self.s.parents.get(node)
        return isinstance(parent, ast.If) and ast.unparse(parent.test) == "TYPE_CHECKING"


def apply_edits(text: str, edits: list[tuple[int, int, str]], start: int = 0, end: int | None = None) -> str:
    """Returns text[start:end] with the edits that lie in it."""
    end = len(text) if end is None else end
    made, at = [], start
    for first, last, new in sorted(set(edits)):
        if first < start or last > end:
            continue
        if first < at:
            raise ValueError(f"edits overlap at {text[first - 40 : last + 40]!r}")
        made += [text[at:first], new]
        at = last
    return "".join(made) + text[at:end]


def read(path: str) -> Source:
    return Source(path, pathlib.Path(path).read_text())
