"""Functions of the user's own, which a configuration names as `module:function`.

Nothing is imported before `load`, so that each module is imported only in the process that calls its function: the
learner has no torch, an actor's verifiers no jax. A module is looked for in the directory in which the command was
started, then on PYTHONPATH and among the installed packages, all of them behind our own packages.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Generator
from typing import Any

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PROJECT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """What a function is called with, and what it is to return."""

    takes: tuple[str, ...]
    """What is handed over by position, for people to read."""
    constants: tuple[str, ...] = ()
    """What is handed over by name, if the function takes it."""
    returns: str
    may_be_class: bool = False
    """True if a class is meant, which is called for an instance; a function is refused to be one else."""

    def __str__(self) -> str:
        """As it would be written."""
        constants = f", *, any of {', '.join(self.constants)}" if self.constants else ""
        return f"({', '.join(self.takes)}{constants}) -> {self.returns}"


def is_custom(name: str) -> bool:
    """Whether it is `module:function` rather than a name of ours."""
    return ":" in name


def check_name(field: str, name: str, ours: Collection[str]) -> None:
    """Refuses what is neither one of `ours` nor looks like `module:function`; imports nothing.

    Raises:
      ValueError: names the field, and the nearest of `ours`.
    """
    if name in ours or _OWN.fullmatch(name):
        return
    near = difflib.get_close_matches(name, ours, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{field} wants one of {', '.join(ours)}, or module:function of your own, got {name!r}{hint}")


def load(field: str, name: str, wanted: Signature) -> Callable[..., Any]:
    """Imports the module and returns its function.

    Raises:
      ValueError: one line: the module does not import (and why), it has no such function, or the function can't be
        called as `wanted`.
    """
    module_name, _, function_name = name.partition(":")
    here = os.getcwd()
    if "" not in sys.path:  # there already in a process started by a plain `python -m`
        _append_path(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # a module may do anything
        where = f" (looked in {here}, on PYTHONPATH and among the installed packages)"
        is_missing = isinstance(e, ModuleNotFoundError) and f"{module_name}.".startswith(f"{e.name}.")
        raise ValueError(
            f"{field}={name}: the module {module_name} does not import: {first_line(e)}{where if is_missing else ''}"
        ) from e
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{field}={name}: {module.__file__} has no {function_name!r}{hint}")
    if not callable(function):
        raise ValueError(f"{field}={name} must be a function {wanted}, got {type(function).__name__}")
    if kind := _unfit_kind(function, wanted):
        raise ValueError(f"{field}={name} must be a plain function {wanted}, got {kind}")
    _check_fits(field, name, function, wanted)
    return function


@contextlib.contextmanager
def importable(folder: pathlib.Path) -> Generator[None]:
    """Lets modules of a folder be imported inside the context, behind our own packages."""
    paths, modules = list(sys.path), set(sys.modules)
    _append_path(str(folder))
    try:
        yield
    finally:
        sys.path[:] = paths
        # Another folder's module of the same name must not be taken for one of this folder.
        for name in set(sys.modules) - modules:
            file = pathlib.Path(getattr(sys.modules[name], "__file__", None) or "/")
            if file.is_relative_to(folder) and not file.is_relative_to(_PROJECT):
                del sys.modules[name]


def _append_path(folder: str) -> None:
    """Adds a folder to the import path right behind our own packages, or last."""
    if folder not in sys.path:
        sys.path.insert(sys.path.index(str(_PROJECT)) + 1 if str(_PROJECT) in sys.path else len(sys.path), folder)


def constant_defaults(function: Callable[..., Any], wanted: Signature) -> dict[str, Any]:
    """The constants that a function takes, each with its default; `inspect.Parameter.empty` of none.

    A parameter that takes what is handed over by position is none, whatever its name.
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
    """An error's type and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def python_path() -> str:
    """PYTHONPATH of a child process that is to find what this one finds: our packages, then what this one was given.

    The child must also be started in this process's directory, and with `python -P -m`: without the flag that directory
    precedes our packages, and a folder `configs` there takes the place of ours.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(_PROJECT), *filter(None, given)]))


def _unfit_kind(function: Callable[..., Any], wanted: Signature) -> str:
    """Returns what a callable is whose call returns no result of the kind wanted; empty if it may be used."""
    if inspect.isclass(function):
        return "" if wanted.may_be_class else "a class (its call makes an instance)"
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    for called in (inner, type(inner).__call__):
        if inspect.iscoroutinefunction(called):
            return "an async one"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "a generator (it has yield)"
    return ""


def _check_fits(field: str, name: str, function: Callable[..., Any], wanted: Signature) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{field}={name} must be a function {wanted}; what it takes is not known: {e}") from e
    try:
        signature.bind(*wanted.takes, **dict.fromkeys(constant_defaults(function, wanted)))
    except TypeError as e:
        raise ValueError(f"{field}={name} must be a function {wanted}, it is {signature}: {e}") from e
