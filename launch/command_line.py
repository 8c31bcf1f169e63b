"""What the entry points share: flags, typed overrides, and everything checked before anything starts."""

import contextlib
import dataclasses
import functools
import json
import logging as stdlib_logging
import os
import pathlib
import sqlite3
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

from absl import app, flags, logging

from bridge.files import replace_file
from bridge.phases import say_phase
from configs import overrides
from configs.paths import absolute
from configs.run_folder import RunFolder, check_run_folder, set_up_run, settle_run_id, with_template_date
from configs.schema import Config
from configs.tiny_model import TinyModelRecipe
from launch import help
from launch.console import outlive_readers
from launch.network_check import check_network
from launch.open_files import check_open_files, raise_open_files

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "A preset, as in --config=configs/tiny.py; any field of it is set by --config.section.field=value.",
)


def describe(flag: str, meaning: str) -> None:
    """Says in the help of this process's command what a flag that it shares with others is to it."""
    flags.FLAGS[flag].help = meaning


class _JoinedFlag(flags.Flag):
    """A string; given several times, what was given, with commas between."""

    def parse(self, argument: str) -> None:
        super().parse(f"{self.value},{argument}" if self.present else argument)


_RUN_DIR = flags.DEFINE_flag(
    _JoinedFlag(
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
_PASSING = (OSError, sqlite3.OperationalError)
"""What a disk or a network that fails raises; the second, where the store is on that disk."""
RESIZE = 75
"""Exit code of an actor that wants to be started again, with other limits of its engine; no failure."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    config: Config
    folder: pathlib.Path
    model_folder: pathlib.Path


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
        print(help.render(module, shared, is_full="--helpfull" in asked), end="")
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


def prepare(roles: Collection[str], at: Callable[[str], None] = say_phase, *, num_hosts: int | None = None) -> Prepared:
    """Reads the flags, makes the tiny model if it is wanted and not cached, checks all, opens the folder.

    With --run_dir alone the run's own config.json is read.

    Args:
      roles: "learner", "actor" or both: whose functions of the user's own must be found on this machine.
      at: told what begins, in a few words.
      num_hosts: machines of the learner, as in `preflight.check_snapshot_room`.

    Raises:
      ValueError: one line that says what is wrong; nothing was changed.
      OSError: a disk fails, or has no room for a run that has begun.
    """
    at("looking at the config")
    from launch import preflight  # the learner's reading code: not for an actor's process
    from launch.own_answers import check_answers
    from launch.tiny_model import cached_tiny_model
    from learner.data.quarantine import write_set_aside

    if _CONFIG.value is None:
        run_dir = given_run_dir()
        if run_dir is None:
            raise ValueError("give --config=configs/NAME.py, or --run_dir=FOLDER of a run set up before")
        if _overrides:
            raise ValueError("--config.* overrides need --config; a run folder's config is fixed")
        prepared = open_prepared(run_dir)
        notes = settle_run_id(prepared.config)
        at("looking for devices, folders and room")
        preflight.check_folders(prepared.config, prepared.model_folder)
        preflight.check_snapshot_room(prepared.config, prepared.model_folder, roles=roles, num_hosts=num_hosts)
        preflight.check_run_room(prepared.config, prepared.model_folder)
        notes += check_open_files() + check_network(prepared.config) + preflight.check_engines(prepared.config, roles)
        for note in notes + preflight.check_functions(prepared.config, roles):
            print(note, flush=True)
        return prepared
    config = overrides.load_preset(_CONFIG.value)
    if (run_dir := given_run_dir()) is not None:
        _overrides.setdefault("run.dir", run_dir)
    given = overrides.apply(config, _overrides)
    # The run's own folder may be moved; what it reads is found from any working directory.
    config = dataclasses.replace(absolute(given, pathlib.Path.cwd()), run=given.run)
    check_run_folder(config)
    config = with_template_date(config)  # what is looked at below is what the run will ask
    _check_tiny_model_fits(config)
    model_folder = pathlib.Path(config.model.path).resolve() if config.model.path else cached_tiny_model(config, at)
    at("looking for devices, and trying what is imported")
    notes = check_open_files() + check_network(config) + preflight.check_engines(config, roles)
    notes += preflight.check_functions(config, roles)  # first: verifiers are asked next
    at("reading the model's config and tokenizer")
    preflight.check_model(config, model_folder)
    answers = check_answers(config, roles, show=functools.partial(print, flush=True))
    at("reading the prompts")
    notes += answers.notes + preflight.check(
        config, model_folder, set_aside=answers.set_aside, roles=roles, num_hosts=num_hosts
    )
    for note in notes:
        print(note, flush=True)
    preflight.check_folders(config, model_folder)
    preflight.check_run_room(config, model_folder)
    folder = set_up_run(config)
    for note in settle_run_id(config):
        print(note, flush=True)
    write_set_aside(RunFolder(folder).set_aside, answers.set_aside)
    replace_file(RunFolder(folder).model_path_file, f"{model_folder}\n".encode())
    return Prepared(config, folder, model_folder)


def config() -> Config:
    """The preset of --config with its overrides, for a tool that starts no run.

    Raises:
      ValueError: there is none, or an override is wrong.
    """
    if _CONFIG.value is None:
        raise ValueError("give --config=configs/NAME.py, or --run_dir=FOLDER of a run set up before")
    return overrides.apply(overrides.load_preset(_CONFIG.value), _overrides)


def given_config() -> Config:
    """The run's config by the flags; nothing is set up, or looked at elsewhere.

    Raises:
      ValueError: there is none, or an override is wrong.
    """
    if _CONFIG.value is None and (run_dir := given_run_dir()) is not None:
        return open_prepared(run_dir).config
    return config()


def _check_tiny_model_fits(config: Config) -> None:
    longest = TinyModelRecipe().max_position_embeddings
    if not config.model.path and config.model.max_tokens > longest:
        raise ValueError(
            f"this config is for a real model (model.max_tokens={config.model.max_tokens}): give "
            "--config.model.path=FOLDER and --config.prompts.path=FILE, or take a preset at tiny size, "
            "as in --config=configs/rolloutpipe.py:tiny"
        )


def open_prepared(run_dir: str) -> Prepared:
    """A run folder that was set up before.

    Raises:
      ValueError: it was not.
    """
    folder = pathlib.Path(run_dir)
    run = RunFolder(folder)
    for file in (run.config_file, run.model_path_file):
        if not file.is_file():
            raise ValueError(f"{folder} is no run folder (it has no {file.name}); set it up with --config")
    try:
        raw = json.loads(run.config_file.read_text())
        if not isinstance(raw, dict):
            raise ValueError(f"wanted a JSON object, got {type(raw).__name__}")
        config = overrides.from_dict(raw)
    except ValueError as e:
        raise ValueError(f"{run.config_file}: {e}") from e
    # The folder may have been moved since, or be named from another working directory.
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    return Prepared(config, folder, pathlib.Path(run.model_path_file.read_text().strip()))


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
    except _PASSING as e:
        end(f"{one_line(e)}; make room, or mend what it names, and start again", start_code(e))


def start_code(error: BaseException) -> int:
    """The exit code of a process of the run that this ended while it started.

    `USAGE_ERROR`, after which nobody starts it again, only where what it was given is wrong, or isn't there; `BUSY`
    where that may pass; 1 of a bug.
    """
    if isinstance(error, (ValueError, FileNotFoundError)):
        return USAGE_ERROR
    return BUSY if isinstance(error, _PASSING) else 1


def one_line(error: BaseException) -> str:
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
    end(one_line(error), code)
