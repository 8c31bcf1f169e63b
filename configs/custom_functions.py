"""Custom functions that a config names as `module:function`.

Only `load` imports a module, so each module is imported only in the process that calls its function. The learner
therefore needs no torch, and verifier processes need no jax. The search order is our own packages, the working
directory of the command, PYTHONPATH, and installed packages.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Generator
from typing import Any

from configs import suggestions

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PROJECT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """Expected arguments and result of a custom function."""

    takes: tuple[str, ...]
    """Names of positional arguments, for error messages."""
    constants: tuple[str, ...] = ()
    """Names of keyword arguments, passed if the function accepts them."""
    returns: str
    may_be_class: bool = False
    """True if a class is accepted, which is called to create an instance."""

    def __str__(self) -> str:
        """Returns the signature as Python source."""
        constants = f", *, any of {', '.join(self.constants)}" if self.constants else ""
        return f"({', '.join(self.takes)}{constants}) -> {self.returns}"


def is_custom(name: str) -> bool:
    """Returns True if the name is `module:function` instead of a built-in name."""
    return ":" in name


def check_name(field: str, name: str, ours: Collection[str]) -> None:
    """Raises ValueError if a name is neither built-in nor `module:function`. Imports nothing.

    The error names `field` and the nearest name in `ours`, the built-in names.
    """
    if name in ours or _OWN.fullmatch(name):
        return
    hint = suggestions.hint(name, ours)
    raise ValueError(f"{field}: expected one of {', '.join(ours)}, or module:function, got {name!r}{hint}")


def load(field: str, name: str, wanted: Signature) -> Callable[..., Any]:
    """Imports the module and returns its function.

    Raises ValueError if the import fails, the function is missing, or it cannot be called as `wanted`.
    """
    module_name, _, function_name = name.partition(":")
    here = os.getcwd()
    if "" not in sys.path:  # plain `python -m` adds it already
        _append_path(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # an import can raise anything
        where = f" (looked in {here}, on PYTHONPATH and among the installed packages)"
        is_missing = isinstance(e, ModuleNotFoundError) and f"{module_name}.".startswith(f"{e.name}.")
        raise ValueError(
            f"{field}={name}: cannot import module {module_name}: {first_line(e)}{where if is_missing else ''}"
        ) from e
    function = getattr(module, function_name, None)
    if function is None:
        hint = suggestions.hint(function_name, dir(module), cutoff=0.6)
        raise ValueError(f"{field}={name}: {module.__file__} has no {function_name!r}{hint}")
    if not callable(function):
        raise ValueError(f"{field}={name}: expected a function {wanted}, got {type(function).__name__}")
    if kind := _unfit_kind(function, wanted):
        raise ValueError(f"{field}={name}: expected a plain function {wanted}, got {kind}")
    _check_fits(field, name, function, wanted)
    return function


@contextlib.contextmanager
def importable(folder: pathlib.Path) -> Generator[None]:
    """Makes the modules of a folder importable inside the context, after our own packages."""
    paths, modules = list(sys.path), set(sys.modules)
    _append_path(str(folder))
    try:
        yield
    finally:
        sys.path[:] = paths
        # Without this, a later import from another folder would return this folder's module of the same name.
        for name in set(sys.modules) - modules:
            file = pathlib.Path(getattr(sys.modules[name], "__file__", None) or "/")
            if file.is_relative_to(folder) and not file.is_relative_to(_PROJECT):
                del sys.modules[name]


def _append_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(sys.path.index(str(_PROJECT)) + 1 if str(_PROJECT) in sys.path else len(sys.path), folder)


def constant_defaults(function: Callable[..., Any], wanted: Signature) -> dict[str, Any]:
    """Returns the accepted constants with their defaults (`inspect.Parameter.empty` without one).

    Parameters that receive positional arguments are excluded, regardless of their names.
    """
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    handed_over = positional[: len(wanted.takes)]
    return {
        n: p.default
        for n, p in parameters.items()
        if n in wanted.constants and p.kind in by_name and n not in handed_over
    }


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def python_path() -> str:
    """Returns PYTHONPATH for a child process: our packages first, then this process's own PYTHONPATH.

    Start the child in this process's directory with `python -P -m`. Without -P, a folder `configs` in that directory
    shadows our package.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(_PROJECT), *filter(None, given)]))


def _unfit_kind(function: Callable[..., Any], wanted: Signature) -> str:
    """Returns the kind of a callable that cannot return a result directly; empty if it is usable."""
    if inspect.isclass(function):
        return "" if wanted.may_be_class else "a class (its call makes an instance)"
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    for called in (inner, type(inner).__call__):
        if inspect.iscoroutinefunction(called):
            return "an async function"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "a generator (it has yield)"
    return ""


def _check_fits(field: str, name: str, function: Callable[..., Any], wanted: Signature) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{field}={name}: expected a function {wanted}, got one without a readable signature: {e}"
        ) from e
    try:
        signature.bind(*wanted.takes, **dict.fromkeys(constant_defaults(function, wanted)))
    except TypeError as e:
        raise ValueError(f"{field}={name}: expected a function {wanted}, got {signature}: {e}") from e
