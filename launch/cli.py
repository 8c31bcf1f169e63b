"""Shared flags, exit codes, one-line errors and logging of all commands."""

import contextlib
import functools
import logging as stdlib_logging
import os
import pathlib
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

from absl import app, flags, logging

from bridge.processes import CALLER, die_with_parent
from configs import overrides
from launch import cli_help
from launch.terminal import outlive_readers

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Preset name, as in --config=tiny. Override a field with --config.section.field=value.",
)


PRINT_CONFIG = flags.DEFINE_boolean(
    "print_config", False, "Print the config with all overrides as TOML, with the defaults of changed fields, and exit."
)


def describe(flag: str, meaning: str) -> None:
    """Sets the help text of a shared flag for this process's command."""
    flags.FLAGS[flag].help = meaning


class _CommaListFlag(flags.Flag):
    def parse(self, argument: str) -> None:
        super().parse(f"{self.value},{argument}" if self.present else argument)


_RUN_DIR = flags.DEFINE_flag(
    _CommaListFlag(
        parser=flags.ArgumentParser(),
        serializer=None,
        name="run_dir",
        default=None,
        help_string="Folder of an existing run.",
    )
)


_SHARED_FLAGS = ("config", "run_dir", "print_config")
_HELP = {"--help", "-help", "-h", "-?", "--helpshort", "--helpfull"}
_PROJECT = pathlib.Path(__file__).resolve().parent.parent
USAGE_ERROR = 2
"""Exit code for invalid input; a restart cannot help."""
STOPPED = 3
"""Exit code of a learner that was asked to stop before its run was complete."""
BUSY = 4
"""Exit code after a timeout on another process (such as a store lock), or a disk or network failure during startup. A
restart may help."""
SUPERSEDED = 5
"""Exit code of a learner that another learner has superseded; it must not be restarted."""
TRANSIENT_ERRORS = (OSError, sqlite3.OperationalError)
"""Errors raised by a failing disk or network; sqlite3's, if the store is on that disk."""
_MAX_OPEN_FILES = 2**20
"""Highest soft limit set, because some programs take time proportional to the limit."""
RESIZE = 75
"""Exit code of an actor that requests a restart with other engine limits; not a failure."""


def run(main: Callable[[], int], *, max_arguments: int = 0) -> None:
    """Runs a command with `app.run`; it accepts at most `max_arguments` positional arguments (`given_arguments`).

    `--help` shows the module's docstring, its own flags, and the shared flags in its `SHARED_FLAGS` (default: all).
    """
    outlive_readers()
    raise_open_files()
    if caller := os.environ.pop(CALLER, ""):
        die_with_parent(int(caller), signum=signal.SIGTERM)
    module = main.__module__
    shared = getattr(sys.modules[module], "SHARED_FLAGS", _SHARED_FLAGS)
    reading = functools.partial(parse, max_arguments=max_arguments, module=module, shared=shared)
    app.run(lambda argv: main(), flags_parser=reading)


