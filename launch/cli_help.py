"""Renderer of a command's `--help` on 80 columns: description, flags, presets, recipes and config fields."""

import ast
import importlib
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from absl import flags

if TYPE_CHECKING:
    from configs.field_docs import FieldDoc

WIDTH = 80
_INDENT, _GAP = 2, 26
_PROJECT = pathlib.Path(__file__).resolve().parent.parent
_CONFIGS = _PROJECT / "configs"

COMMON = (
    "run.name",
    "run.dir",
    "run.num_updates",
    "run.seed",
    "run.trackers",
    "model.path",
    "prompts.path",
    "prompts.verifier",
    "sampling.max_response_tokens",
    "rounds.groups_per_round",
    "rounds.samples_per_group",
    "rounds.groups_per_update",
    "admission.policy",
    "publish.when",
    "loss.name",
    "loss.advantage",
    "optimizer.learning_rate",
    "packing.rows",
    "packing.row_tokens",
    "mesh.devices",
    "mesh.fsdp",
    "actor.num_engines",
    "actor.devices",
    "actor.tensor_parallel_size",
    "actor.max_num_seqs",
    "evaluation.every_n_steps",
    "checkpoint.every_n_steps",
)
"""Config fields that most runs set."""


_ADDED = re.compile(r"^<[^>]*>: |;\s*repeat this option to specify a list of values$")
"""Text that absl adds to the help of flags with choices or several values."""
_SEVERAL = re.compile(r"several times|once for each")


def render(module: str, shared: Iterable[str] = (), *, is_full: bool = False) -> str:
    """Returns the help text of a command.

    Args:
      module: name of the module whose docstring and flags are shown.
      shared: names of shared flags to show; `config` also adds presets, recipes and fields.
      is_full: True to show every config field instead of only the common ones.
    """
    shared = list(shared)
    # absl files the flags of __main__ under the program's name.
    defined_by = sys.argv[0] if module == "__main__" else module
    own = [flag.name for flag in flags.FLAGS.get_flags_for_module(defined_by)]
    parts = [_prose(_docstring(module)), _titled("Flags", map(_flag, dict.fromkeys([*shared, *own])))]
    if "config" in shared:
        parts += _of_configs(is_full)
    return "\n\n".join(filter(None, parts)) + "\n"


def _docstring(module: str) -> str:
    """Returns a module's docstring from its source, because PYTHONOPTIMIZE=2 drops docstrings."""
    return ast.get_docstring(ast.parse(inspect.getsource(sys.modules[module]))) or ""


def _of_configs(is_full: bool) -> list[str]:
    from configs.field_docs import field_docs  # deferred: not needed by commands without a config

    docs = field_docs()
    shown = list(docs) if is_full else [path for path in COMMON if path in docs]
    fields = (_field(docs[path], is_full) for path in shown)
    title = "Fields" if is_full else "Common fields"
    more = "" if is_full else "; --helpfull shows all"
    return [
        _titled("Presets: --config=NAME, or NAME:tiny where it has sizes", _preset_entries()),
        _titled("Recipes: --config=NAME", _configs(_CONFIGS / "recipes")),
        _titled(f"{title}, set by --config.FIELD=VALUE{more}", fields),
    ]


def _preset_entries() -> Iterator[str]:
    presets = importlib.import_module("configs.presets").NAMES
    for name in sorted(presets):
        source = ast.parse(textwrap.dedent(inspect.getsource(presets[name])))  # from the source, as in `_docstring`
        docs = [ast.get_docstring(n) for n in source.body if isinstance(n, ast.FunctionDef)]
        yield _entry(name, _first_sentence(docs[0] or ""))


def _configs(folder: pathlib.Path) -> Iterator[str]:
    """Yields one entry per config file of a folder with the first sentence of its docstring."""
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body):
            yield _entry(file.stem, _first_sentence(ast.get_docstring(tree) or ""))


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)\]])\. (?=[A-Z])", paragraph)[0].rstrip(".")


def _field(doc: "FieldDoc", is_full: bool) -> str:
    """Returns the entry of a config field: default and meaning, shortened to one sentence unless `is_full`."""
    text = doc.meaning.rstrip(".") if is_full else _first_sentence(doc.meaning)
    is_choice = "|" in doc.kind and " | " not in doc.kind
    if is_choice and not all(choice in text for choice in doc.kind.split("|")):
        text += f" ({doc.kind.replace('|', ', ')})"
    is_shown = doc.default is not None and doc.default != ""
    value = str(doc.default).lower() if isinstance(doc.default, bool) else str(doc.default)
    return _entry(f"{doc.path}={value}" if is_shown else doc.path, text or doc.kind)


def _flag(name: str) -> str:
    flag: Any = flags.FLAGS[name]
    kind = flag.flag_type()
    choices = "|".join(getattr(flag.parser, "enum_values", None) or [])
    value = "" if kind == "bool" else f"={choices or 'VALUE'}"
    text = _ADDED.sub("", (flag.help or "").strip())
    if kind.startswith("multi") and not _SEVERAL.search(text):
        text += " May be given several times."
    if flag.default not in (None, "", [], False) and "default" not in text:
        text += f" Default: {flag.default}."
    return _entry(f"--{name}{value}", text)


def _titled(title: str, entries: Iterable[str]) -> str:
    lines = list(entries)
    return "\n".join([f"{title}:", *lines]) if lines else ""


def _entry(head: str, text: str) -> str:
    """Formats a name with its text in the second column, or below a long name."""
    body = _wrapped(text, " " * _GAP)
    head = " " * _INDENT + head
    if len(head) > _GAP - 2:
        return "\n".join([*_wrapped(head.strip(), " " * _INDENT), *body])
    first, *rest = body or [""]
    return "\n".join([f"{head:<{_GAP}}{first.strip()}".rstrip(), *rest])


def _prose(text: str) -> str:
    """Reflows a docstring's paragraphs; each indented line is a command line and keeps its own line."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith(" "):
            blocks.append("\n".join(one for line in lines for one in _wrapped(line.strip(), "    ", hang="        ")))
        else:
            blocks.append("\n".join(_wrapped(block, "")))
    return "\n\n".join(blocks)


def _wrapped(text: str, indent: str, hang: str | None = None) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if hang is None else hang,
        break_long_words=len(max(text.split(), key=len, default="")) > WIDTH - len(indent),
        break_on_hyphens=False,
    )
