"""Flags that all commands share, exit codes, errors in one line, logging."""

import contextlib
import functools
import logging as stdlib_logging
import os
import pathlib
import resource
import sqlite3
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

from absl import app, flags, logging

from configs import overrides
from launch import cli_help
from launch.terminal import outlive_readers

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "A preset, as in --config=tiny; any field of it is set by --config.section.field=value.",
)


def describe(flag: str, meaning: str) -> None:
    """Says in the help of this process's command what a flag that it shares with others is to it."""
    flags.FLAGS[flag].help = meaning


class _CommaListFlag(flags.Flag):
    """A string; given several times, what was given, with commas between."""

    def parse(self, argument: str) -> None:
        super().parse(f"{self.value},{argument}" if self.present else argument)


_RUN_DIR = flags.DEFINE_flag(
    _CommaListFlag(
        parser=flags.ArgumentParser(),
        serializer=None,
        name="run_dir",
        default=None,
        help_string="The folder of a run that was set up before.",
    )
)


_SHARED_FLAGS = ("config", "run_dir")
_HELP = {"--help", "-help", "-h", "-?", "--helpshort", "--helpfull"}
_PROJECT = pathlib.Path(__file__).resolve().parent.parent
USAGE_ERROR = 2
"""Exit code of a process that was started with something it can't use; starting it again is no help."""
STOPPED = 3
"""Exit code of a learner that was asked to stop before its run was done."""
BUSY = 4
"""Exit code of a process that waited too long for another one, as for the store's lock, or whose start met a disk or a
network that fails; starting it again may help."""
SUPERSEDED = 5
"""Exit code of a learner in whose place another one leads the run: it must not be started again."""
TRANSIENT_ERRORS = (OSError, sqlite3.OperationalError)
"""What a disk or a network that fails raises; the second, where the store is on that disk."""
_MAX_OPEN_FILES = 2**20
"""Highest soft limit set: some programs take time for each file that might be open."""
RESIZE = 75
"""Exit code of an actor that wants to be started again, with other limits of its engine; no failure."""


def run(main: Callable[[], int], *, max_arguments: int = 0) -> None:
    """`app.run` of a command, however it was started.

    `--help` shows its module's docstring, its flags, and those it shares with others: its module's `SHARED_FLAGS`, or
    `--config` and `--run_dir`. What is no flag is refused, but for `max_arguments` of them, which `given_arguments`
    returns.
    """
    outlive_readers()
    raise_open_files()
    module = main.__module__
    shared = getattr(sys.modules[module], "SHARED_FLAGS", _SHARED_FLAGS)
    reading = functools.partial(parse, max_arguments=max_arguments, module=module, shared=shared)
    app.run(lambda argv: main(), flags_parser=reading)


