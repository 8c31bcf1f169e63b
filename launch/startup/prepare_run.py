"""Preparation of a run: config from the flags, checks, and the run folder."""

import dataclasses
import functools
import json
import pathlib
import resource
import types
from collections.abc import Callable, Collection, Mapping

from bridge.files import replace_file
from bridge.liveness import report_phase
from configs import overrides, toml_config
from configs.model_sizes import TinyModelRecipe
from configs.run_folder import RunFolder, check_run_folder, set_up_run, settle_run_id, with_template_date
from configs.schema import Config
from configs.sections.base import absolute
from launch import cli
from launch.cli import CONFIG, given_run_dir
from launch.startup.network_check import check_network
from launch.startup.provenance import record_start

MIN_OPEN_FILES = 128
"""Minimum limit on open files with which a learner and an engine start."""
_ENOUGH_OPEN_FILES = 1024
"""Limit on open files below which many engines, environments or connections may fail."""


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run that is checked and ready to start."""

    config: Config
    folder: pathlib.Path
    model_folder: pathlib.Path


def prepare_run(
    roles: Collection[str],
    status: Callable[[str], None] = report_phase,
    *,
    num_hosts: int | None = None,
    is_supervised: bool | None = False,
    forced: Mapping[str, str] = types.MappingProxyType({}),
) -> PreparedRun:
    """Reads the flags, makes the tiny model if needed, runs all checks, and opens the run folder.

    With --run_dir alone the config is read from the run folder.

    Args:
      roles: "learner", "actor" or both; decides which custom functions are tested on this machine.
      status: called with a short description of each step.
      num_hosts: machines of the learner, as in `preflight.check_snapshot_room`.
      is_supervised: True if the command trains supervised runs, False if runs with actors, None if both.
      forced: overrides by dotted path that replace those of the command line.

    Raises:
      ValueError: a check fails; the run folder is unchanged.
      OSError: a disk fails, or is too full for a run that has begun.
    """
    given = config(forced)
    status("checking the config")
    from launch.startup import preflight  # deferred: an actor's process does not need the learner's data code
    from launch.startup.gold_answers import check_gold_answers
    from launch.startup.tiny_model import cached_tiny_model
    from learner.data.row_filter import write_gold_failures

    if (prepared := _given_run()) is not None:
        check_kind(prepared.config, is_supervised)
        notes = settle_run_id(prepared.config)
        status("checking devices, folders and disk space")
        preflight.check_folders(prepared.config, prepared.model_folder)
        preflight.check_snapshot_room(prepared.config, prepared.model_folder, roles=roles, num_hosts=num_hosts)
        preflight.check_disk_space(prepared.config, prepared.model_folder)
        notes += check_open_files() + check_network(prepared.config) + preflight.check_engines(prepared.config, roles)
        for note in notes + preflight.check_functions(prepared.config, roles):
            print(note, flush=True)
        record_start(RunFolder(prepared.folder).provenance)
        return prepared
    # Input paths become absolute, so that any working directory works. The run folder's stays relative: it may move.
    given = dataclasses.replace(absolute(given, pathlib.Path.cwd()), run=given.run)
    check_kind(given, is_supervised)
    check_run_folder(given)
    given = with_template_date(given)  # the checks below must use the run's final template
    _check_tiny_model_fits(given)
    model_folder = pathlib.Path(given.model.path).resolve() if given.model.path else cached_tiny_model(given, status)
    status("checking devices and custom functions")
    notes = check_open_files() + check_network(given) + preflight.check_engines(given, roles)
    notes += preflight.check_functions(given, roles)  # before the check of reference answers, which uses the verifiers
    status("reading the model's config and tokenizer")
    preflight.check_model(given, model_folder)
    gold_failures, answer_notes = {}, list[str]()
    if not given.loss.is_supervised:
        status("checking reference answers")
        gold_failures, answer_notes = check_gold_answers(given, roles, show=functools.partial(print, flush=True))
    status("reading the prompts")
    notes += answer_notes + preflight.check(
        given, model_folder, gold_failures=gold_failures, roles=roles, num_hosts=num_hosts
    )
    for note in notes:
        print(note, flush=True)
    preflight.check_folders(given, model_folder)
    preflight.check_disk_space(given, model_folder)
    folder = set_up_run(given)
    for note in settle_run_id(given):
        print(note, flush=True)
    write_gold_failures(RunFolder(folder).gold_failures, gold_failures)
    record_start(RunFolder(folder).provenance)
    replace_file(RunFolder(folder).model_path_file, f"{model_folder}\n".encode())
    return PreparedRun(given, folder, model_folder)


def check_kind(config: Config, is_supervised: bool | None) -> None:
    """Raises ValueError if a command does not train runs of this config's kind (see `prepare_run`)."""
    if is_supervised is None or config.loss.is_supervised == is_supervised:
        return
    if is_supervised:
        raise ValueError(
            f"--config: expected loss.name=sft, as in --config=sft, got {config.loss.name}; reinforcement learning "
            "starts with python -m launch.local"
        )
    raise ValueError("--config: loss.name=sft trains without actors; start it with python -m launch.sft")


