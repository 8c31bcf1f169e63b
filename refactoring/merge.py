"""Moves and merges the Python files: names that collide, imports, and the text of every new module."""

import ast
import collections
import re

import source
from moves import Plan, dotted

FIRST_PARTY = ("actor", "bridge", "configs", "launch", "learner", "tests", "docs")


def stem(file: str) -> str:
    name = file.removesuffix("/__init__.py").removesuffix("/__main__.py").removesuffix(".py")
    return name.rpartition("/")[2]


def prefixed(name: str, file: str) -> str:
    """A name with its old module's in front: `_ROOT` of files.py is `_FILES_ROOT`, `_Row` is `_FilesRow`."""
    bare = name.lstrip("_")
    lead = name[: len(name) - len(bare)]
    of = stem(file)
    if bare.isupper():
        return f"{lead}{of.upper()}_{bare}"
    if bare[0].isupper():
        return lead + "".join(w.capitalize() for w in of.split("_")) + bare
    return f"{lead}{of}_{bare}"


class Part:
    """What one old file gives to one new one."""

    def __init__(self, file: str, chunks: list[source.Chunk], whole: bool):
        self.file, self.chunks, self.whole = file, chunks, whole
        self.imports: list[tuple] = []  # (module, name, asname, comment)
        self.typing: list[tuple] = []
        self.needs: set[str] = set()  # other files of the same target, used at module level
        self.edits: list[tuple[int, int, str]] = []

    @property
    def size(self) -> int:
        return sum(c.end - c.start for c in self.chunks)


