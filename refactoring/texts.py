"""Rewrites dotted names and paths of modules where they stand as text: docs, comments, strings, configuration."""

import io
import os
import pathlib
import re
import tokenize

import merge
import patches
from moves import DATA, Plan

TOP = "actor|bridge|configs|launch|learner|tests"
DOTTED = re.compile(rf"(?<![\w./-])({TOP})((?:\.\w+)+)")
PIECES = re.compile(rf'/ "(?:{TOP})"(?: / "[\w.-]+")+')
FROM = re.compile(rf"(?:\b|(?<=\\n))from (({TOP})(?:\.\w+)*) import (\w+)(?![\w,. ])")
PATH = re.compile(rf"(?<![\w-])({TOP})((?:/[\w-]+)+/?)(\.[a-z]+)?(?:(?<=\.py):([A-Za-z_]\w*))?")
NEAR = re.compile(r"(?<![\w/.-])((?:\.\./)*(?:\w+/)*\w+\.py)\b(?!/)")
FIELDS = {"learner.checkpoint", "actor.engine"}


class Texts:
    def __init__(self, plan: Plan, merger: merge.Merger):
        self.plan, self.merger, self.notes = plan, merger, []
        self.presets = {
            f: f.removesuffix(".py").rpartition("/")[2]
            for f, s in plan.sources.items()
            if f.startswith("configs/") and "get_config" in s.defined
        }
        self.mains = {f.removesuffix("/__main__.py").replace("/", "."): f for f in plan.sources if f.endswith("/__main__.py")}

    # -- one name -----------------------------------------------------------------------------------------------
    def _dotted(self, found: re.Match) -> str:
        old = found.group()
        words = old.split(".")
        if words[-1] == "py":
            return old
        for n in range(len(words), 1, -1):
            module, rest = ".".join(words[:n]), words[n:]
            s = self.plan.by_module.get(module)
            if s is None:
                continue
            if rest and rest[0] in s.defined:
                new, name = self.merger.locate(module, rest[0])
                return ".".join([new, name, *rest[1:]]) if new else old
            if rest and s.is_package:
                return old
            if s.is_package:
                if module in self.mains:
                    target = self.plan.target[self.mains[module]]
                    return target.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
                room = self.plan.rooms.get(module.replace(".", "/"))
                return room.replace("/", ".") if room else old
            if rest and self._imported(s, rest[0]):
                new = self.merger.default_module(s.path)
                return ".".join([new, *rest]) if new else old
            if rest:
                return old
            new = self.merger.default_module(s.path)
            return new or old
        return old

    def _from(self, found: re.Match) -> str:
        module, name = found.group(1), found.group(3)
        if (s := self.plan.by_module.get(f"{module}.{name}")) is not None and not s.is_package:
            new = self.merger.default_module(s.path)
            if new and hasattr(self, "leaves"):
                self.leaves[name] = s.module  # code in a text: its uses of the module are renamed too
            return f"from {new.rpartition('.')[0]} import {new.rpartition('.')[2]}" if new else found.group()
        if module in self.plan.by_module and name in self.plan.by_module[module].defined:
            new, name = self.merger.locate(module, name)
            return f"from {new} import {name}" if new else found.group()
        return found.group()

    def _imported(self, s, name: str) -> bool:
        return any(a.scope is s.top and a.bound == name for a in s.aliases)

    def _path(self, found: re.Match, keep_presets: bool) -> str:
        old = found.group()
        end = found.group(3) or ""
        path = found.group(1) + found.group(2)
        if end:
            file = path + end
            symbol = f":{found.group(4)}" if found.group(4) else ""
            if symbol and file in self.plan.sources and found.group(4) in self.plan.sources[file].defined:
                if not (keep_presets and file in self.presets and found.group(4) != "get_config"):
                    s = self.plan.sources[file]
                    new, name = self.merger.locate(s.module, found.group(4))
                    target = self.merger.target_of(file, s.defined[found.group(4)])
                    return f"{target}:{name}" if target else old
            if keep_presets and file in self.presets and not file.startswith("configs/recipes"):
                return old
            if target := self.plan.target.get(file):
                return target + symbol
            if file in self.plan.moved_data:
                return self.plan.moved_data[file] + symbol
            parent, _, name = file.rpartition("/")
            if end == ".py" and (parent in self.plan.rooms) and file not in self.plan.sources:  # NAME.py, of any name
                return f"{self.plan.rooms.get(parent, parent)}/{name}{symbol}"
            return old
        slash = "/" if path.endswith("/") else ""
        folder = path.rstrip("/")
        if folder in self.plan.rooms:
            return self.plan.rooms[folder] + slash
        for data, new in DATA.items():
            if data.rstrip("/") == folder:
                return new.rstrip("/") + slash
        if folder.startswith("tests/") and (room := self.plan.rooms.get(folder.removeprefix("tests/"))):
            if not pathlib.Path(folder + ".py").exists():
                return f"tests/{room}{slash}"
        if f"{folder}.py" in self.plan.target and folder.startswith("tests/"):
            return (self.plan.target[f"{folder}.py"] or old).removesuffix(".py") + slash
        return old

    def text(self, text: str, old_file: str, new_file: str) -> str:
        """The text of old_file, which is new_file now, with all names of before replaced."""
        text = FROM.sub(self._from, text)
        text = DOTTED.sub(self._dotted, text)
        linked = re.compile(r"(\]\([^)\s]*)")
        parts = linked.split(text)
        parts = [PATH.sub(lambda m, i=i: self._path(m, keep_presets=i % 2 == 0), p) for i, p in enumerate(parts)]
        text = "".join(parts)
        folder = os.path.dirname(old_file)
        return NEAR.sub(lambda m: self._near(m.group(), folder, os.path.dirname(new_file)), text)

    def _near(self, name: str, old_folder: str, new_folder: str) -> str:
        old = os.path.normpath(os.path.join(old_folder, name))
        if name.startswith(tuple(f"{t}/" for t in TOP.split("|"))) or (
            old in self.presets and not old_folder == new_folder == "configs"
        ):
            return name
        target = self.plan.target.get(old)
        if not target or old == target or old.partition("/")[0] not in TOP.split("|"):
            return name
        near = os.path.relpath(target, new_folder)
        return target if near.startswith("../..") and not name.startswith("..") else near

    def _uses(self, text: str) -> str:
        """Code in a text with what it takes from the modules that it imports."""
        for old, module in self.leaves.items():
            text = re.sub(rf"(?<![\w./]){old}\.(\w+)", lambda m, o=old, mod=module: self._use(m, o, mod), text)
        return text

    def _use(self, found: re.Match, old: str, module: str) -> str:
        if found.group(1) not in self.plan.by_module[module].defined:
            return found.group()
        new, name = self.merger.locate(module, found.group(1))
        return f"{new.rpartition('.')[2]}.{name}" if new else found.group()

    def _pieces(self, found: re.Match) -> str:
        """`/ "launch" / "deploy"`: a path in pieces."""
        old = "/".join(re.findall(r'"([^"]+)"', found.group()))
        new = PATH.sub(lambda m: self._path(m, keep_presets=True), old)
        return found.group() if new == old else f'/ "{new}"' + (" " if found.group().endswith(" ") else "")

    # -- files --------------------------------------------------------------------------------------------------
    def python(self, text: str, old_file: str, new_file: str) -> str:
        """Only strings and comments are text in a Python file."""
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
        made, at = [], 0
        self.leaves = {}
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except (tokenize.TokenError, SyntaxError, IndentationError) as e:
            self.notes.append(f"BY HAND {new_file}: does not tokenize: {e}")
            return text
        for token in tokens:
            if token.type in kinds:
                start = starts[token.start[0] - 1] + token.start[1]
                end = starts[token.end[0] - 1] + token.end[1]
                piece = self.text(text[start:end], old_file, new_file)
                if token.type == tokenize.STRING:
                    piece = self._uses(piece)
                made += [text[at:start], piece]
                at = end
        text = PIECES.sub(self._pieces, "".join(made) + text[at:])
        more = new_file.count("/") - old_file.count("/")
        if more and "__file__" in text:
            text = re.sub(
                r"(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)\]", lambda m: f"{m[1]}{int(m[2]) + more}]", text
            )
        return wrapped(patches.on(new_file, text))

    def other(self, file: str) -> str | None:
        try:
            text = pathlib.Path(file).read_text()
        except UnicodeDecodeError:
            return None
        self.leaves = {}
        new = self._uses(self.text(text, file, self.plan.moved_data.get(file, file)))
        if file.endswith(".md"):
            new = wrapped(new, is_markdown=True) if new != text else new
        return new if new != text else None