def raise_open_files() -> None:
    """Raises this process's soft limit to the hard one; processes that it starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # a sandbox that forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


_overrides: dict[str, str] = {}
_arguments: list[str] = []


def parse(
    argv: Sequence[str], *, max_arguments: int = 0, module: str = "", shared: Collection[str] = _SHARED_FLAGS
) -> list[str]:
    """Sets the flags and takes the --config.section.field=value and the arguments aside; returns the program's name.

    Ends the process with one line and `USAGE_ERROR` where a flag is not known, its value can't be, or more is given
    that is no flag than `max_arguments`; with its help and 0 where that is asked for and there is a `module` to show.
    """
    global _overrides, _arguments
    asked = _HELP & set(_before_the_end(argv[1:]))
    if asked and module:
        print(cli_help.render(module, shared, is_full="--helpfull" in asked), end="")
        sys.exit(0)
    try:
        rest, _overrides = overrides.split_argv(argv)
        rest = flags.FLAGS([_with_home(argument) for argument in rest])
        _arguments = rest[1:]
        if len(_arguments) > max_arguments:
            raise ValueError(f"unexpected argument {_arguments[max_arguments]!r}")
        foreign = [name for name in _SHARED_FLAGS if name not in shared and flags.FLAGS[name].present]
        foreign += ["config.*"] if _overrides and "config" not in shared else []
        if foreign:
            raise ValueError(f"this command takes no --{foreign[0]}; --help shows what it takes")
    except (ValueError, flags.Error) as e:
        _end(e)
    return rest[:1]


def _with_home(argument: str) -> str:
    """Returns `--flag=~/path` with the home folder filled in, which a shell does only where a word begins with `~`."""
    flag, is_flag, value = argument.partition("=~")
    return f"{flag}={os.path.expanduser('~' + value)}" if is_flag and flag.startswith("-") else argument


def _before_the_end(argv: Sequence[str]) -> Sequence[str]:
    return argv[: argv.index("--")] if "--" in argv else argv


def given_arguments() -> list[str]:
    """What the command line has that is no flag; see `run`."""
    return list(_arguments)


def given_overrides() -> dict[str, str]:
    """The --config.section.field=value of the command line, by dotted path."""
    return dict(_overrides)


def run_dirs(*, most: int | None = None) -> list[str]:
    """The folders of --run_dir, given once for each or with commas between them.

    Raises:
      ValueError: there is none, or there are more than `most`.
    """
    given = _RUN_DIR.value or ""
    # A folder may have a comma in its name.
    parts = [given] if pathlib.Path(given).is_dir() and given else [part for part in given.split(",") if part]
    found = [os.path.expanduser(part) for part in parts]
    if not found:
        raise ValueError("give --run_dir=FOLDER of a run")
    if most is not None and len(found) > most:
        raise ValueError(f"one --run_dir is wanted here, got {len(found)}: {', '.join(found)}")
    return found


def given_run_dir() -> str | None:
    """The folder of --run_dir, where it is given.

    Raises:
      ValueError: it is given several times.
    """
    if flags.FLAGS[_RUN_DIR.name].present > 1:
        raise ValueError(f"one --run_dir is wanted here, got {_RUN_DIR.value}")
    return _RUN_DIR.value


def log_to_stderr() -> None:
    """Absl's log lines at INFO, on stderr, with nothing from libraries below WARNING."""
    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    handler = logging.get_absl_handler()
    handler.addFilter(lambda record: record.levelno > stdlib_logging.INFO or _is_ours(record.pathname))


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what is wrong with input or disk into one line on stderr and an exit code; bugs keep their traceback.

    The code is `USAGE_ERROR`, or `BUSY` where another process holds something.
    """
    try:
        yield
    except TimeoutError as e:
        _end(e, code=BUSY)
    except (ValueError, OSError) as e:
        _end(e)


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """`usage_errors` of a process that others start again: a disk or a network that fails says nothing of its input.

    The code is `start_code`'s.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, TimeoutError) as e:
        _end(e, code=start_code(e))
    except TRANSIENT_ERRORS as e:
        end(f"{first_line(e)}; make room, or mend what it names, and start again", start_code(e))


def start_code(error: BaseException) -> int:
    """The exit code of a process of the run that this ended while it started.

    `USAGE_ERROR`, after which nobody starts it again, only where what it was given is wrong, or isn't there; `BUSY`
    where that may pass; 1 of a bug.
    """
    if isinstance(error, (ValueError, FileNotFoundError)):
        return USAGE_ERROR
    return BUSY if isinstance(error, TRANSIENT_ERRORS) else 1


def first_line(error: BaseException) -> str:
    """What an error says; the system's own with the file first."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _is_ours(pathname: str) -> bool:
    return pathlib.Path(pathname).is_relative_to(_PROJECT) and "site-packages" not in pathname


def end(said: str, code: int) -> NoReturn:
    """Ends the process with a line on stderr."""
    print(f"error: {said}", file=sys.stderr)
    sys.exit(code)


def _end(error: Exception, *, code: int = USAGE_ERROR) -> NoReturn:
    end(first_line(error), code)
