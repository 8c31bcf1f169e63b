"""Number of config fields, and their use in tests and presets."""

import ast
import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from configs.field_docs import field_docs
from configs.schema import Config

ROOT = pathlib.Path(__file__).parents[2]
MAX_FIELDS = 248
_PATH = re.compile(r"\b(?=([a-z]+)(?:\.|__)([a-z0-9_]+)\b)")
"""A section and a name. The lookahead finds both paths of `config.mesh.fsdp`."""


def sections(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the class and the path of each section, nested ones included."""
    for field in dataclasses.fields(node):
        if dataclasses.is_dataclass(value := getattr(node, field.name)):
            yield type(value).__name__, prefix + field.name
            yield from sections(value, f"{prefix}{field.name}.")


_SECTIONS = dict(sections(Config(preset="")))


def test_config_has_at_most_so_many_fields():
    """A knob on a safety margin of ours is a constant beside its user, not a field."""
    assert len(field_docs()) <= MAX_FIELDS


def test_every_field_is_set_or_read_by_a_test_or_a_preset():
    used = set[str]().union(*(fields_in(file.read_text()) for file in files()))
    assert sorted(set(field_docs()) - {"preset"} - used) == []


def test_fields_are_found_as_calls_of_their_section_as_paths_and_by_unique_names():
    text = """
LoraConfig(rank=8)
ModelConfig(**{"remat": "full"})
job("--config.mesh.fsdp=2", run__seed=1, k=2, name="n")
x = config.loss.clip_high
"""
    assert fields_in(text) == {"lora.rank", "model.remat", "mesh.fsdp", "run.seed", "loss.clip_high", "evaluation.k"}


def files() -> Iterator[pathlib.Path]:
    """Yields the tests other than this one, and the presets and recipes."""
    for folder in ("tests", "configs/presets", "configs/recipes"):
        for file in (ROOT / folder).rglob("*.py"):
            if file != pathlib.Path(__file__):
                yield file


@functools.cache
def unique_names() -> dict[str, str]:
    """Returns the paths of the fields whose names no other section has, by name."""
    counts = collections.Counter(path.rpartition(".")[2] for path in field_docs())
    return {name: path for path in field_docs() if counts[name := path.rpartition(".")[2]] == 1}


def fields_in(text: str) -> set[str]:
    """Returns the fields that a Python file names: as `section.field`, `section__field`, or in a call or a dict."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(string)):
                found |= {f"{section}.{name}" for section, name in _PATH.findall(string)}
            case ast.Attribute(value=ast.Attribute(attr=section) | ast.Name(id=section), attr=name):
                found.add(f"{section}.{name}")
            case ast.Call():
                names = [keyword.arg or "" for keyword in node.keywords]
                section = _SECTIONS.get(getattr(node.func, "attr", getattr(node.func, "id", "")))
                found |= {f"{section}.{name}" for name in names}
                found |= {".".join(m.groups()) for name in names if (m := _PATH.match(name))}
                found |= {unique_names().get(name, "") for name in names}
            case ast.Dict(keys=keys):
                found |= {unique_names().get(str(key.value), "") for key in keys if isinstance(key, ast.Constant)}
            case _:
                pass
    return found & set(field_docs())
