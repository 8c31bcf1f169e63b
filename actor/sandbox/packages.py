"""Installed packages that programs may import: their files and module names."""

import functools
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Iterator

FOLDER = "/packages"
"""Directory inside a sandbox, on the programs' PYTHONPATH."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_IMPORTED = ("test", "tests", "docs", "examples", "benchmarks")


@functools.cache
def files_of(names: tuple[str, ...]) -> dict[str, str]:
    """Returns files and directories of packages and their dependencies, by their name in `FOLDER`.

    Raises ValueError if a package is not installed, or replaces a standard library module.
    """
    found: dict[str, str] = {}
    for one in _with_required(names):
        found |= {path.name: str(path.resolve()) for path in _top_level(one)}
    if hiding := sorted({name.partition(".")[0] for name in found} & sys.stdlib_module_names):
        raise ValueError(f"rewards.packages would replace the standard library's {', '.join(hiding)} in the sandbox")
    return found


def modules_of(names: tuple[str, ...]) -> list[str]:
    """Returns the module names of the packages, without their dependencies."""
    stems = {
        path.name.partition(".")[0]
        for name in names
        for path in _top_level(_installed(name))
        if ((path / "__init__.py").is_file() if path.is_dir() else path.suffix in (".py", ".so"))
    }
    return sorted(stem for stem in stems if stem.isidentifier() and stem[0] != "_" and stem not in _NOT_IMPORTED)


def _with_required(names: tuple[str, ...]) -> Iterator[importlib.metadata.Distribution]:
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if (key := re.sub(r"[-_.]+", "-", name).lower()) in seen:
            continue
        seen.add(key)
        try:
            one = _installed(name)
        except ValueError:
            if name in names:
                raise
            continue  # for another system or Python: needed ones were installed with the package
        yield one
        needed = [line for line in one.requires or () if "extra" not in line.partition(";")[2]]
        waiting += [match[0] for line in needed if (match := _REQUIREMENT.match(line))]


def _installed(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as e:
        raise ValueError(f"rewards.packages: {name!r} is not installed in {sys.prefix}; install or remove it") from e


def _top_level(one: importlib.metadata.Distribution) -> list[pathlib.Path]:
    """Returns the entries of a package in its site directory: packages, modules, library directories."""
    first = {file.parts[0] for file in one.files or () if not file.is_absolute()}
    names = sorted(n for n in first if n not in ("..", "__pycache__") and not n.endswith((".dist-info", ".pth")))
    return [path for name in names if (path := pathlib.Path(str(one.locate_file(name)))).exists()]
