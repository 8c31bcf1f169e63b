"""Pages as a test reads them: their blocks of code, and the commands in them."""

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Iterator

REPO = pathlib.Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)(?::.*)?\n")
_TYPED = re.compile(r"^ {4,}((?:\w+=\S+ )*(?:\.venv/bin/python|bash) .*)", re.MULTILINE)
_COMMAND = re.compile(r"(?:[\w./]*python|sluice)(?:\d[\d.]*)?")


@dataclasses.dataclass(frozen=True)
class Command:
    """`python -m module arguments...` of a page."""

    module: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.module, *self.arguments])


def fenced(page: pathlib.Path, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return [body for _, name, body in _FENCED.findall(page.read_text()) if name == language]


def files(page: pathlib.Path) -> dict[str, str]:
    """The blocks of Python that begin with a comment that names their file."""
    return {m[1]: body[m.end() :] for body in fenced(page, "python") if (m := _FILE.match(body))}


def typed(page: pathlib.Path) -> list[str]:
    """The lines of a page that a reader types into a shell, one for each command."""
    return [line.strip() for line in _TYPED.findall(re.sub(r"[ ]*\\\n\s*", " ", _FENCED.sub("", page.read_text())))]


def commands(text: str) -> Iterator[Command]:
    """The commands in a page's code: indented, fenced, or between backticks."""
    text = re.sub(r"[ ]*\\\n\s*", " ", text)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [
        line.strip()
        for _, name, body in _FENCED.findall(text)
        if name in ("", "bash", "sh")
        for line in body.splitlines()
    ]
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        yield from _commands(line)


def _commands(line: str) -> Iterator[Command]:
    for part in re.split(r"&&|;(?= )|\|(?= )", line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # a quotation that the split above cut
            continue
        for i, word in enumerate(words[:-2]):
            if _COMMAND.fullmatch(word) and words[i + 1] == "-m":
                yield Command(words[i + 2], tuple(w for w in words[i + 3 :] if w not in ("&", "...", "[...]")))