def wrapped(text: str, width: int = 120, *, is_markdown: bool = False) -> str:
    """Breaks lines of prose that longer names made too long; the rest of a line goes to the next one."""
    lines = text.split("\n")
    i, in_string, in_code = 0, False, False
    while i < len(lines):
        line = lines[i]
        if is_markdown and line.lstrip().startswith("```"):
            in_code = not in_code
        quotes = line.count('"""')
        prose = (in_string or quotes == 1 or line.lstrip().startswith("#")) if not is_markdown else not (
            in_code or line.lstrip().startswith(("|", "#", "<")) or "](" in line[:4]
        )
        if quotes % 2:
            in_string = not in_string
        if prose and len(line) > width and " " in line.strip() and not re.match(r"\s*\S*python -m", line):
            indent = line[: len(line) - len(line.lstrip())]
            mark = indent + ("# " if not is_markdown and line.lstrip().startswith("# ") else "")
            if line.lstrip().startswith(("* ", "- ")):
                mark = indent + "  "
            at = line.rfind(" ", 0, width + 1)
            if at <= len(mark) + 20:
                i += 1
                continue
            rest = line[at + 1 :]
            lines[i] = line[:at]
            following = lines[i + 1] if i + 1 < len(lines) else ""
            joins = (
                following.startswith(mark)
                and not re.match(r"\s*(\S*python|sluice|launch/)\b", following)
                and following[len(mark) : len(mark) + 1].strip()
                and not following.lstrip().startswith(("* ", "- ", "|", '"""', "```", "# ", "1."))
                or (mark.endswith("# ") and following.startswith(mark))
            )
            if joins and '"""' not in rest:
                lines[i + 1] = mark + rest + " " + following[len(mark) :]
            else:
                lines.insert(i + 1, mark + rest)
                if quotes == 1 and in_string is False:
                    pass
        i += 1
    return "\n".join(lines)