class Merger:
    def __init__(self, plan: Plan):
        self.plan = plan
        self.notes: list[str] = []
        self.new_name: dict[tuple[str, str], str] = {}
        self.same: set[tuple[str, str]] = set()  # definitions that another part of the target has word for word
        self.parts: dict[str, list[Part]] = collections.defaultdict(list)
        self.bindings: dict[str, dict[str, tuple]] = collections.defaultdict(dict)
        for file, s in plan.sources.items():
            default = plan.target[file] if file in plan.target else file
            by_target: dict[str, list] = {default: []} if default else {}
            for chunk in s.chunks:
                by_target.setdefault(self.target_of(file, chunk), []).append(chunk)
            for target, chunks in by_target.items():
                if target is not None:
                    self.parts[target].append(Part(file, chunks, len(by_target) == 1))
        for target in self.parts:
            self._settle_names(target)

    # -- where things are ---------------------------------------------------------------------------------------
    def target_of(self, file: str, chunk: source.Chunk) -> str | None:
        for name in chunk.names:
            if (file, name) in self.plan.symbols:
                return self.plan.symbols[file, name]
        return self.plan.target.get(file, file)

    def default_module(self, file: str) -> str | None:
        target = self.plan.target.get(file, file)
        return dotted(target) if target else None

    def locate(self, module: str, name: str, *, chase: bool = True) -> tuple[str | None, str]:
        """The new module and name of `module.name`, both as they are before the move."""
        s = self.plan.by_module[module]
        if name in s.defined:
            target = self.target_of(s.path, s.defined[name])
            return (dotted(target) if target else None), self.new_name.get((s.path, name), name)
        targets = {self.target_of(s.path, c) for c in s.chunks}
        if not chase and len(targets) > 1:  # an imported name is replaced where it is used
            used = {
                self.target_of(s.path, c)
                for r in s.refs
                for c in s.chunks
                if r.name == name and r.owner is s.top and c.start <= r.start < c.end
            }
            if len(used) == 1:
                return dotted(used.pop()), name
        stays = s.is_package and self.plan.target.get(s.path)
        if chase and not (stays and stays.endswith("/__init__.py")):
            for alias in s.aliases:
                if alias.scope is s.top and alias.bound == name and alias.name and alias.module in self.plan.by_module:
                    if f"{alias.module}.{alias.name}" not in self.plan.by_module:
                        return self.locate(alias.module, alias.name)
        return self.default_module(s.path), name

    # -- names that collide -------------------------------------------------------------------------------------
    def _settle_names(self, target: str) -> None:
        parts = sorted(self.parts[target], key=lambda p: -p.size)
        taken: dict[str, tuple[str, str]] = {}
        for part in parts:
            s = self.plan.sources[part.file]
            for chunk in part.chunks:
                for name in dict.fromkeys(chunk.names):
                    if name == "__all__":
                        continue
                    new = self.plan.renames.get((part.file, name), name)
                    text = s.text[chunk.start : chunk.end].strip()
                    if new in taken and taken[new][0] != part.file:
                        if taken[new][1] == text and isinstance(chunk.node, (ast.Assign, ast.AnnAssign)):
                            self.same.add((part.file, name))
                            continue
                        new = prefixed(name, part.file)
                        self.notes.append(f"collision in {target}: {part.file}:{name} -> {new} (also in {taken[name][0]})")
                    taken[new] = (part.file, text)
                    if new != name:
                        self.new_name[part.file, name] = new
        for new in taken:
            self.bindings[target][new] = ("def", new)

    # -- imports ------------------------------------------------------------------------------------------------
    def rewrite(self, target: str) -> None:
        """Fills the imports and the edits of all parts of a target."""
        for want_renamed in (False, True):
            for part in sorted(self.parts[target], key=lambda p: -p.size):
                self._rewrite_part(part, target, want_renamed)

    def _in_part(self, part: Part, position: int) -> bool:
        return part.whole or any(c.start <= position < c.end for c in part.chunks)

    def _rewrite_part(self, part: Part, target: str, want_renamed: bool) -> None:
        s = self.plan.sources[part.file]
        merged = self.is_merged(target)
        if not want_renamed:
            self._rename_definitions(part, s, target)
            part.statements = collections.defaultdict(list)
        refs = collections.defaultdict(list)
        for ref in s.refs:
            if ref.owner is not None and self._in_part(part, ref.start):
                refs[ref.owner, ref.name].append(ref)
        for alias in s.aliases:
            uses = refs[alias.scope, alias.bound]
            at_top = alias.scope is s.top
            if not at_top and not self._in_part(part, s.span(alias.node)[0]):
                continue
            if at_top and not uses and (merged or not part.whole) and not self._kept_unused(part, s, alias):
                continue
            made = self._new_alias(part, target, s, alias, uses, want_renamed)
            if made is not None:
                part.statements[alias.node] += made
        if not want_renamed:
            return
        for node, items in part.statements.items():
            comment = self._comment(s, node)
            at_top = isinstance(s.parents[node], ast.Module)
            typing = isinstance(s.parents[node], ast.If) and node in [n for b in s.type_blocks for n in b.body]
            if merged and at_top:
                part.imports += [(*item, comment) for item in items]
            elif merged and typing:
                part.typing += [(*item, comment) for item in items]
            else:
                self._edit_statement(part, s, node, items, comment)

    def _strings(self, part: Part, s: source.Source, word: str) -> list[ast.Constant]:
        """Strings that may be annotations and have a word."""
        return [
            node
            for node in s.annotation_strings
            if re.fullmatch(r"[\w.\[\], |]+", node.value)
            and re.search(rf"(?<![\w.]){word}\b", node.value)
            and self._in_part(part, s.span(node)[0])
        ]

    def _kept_unused(self, part: Part, s: source.Source, alias: source.Alias) -> bool:
        if alias.module == "__future__" or self._strings(part, s, alias.bound):
            return True
        start, end = s.span(alias.node)
        return "noqa" in s.text[start : s.text.find("\n", end)]

    def is_merged(self, target: str) -> bool:
        parts = self.parts[target]
        return len(parts) > 1 or not parts[0].whole

    def _comment(self, s: source.Source, node: ast.stmt) -> str:
        start, end = s.span(node)
        text = s.text[start : s.text.find("\n", end)]
        found = [c for c in re.findall(r"#[^\n]*", text)]
        return "  " + found[0] if found else ""

    def _rename_definitions(self, part: Part, s: source.Source, target: str) -> None:
        new_module = dotted(target)
        for ref in s.refs:
            if ref.owner is not s.top or ref.name not in s.defined or not self._in_part(part, ref.start):
                continue
            module, new = self.locate(s.module, ref.name)
            if new != ref.name:
                self._check_shadow(part, ref, new)
                part.edits.append((ref.start, ref.end, new))
            if module != new_module:
                item = (module, new, None, "")
                if item not in part.imports:
                    part.imports.append(item)
                    self.bindings[target].setdefault(new, ("sym", module, new))
        for node in s.annotation_strings:
            for (file, old), new in self.new_name.items():
                if file == part.file and node.value == old and self._in_part(part, s.span(node)[0]):
                    start, end = s.span(node)
                    part.edits.append((start, end, s.text[start:end].replace(old, new)))

    def _check_shadow(self, part: Part, ref: source.Ref, new: str) -> None:
        if self._shadowed(ref, new):
            self.notes.append(f"BY HAND {part.file}: {ref.name} -> {new} is hidden by a local name")

    def _shadowed(self, ref: source.Ref, new: str) -> bool:
        scope = ref.scope
        while scope is not None and scope is not ref.owner:
            if new in scope.bound:
                return True
            scope = scope.parent
        return False

    def _new_alias(self, part, target, s, alias, uses, want_renamed) -> list[tuple] | None:
        """The imports in the place of one; the edits of its uses go to the part. None: it's the other pass's."""
        package = alias.module.partition(".")[0]
        at_top = alias.scope is s.top
        whole_name = f"{alias.module}.{alias.name}" if alias.name else alias.module
        if package not in FIRST_PARTY or not (alias.module in self.plan.by_module or whole_name in self.plan.by_module):
            if want_renamed:
                return None
            wanted = alias.bound
            meaning = ("ext", alias.module, alias.name)
            if alias.name is None and alias.asname is None:
                meaning = ("ext", wanted, None)  # `import a.b` and `import a.c` both bind a
            new = self._bind(part, target, wanted, meaning, uses, at_top)
            self._edit_uses(part, uses, wanted, new)
            asname = alias.asname if new == wanted else new
            return [(alias.module, alias.name, asname)]
        if whole_name in self.plan.by_module:
            if alias.name is None and alias.asname is None:
                return self._dotted_import(part, s, alias, uses) if want_renamed else None
            return self._module_alias(part, target, s, alias, whole_name, uses, want_renamed)
        if want_renamed:
            return None
        module, name = self.locate(alias.module, alias.name)
        if module is None:
            self.notes.append(f"BY HAND {part.file}: {alias.module}.{alias.name} is deleted")
            return [(alias.module, alias.name, alias.asname)]
        if module == dotted(target):
            if at_top and not alias.in_type_checking:
                part.needs.add(self._home(alias.module, alias.name))
            self._edit_uses(part, uses, alias.bound, name)
            for ref in uses:
                if self._shadowed(ref, name) and not (not at_top and ref.scope is alias.scope):
                    self.notes.append(f"BY HAND {part.file}: {name} is hidden by a local name")
            return []
        wanted = alias.asname or name
        new = self._bind(part, target, wanted, ("sym", module, name), uses, at_top)
        self._edit_uses(part, uses, alias.bound, new)
        return [(module, name, new if new != name else None)]

    def _home(self, module: str, name: str) -> str:
        """The file that defines a name, through what imports it on the way."""
        s = self.plan.by_module[module]
        if name not in s.defined:
            for alias in s.aliases:
                if alias.scope is s.top and alias.bound == name and alias.name and alias.module in self.plan.by_module:
                    return self._home(alias.module, alias.name)
        return s.path

    def _module_alias(self, part, target, s, alias, module, uses, want_renamed) -> list[tuple] | None:
        file = self.plan.by_module[module].path
        default = self.default_module(file)
        wanted_by = {}
        for ref in uses:
            wanted_by[ref] = self._used_of(s, ref, module, default)
        in_strings = []  # "module.Name" as an annotation
        for node in self._strings(part, s, rf"{alias.bound}\.\w+") if alias.scope is s.top else []:
            attribute = re.search(rf"(?<![\w.]){alias.bound}\.(\w+)", node.value)[1]
            in_strings.append((node, attribute, *self.locate(module, attribute)))
        found = [m for m, *_ in wanted_by.values()] + [where for *_, where, _ in in_strings]
        modules = list(dict.fromkeys(found)) or [default]
        renamed = modules != [default] or default == dotted(target) or default is None or (
            alias.asname is None and default.rpartition(".")[2] != alias.bound
        ) or f"{default}" != module and alias.asname is not None
        if renamed != want_renamed:
            return None
        items, names = [], {}
        for new_module in modules:
            if new_module is None:
                self.notes.append(f"BY HAND {part.file}: uses {module}, which is deleted")
                continue
            if new_module == dotted(target):
                if alias.scope is s.top and not alias.in_type_checking:
                    part.needs.add(file)
                continue
            parent, _, leaf = new_module.rpartition(".")
            wanted = leaf
            if alias.asname and new_module == default and leaf != alias.bound:
                wanted = alias.asname
            at_top = alias.scope is s.top
            mine = [r for r in uses if wanted_by[r][0] == new_module]
            names[new_module] = self._bind(part, target, wanted, ("mod", new_module), mine, at_top, alias)
            bound = names[new_module]
            items.append((parent, leaf, bound if bound != leaf else None))
        for node, attribute, where, name in in_strings:
            start, end = s.span(node)
            new = name if where == dotted(target) else f"{names[where]}.{name}"
            part.edits.append((start, end, s.text[start:end].replace(f"{alias.bound}.{attribute}", new)))
        for ref, (new_module, attribute, string, name) in wanted_by.items():
            if new_module is None:
                continue
            if new_module == dotted(target):
                if attribute is None:
                    self.notes.append(f"BY HAND {part.file}: its own module, as {ref.name}, is used whole")
                    continue
                start, end = s.span(attribute)
                new = "__name__" if name == "__name__" else name
                part.edits.append((start, end, new))
                if self._shadowed(ref, new):
                    self.notes.append(f"BY HAND {part.file}: {ref.name}.{name} -> {new}, hidden by a local name")
                continue
            if names[new_module] != ref.name:
                part.edits.append((ref.start, ref.end, names[new_module]))
            if attribute is not None and (name == "" or attribute.value is not ref.node):
                part.edits.append((ref.end, s.span(attribute)[1], f".{name}" if name else ""))
            elif attribute is not None and attribute.attr != name:
                end = s.span(attribute)[1]
                part.edits.append((end - len(attribute.attr), end, name))
            if string is not None and string.value != name:
                start, end = s.span(string)
                part.edits.append((start, end, f'"{name}"'))
        return items

    def _used_of(self, s, ref, module, default):
        """Of one use of a module: its new module, the attribute node, a string that names an attribute, the new name."""
        parent = s.parents.get(ref.node)
        if isinstance(parent, ast.Attribute) and parent.value is ref.node:
            if parent.attr.startswith("__"):
                return default, parent, None, parent.attr
            if f"{module}.{parent.attr}" in self.plan.by_module:
                self.notes.append(f"BY HAND {s.path}: {module}.{parent.attr} by attribute")
                return default, parent, None, parent.attr
            inner = next((a for a in self._module_aliases_of(module) if a.bound == parent.attr), None)
            outer = s.parents.get(parent)
            if inner is not None and (isinstance(outer, ast.Attribute) or isinstance(outer, ast.Call)):
                used = f"{inner.module}.{inner.name}"  # `math.notation.plain`: a module by way of another
                if isinstance(outer, ast.Attribute):
                    where, name = self.locate(used, outer.attr)
                    return where, outer, None, name
                return self.default_module(self.plan.by_module[used].path), parent, None, ""
            where, name = self.locate(module, parent.attr)
            return where, parent, None, name
        if isinstance(parent, ast.Call) and len(parent.args) > 1 and parent.args[0] is ref.node:
            second = parent.args[1]
            if isinstance(second, ast.Constant) and isinstance(second.value, str):
                where, name = self.locate(module, second.value, chase=False)
                return where, None, second, name
        return default, None, None, ref.name

    def _module_aliases_of(self, module: str) -> list[source.Alias]:
        s = self.plan.by_module[module]
        return [a for a in s.aliases if a.scope is s.top and a.name and f"{a.module}.{a.name}" in self.plan.by_module]

    def _dotted_import(self, part, s, alias, uses) -> list[tuple]:
        new = self.default_module(self.plan.by_module[alias.module].path)
        for ref in uses:
            node = ref.node
            while isinstance(s.parents.get(node), ast.Attribute):
                node = s.parents[node]
                start, end = s.span(node)
                if s.text[start:end] == alias.module:
                    part.edits.append((start, end, new))
                    break
        return [(new, None, None)]

    def _bind(self, part, target, wanted, meaning, uses, at_top, alias=None) -> str:
        """A name for an import that nothing else of the module or of the functions that use it has."""
        own = None if alias is None else alias.bound
        options = [wanted]
        if meaning[0] == "mod":
            path = meaning[1].split(".")
            options += ["_".join(path[-2:]), "_".join(path[-3:]), f"{wanted}_module"]
        else:
            options += [f"{wanted}_of_{stem(part.file)}"]
        for name in options:
            if at_top:
                if self.bindings[target].get(name, meaning) != meaning:
                    continue
            elif name != own and uses and any(name in r.owner.bound for r in uses) and meaning[0] == "mod":
                continue
            if any(self._shadowed(r, name) for r in uses) and name != (own or wanted):
                continue
            if any(self._shadowed(r, name) for r in uses) and meaning[0] == "mod" and name != own:
                continue
            if name != wanted:
                self.notes.append(f"import in {target}: {meaning[1:]} as {name}")
            if at_top:
                self.bindings[target][name] = meaning
            return name
        self.notes.append(f"BY HAND {target}: no free name for the import {meaning} (from {part.file})")
        return wanted

    def _edit_uses(self, part, uses, old, new) -> None:
        if new != old:
            part.edits += [(r.start, r.end, new) for r in uses]

    def _edit_statement(self, part, s, node, items, comment) -> None:
        before = [(a.module, a.name, a.asname) for a in s.aliases if a.node is node]
        if items == before:
            return
        start, end = s.span(node)
        indent = " " * node.col_offset
        if not items:
            parent = s.parents[node]
            body = next(b for f in ("body", "orelse", "finalbody") if node in (b := getattr(parent, f, [])))
            if len(body) > 1 or isinstance(parent, ast.Module):
                line_end = s.text.find("\n", end) + 1
                part.edits.append((s.line_start(node.lineno), line_end, ""))
            else:
                part.edits.append((start, end, "pass"))
            return
        part.edits.append((start, end, f"\n{indent}".join(statements(items))))

    # -- the new text -------------------------------------------------------------------------------------------
    def text(self, target: str) -> str:
        parts = self.parts[target]
        if not self.is_merged(target):
            return source.apply_edits(self.plan.sources[parts[0].file].text, parts[0].edits)
        order = self._ordered(target)
        imports, typing = [], []
        for part in order:
            imports += [i for i in part.imports if i not in imports]
        plain = {i[:3] for i in imports}
        for part in order:
            typing += [i for i in part.typing if i not in typing and i[:3] not in plain]
        if typing and ("typing", "TYPE_CHECKING", None) not in plain:
            imports.append(("typing", "TYPE_CHECKING", None, ""))
        bodies, mains = [], []
        for part in order:
            s = self.plan.sources[part.file]
            last = None
            for chunk in part.chunks:
                if chunk.names == ["__all__"] or any((part.file, n) in self.same for n in chunk.names):
                    continue
                text = source.apply_edits(s.text, part.edits, chunk.start, chunk.end).rstrip() + "\n"
                if target.startswith("configs/presets/") and "get_config" in chunk.names:
                    text = self._documented(text, ast.get_docstring(s.tree) or "")
                if self._is_main(chunk.node):
                    mains.append(text)
                    continue
                if part.file.endswith("__main__.py") and isinstance(chunk.node, ast.Expr) and not target.endswith("__main__.py"):
                    mains.append('if __name__ == "__main__":\n' + "".join("    " + l for l in text.splitlines(True)))
                    continue
                near = last is not None and not s.text[last : chunk.start].strip("\n") and s.text[last : chunk.start].count("\n") < 1
                bodies.append(text if near else "\n\n" + text)
                last = chunk.end
        if len(mains) > 1:
            self.notes.append(f"BY HAND {target}: {len(mains)} main blocks")
        lines = [f'"""{self._docstring(target, order)}"""', ""]
        lines += statements_with_comments(imports)
        if typing:
            lines += ["", "if TYPE_CHECKING:", *("    " + t for t in statements_with_comments(typing))]
        return "\n".join(lines) + "\n" + "".join(bodies) + "".join("\n\n" + m for m in mains)

    def _documented(self, function: str, docstring: str) -> str:
        """A preset's function with what its module said of it."""
        node = ast.parse(function).body[0].body[0]
        lines = function.splitlines(keepends=True)
        made = "\n".join(f"    {line}" if line else "" for line in f'"""{docstring}'.split("\n"))
        end = '\n    """\n' if "\n" in docstring else '"""\n'
        return "".join(lines[: node.lineno - 1]) + made + end + "".join(lines[node.end_lineno :])

    def _is_main(self, node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")

    def _ordered(self, target: str) -> list[Part]:
        """Parts in an order in which what a part imports from another stands before it."""
        parts = self.parts[target]
        waiting, done = list(parts), []
        while waiting:
            have = {p.file for p in done}
            of_target = {p.file for p in parts}
            free = [p for p in waiting if not ((p.needs & of_target) - have - {p.file})]
            if not free:
                self.notes.append(f"BY HAND {target}: {[p.file for p in waiting]} need each other at module level")
                free = waiting[:1]
            done.append(free[0])
            waiting.remove(free[0])
        return done

    def _docstring(self, target: str, order: list[Part]) -> str:
        kept = [self.plan.sources[p.file] for p in order if p.size or p.whole]
        shown = next((s for s in kept if self._docs_are_shown(s)), None)
        purpose = self.plan.purposes.get(target)
        alone = [s for s in kept if s.path == target or len(kept) == 1]
        raw = lambda s: ast.get_docstring(s.tree, clean=True) or ""  # noqa: E731
        if shown is not None:
            first, *paragraphs = raw(shown).split("\n\n")
        elif purpose:
            first, paragraphs = purpose, []
        else:
            self.notes.append(f"no purpose for {target}")
            first, *paragraphs = raw((alone or sorted(kept, key=lambda s: -len(s.text)))[0]).split("\n\n")
        for s in kept if not target.startswith("configs/presets/") else []:
            more = raw(s).split("\n\n")[1:]
            paragraphs += [p for p in more if p not in paragraphs]
        made = "\n\n".join([first, *paragraphs])
        made = made.replace("\\", "\\\\") if "\\" in made else made
        return made + ("\n" if paragraphs else "")

    def _docs_are_shown(self, s: source.Source) -> bool:
        """Whether a program shows the docstring under --help."""
        return any("main" == n for n in s.defined) and "absl" in s.text and s.path.startswith("launch/")


def statements(items: list[tuple]) -> list[str]:
    return [_statement(*item[:3]) for item in dict.fromkeys(items)]


def statements_with_comments(items: list[tuple]) -> list[str]:
    made: dict[str, str] = {}
    for item in sorted(items, key=lambda i: (i[0] != "__future__", i[0], i[1] or "")):
        line = _statement(*item[:3])
        made[line] = made.get(line) or (item[3] if re.search("noqa|pyright", item[3]) else "")
    return [line + comment for line, comment in made.items()]


def _statement(module: str, name: str | None, asname: str | None) -> str:
    end = f" as {asname}" if asname else ""
    return f"from {module} import {name}{end}" if name else f"import {module}{end}"