def raise_open_files() -> None:
    """Raises the soft limit on open files to the hard limit; child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


_overrides: dict[str, str] = {}
_arguments: list[str] = []


def parse(
    argv: Sequence[str], *, max_arguments: int = 0, module: str = "", shared: Collection[str] = _SHARED_FLAGS
) -> list[str]:
    """Parses flags, config overrides and positional arguments; returns the program's name.

    Exits with `USAGE_ERROR` and one line on an unknown flag, an invalid value, or more than `max_arguments` positional
    arguments. Exits with 0 after printing the help if `module` is set and the help was requested.
    """
    global _overrides, _arguments
    asked = _HELP & set(argv[1 : argv.index("--")] if "--" in argv else argv[1:])
    if asked and module:
        print(cli_help.render(module, shared, is_full="--helpfull" in asked), end="")
        sys.exit(0)
    try:
        given = flags.FLAGS.read_flags_from_files(list(argv[1:]), force_gnu=False)  # --flagfile
        rest, _overrides, repeated = overrides.split_argv([*argv[:1], *given])
        for path in repeated:
            print(f"--config.{path} is set several times; using {_overrides[path]!r}", file=sys.stderr)
        rest = flags.FLAGS([_with_home(argument) for argument in rest])
        _arguments = rest[1:]
        if len(_arguments) > max_arguments:
            argument = _arguments[max_arguments]
            raise ValueError(f"unexpected argument {argument!r}{_as_override(argument, shared)}")
        foreign = [name for name in _SHARED_FLAGS if name not in shared and flags.FLAGS[name].present]
        foreign += ["config.*"] if _overrides and "config" not in shared else []
        if foreign:
            raise ValueError(f"unknown flag --{foreign[0]}; --help lists the flags of this command")
    except flags.UnrecognizedFlagError as e:
        end(
            one_line(e) + _as_override(e.flagvalue if "=" in e.flagvalue else f"{e.flagname}=VALUE", shared),
            USAGE_ERROR,
        )
    except (ValueError, flags.Error) as e:
        _end(e)
    return rest[:1]


def _as_override(argument: str, shared: Collection[str]) -> str:
    """Returns "; did you mean --config.FIELD=VALUE?" if an argument `NAME=VALUE` names a config field, else ""."""
    name, _, value = argument.lstrip("-+").partition("=")
    field = overrides.field_named(name) if value and "config" in shared else None
    return f"; did you mean --config.{field}={value}?" if field else ""


def _with_home(argument: str) -> str:
    """Expands `~` in `--flag=~/path`, which shells leave unexpanded."""
    flag, is_flag, value = argument.partition("=~")
    return f"{flag}={os.path.expanduser('~' + value)}" if is_flag and flag.startswith("-") else argument


def given_arguments() -> list[str]:
    """Returns the positional arguments of the command line; see `run`."""
    return list(_arguments)


def given_overrides() -> dict[str, str]:
    """Returns the --config.section.field=value overrides by dotted path."""
    return dict(_overrides)


def run_dirs(*, most: int | None = None) -> list[str]:
    """Returns the folders of --run_dir, repeated or comma-separated. Raises ValueError for none or more than `most`."""
    given = _RUN_DIR.value or ""
    # A folder's name may contain a comma.
    parts = [given] if pathlib.Path(given).is_dir() and given else [part for part in given.split(",") if part]
    found = [os.path.expanduser(part) for part in parts]
    if not found:
        raise ValueError("--run_dir: expected the folder of a run, got none")
    if most is not None and len(found) > most:
        raise ValueError(f"--run_dir: expected one folder, got {len(found)}: {', '.join(found)}")
    return found


def given_run_dir() -> str | None:
    """Returns the folder of --run_dir; None if the flag is absent. Raises ValueError if it is repeated."""
    if flags.FLAGS[_RUN_DIR.name].present > 1:
        raise ValueError(f"--run_dir: expected one folder, got {_RUN_DIR.value}")
    return _RUN_DIR.value


def log_to_stderr() -> None:
    """Sends absl's log to stderr: INFO and above from this project, above INFO from libraries."""
    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    handler = logging.get_absl_handler()
    handler.addFilter(lambda record: record.levelno > stdlib_logging.INFO or _is_ours(record.pathname))


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns input and file errors into one line on stderr and an exit code; bugs keep their traceback.

    The code is `BUSY` for a TimeoutError and `USAGE_ERROR` for a ValueError or OSError.
    """
    try:
        yield
    except TimeoutError as e:
        _end(e, code=BUSY)
    except (ValueError, OSError) as e:
        _end(e)


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """Turns startup errors of a restartable process into one line on stderr and the exit code of `start_code`.

    Unlike `usage_errors`, a failing disk or network does not count as invalid input.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, TimeoutError) as e:
        _end(e, code=start_code(e))
    except TRANSIENT_ERRORS as e:
        end(f"{one_line(e)}; fix the cause (such as a full disk), then start again", start_code(e))


def start_code(error: BaseException) -> int:
    """Returns the exit code for a startup error: `USAGE_ERROR` for invalid input, `BUSY` if transient, 1 for a bug."""
    if isinstance(error, (ValueError, FileNotFoundError)):
        return USAGE_ERROR
    return BUSY if isinstance(error, TRANSIENT_ERRORS) else 1


def one_line(error: BaseException) -> str:
    """Returns the error's message on one line; for an OSError with the file first."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _is_ours(pathname: str) -> bool:
    return pathlib.Path(pathname).is_relative_to(_PROJECT) and "site-packages" not in pathname


def end(said: str, code: int) -> NoReturn:
    """Prints an error line on stderr and exits with `code`."""
    print(f"error: {said}", file=sys.stderr)
    sys.exit(code)


def _end(error: Exception, *, code: int = USAGE_ERROR) -> NoReturn:
    end(one_line(error), code)