def config(forced: Mapping[str, str] = types.MappingProxyType({})) -> Config:
    """Returns the config that --config or --run_dir gives, without any setup or checks.

    `forced` replaces overrides of the command line, and has no effect with --run_dir. With --print_config it prints the
    config as TOML and exits with 0. Raises ValueError if both flags are missing or an override is invalid.
    """
    run = _given_run()
    given = run.config if run is not None else _preset(forced)
    if cli.PRINT_CONFIG.value:
        base = given.preset if given.preset in [*overrides.preset_names(), *overrides.recipe_names()] else None
        print(toml_config.render(given, base=base), end="")
        raise SystemExit(0)
    return given


def _given_run() -> PreparedRun | None:
    """Returns the run of --run_dir; None with --config, or without both flags."""
    if CONFIG.value is not None or (run_dir := given_run_dir()) is None:
        return None
    if cli.given_overrides():
        raise ValueError("--config.* overrides need --config; a run folder's config is fixed")
    return open_prepared(run_dir)


def _preset(forced: Mapping[str, str]) -> Config:
    if CONFIG.value is None:
        raise ValueError("--config: not set; set --config=NAME, or --run_dir to the folder of an existing run")
    given, run_dir = cli.given_overrides(), given_run_dir()
    if run_dir is not None and given.setdefault("run.dir", run_dir) != run_dir:
        raise ValueError(f"--run_dir={run_dir} differs from --config.run.dir={given['run.dir']}; give one of them")
    return overrides.apply(overrides.load_preset(CONFIG.value), given | dict(forced))


def _check_tiny_model_fits(config: Config) -> None:
    longest = TinyModelRecipe().max_position_embeddings
    if not config.model.path and config.model.max_tokens > longest:
        raise ValueError(
            f"model.max_tokens: expected at most {longest} for the tiny model, got {config.model.max_tokens}; set "
            "--config.model.path=FOLDER and --config.prompts.path=FILE, or use a preset at tiny size, "
            "as in --config=rolloutpipe:tiny"
        )


def open_prepared(run_dir: str) -> PreparedRun:
    """Opens a run folder that was set up before. Raises ValueError if it is none, or its config is invalid."""
    folder = pathlib.Path(run_dir)
    run = RunFolder(folder)
    for file in (run.config_file, run.model_path_file):
        if not file.is_file():
            raise ValueError(
                f"{folder}: expected a run folder, but {file.name} is missing; create the run with --config"
            )
    try:
        raw = json.loads(run.config_file.read_text())
        if not isinstance(raw, dict):
            raise ValueError(f"expected a JSON object, got {type(raw).__name__}")
        config = overrides.from_dict(raw)
    except ValueError as e:
        raise ValueError(f"{run.config_file}: {e}") from e
    # The folder may have moved, or be relative to another working directory.
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    return PreparedRun(config, folder, pathlib.Path(run.model_path_file.read_text().strip()))


def check_open_files() -> list[str]:
    """Returns a warning if the limit on open files is low. Raises ValueError if it is too low for a run."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _ENOUGH_OPEN_FILES:
        return []
    said = f"the limit on open files (ulimit -n) is {limit}"
    how = "raise the hard limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker)"
    if limit < MIN_OPEN_FILES:
        raise ValueError(f"{said}, expected at least {MIN_OPEN_FILES}; {how}")
    return [f"warning: {said}, which may be too low for many engines, environments or connections; {how}"]
