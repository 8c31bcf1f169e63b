"""Run folder: its file names, its setup, and the run id and snapshot folder of a run."""

import dataclasses
import json
import os
import pathlib
import re
import uuid
from typing import Any, cast

from bridge.files import RunLock, replace_file
from bridge.text.chat_template import today
from configs.overrides import from_dict, to_json
from configs.schema import Config

_Json = dict[str, Any]
_MAY_DIFFER = (
    *("run.num_updates ", "run.dir ", "run.trackers ", "run.project ", "supervision ", "supervision."),
    *("actor.shutdown_grace_s ", "learner ", "learner.", "mesh.", "samples ", "samples."),
    *("actor.gpu_memory_utilization ", "actor.kv_cache_gib ", "actor.max_restarts ", "checkpoint ", "checkpoint."),
    *("store.bucket ", "store.actor_role ", "store.outage_timeout_s "),
    *("publish.when_late ", "publish.serve ", "publish.listen ", "publish.advertise "),
    *("publish.slow_reader_grace_s ", "publish.bucket ", "publish.full_every ", "publish.snapshot_dir "),
)
_DATABASE = re.compile(r"postgres(?:ql)?://[^/]*/(?P<name>[^?]*)")


class RunFolder:
    """Paths of all files in a run folder. Does not create or read files."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        """Config of the last start with `--config`."""
        self.run_id_file = path / "run_id"
        """Run id, as `run_id` returns it."""
        self.home_file = path / "run_home"
        """Original path of the run folder. In a copy it still names the original folder."""
        self.model_path_file = path / "model_path.txt"
        """Path of the initial model folder. It is written last, so its presence marks a complete setup."""
        self.store = path / "store.sqlite"
        """SQLite database of tickets, groups and heartbeats."""
        self.learner_lock = path / "learner.lock"
        """Lock file of the running learner."""
        self.supervisor_lock = path / "supervisor.lock"
        """Lock file of the running `launch.local`."""
        self.checkpoints = path / "checkpoints"
        """Checkpoints, one folder per step. Their hashes are in `checkpoints.hashes`."""
        self.metrics = path / "metrics.jsonl"
        """Metrics, one row per step, evaluation, probe or round (JSONL)."""
        self.evaluated = path / "evaluated"
        """Results of `launch.tools.evaluate`, one file STEP-TIME.json per evaluation."""
        self.abandoned_metrics = path / "metrics.abandoned.jsonl"
        """Metrics of steps that a restarted learner rolled back."""
        self.samples = path / "samples.jsonl"
        """Sampled groups as text, one line per group (JSONL)."""
        self.report = path / "report.html"
        """HTML report of `launch.tools.report`."""
        self.tensorboard = path / "tensorboard"
        """TensorBoard event files with the metrics."""
        self.compiled = path / "compiled"
        """Compiled programs of gradient helpers (JAX's persistent compilation cache)."""
        self.events = path / "events"
        """Event log, one file per process."""
        self.trace = path / "trace.json"
        """Event log as one Perfetto trace, written at the end of the run."""
        self.gold_failures = path / "gold_failures.json"
        """Rows whose reference answer fails its verifier, found at setup (JSON)."""
        self.quarantine = path / "quarantine.jsonl"
        """Quarantined prompt rows with reasons (JSONL)."""
        self.loss_constants = path / "loss.json"
        """Constants of the loss with all defaults filled in."""
        self.provenance = path / "provenance.jsonl"
        """Code version, command, machine and package versions, one line per start on other code or machines (JSONL)."""
        self.summary = path / "summary.json"
        """Summary of the run in a few numbers, written at its end."""

    def tracker(self, name: str) -> pathlib.Path:
        """Returns the local folder of a tracker. NAME.json next to it holds its state of the run."""
        return self.path / "trackers" / name

    def log(self, role: str) -> pathlib.Path:
        """Returns the log file of a `launch.local` process."""
        return self.path / "logs" / f"{role}.log"

    def limits(self, actor: str) -> pathlib.Path:
        """Returns the file of an actor's engine limits that differ from the config."""
        return self.path / "limits" / f"{actor}.json"

    def model(self, step: int) -> pathlib.Path:
        """Returns the folder of the trained model in Hugging Face format."""
        return self.path / f"model-{step}"

    def adapter(self, step: int) -> pathlib.Path:
        """Returns the folder of the trained adapters in PEFT format."""
        return self.path / f"adapter-{step}"


def check_run_folder(config: Config) -> None:
    """Raises ValueError unless the run folder is new or holds an equal config.

    Fields of length, location, trackers, learner processes, mesh, engine memory, checkpoints, supervision, store
    address and weight transfer may differ (`_MAY_DIFFER`): a run can be resumed for longer or on other machines. The
    error lists the fields that differ. A folder with unrelated files or a running `launch.local` is also rejected.
    """
    folder = pathlib.Path(config.run_dir)
    file, lock = RunFolder(folder).config_file, RunFolder(folder).supervisor_lock
    if lock.exists():
        RunLock(lock, "launch.local").release()
    if (old := _set_up_with(file)) is not None:
        differing = _differences(_with_new_fields(old), dataclasses.asdict(config))
        differing = [d for d in differing if not d.startswith(_MAY_DIFFER)]
        if not (config.prompts.template_date and _template_date(old)):
            differing = [d for d in differing if not d.startswith("prompts.template_date ")]
        if _is_same_store(old, config):
            differing = [d for d in differing if not d.startswith(("store ", "store.url "))]
        if differing:
            raise ValueError(
                f"{folder} holds a run of another config: {'; '.join(differing)}. Choose another --config.run.dir, or "
                "remove the folder."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder}: expected a run folder, got files without {file.name}. Choose another --config.run.dir."
        )
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, got a file. Choose another --config.run.dir.")


def with_template_date(config: Config) -> Config:
    """Returns the config with its template date: from the config, its run folder, or today in UTC.

    Raises ValueError if the folder's config cannot be read.
    """
    if config.prompts.template_date:
        return config
    old = _set_up_with(RunFolder(pathlib.Path(config.run_dir)).config_file)
    date = (_template_date(old) if old else "") or today()
    return dataclasses.replace(config, prompts=dataclasses.replace(config.prompts, template_date=date))


def _set_up_with(file: pathlib.Path) -> _Json | None:
    """Returns the config in a run folder; None without one. Raises ValueError if it cannot be read."""
    if not file.is_file():
        return None
    try:
        old = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file}: expected JSON, got an error ({e}). Choose another --config.run.dir.") from e
    if not isinstance(old, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(old).__name__}. Choose another --config.run.dir.")
    return cast(_Json, old)


def _template_date(old: _Json) -> str:
    prompts = old.get("prompts")
    return str(cast(_Json, prompts).get("template_date") or "") if isinstance(prompts, dict) else ""


def set_up_run(config: Config) -> pathlib.Path:
    """Creates or opens the run folder and writes the config with its template date into it.

    Raises ValueError if `check_run_folder` does, or a new folder cannot be created or written, and OSError if an
    existing run folder cannot be written.
    """
    check_run_folder(config)
    run = RunFolder(pathlib.Path(config.run_dir))
    refusal = OSError if run.model_path_file.is_file() else ValueError
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        replace_file(run.config_file, to_json(with_template_date(config)).encode())
        if not run.run_id_file.is_file() or not run.run_id_file.read_text().strip():
            _put_new_id(run)
    except OSError as e:
        raise refusal(
            f"run folder {run.path}: cannot create or write it: {e.strerror} ({e.filename}). "
            "Choose another --config.run.dir."
        ) from e
    return run.path


def settle_run_id(config: Config) -> list[str]:
    """Gives a copied run folder a new run id and returns messages for the user.

    The id names the run in shared memory and trackers, so two folders with one id cannot run concurrently. A folder
    that was moved, or whose original was removed, keeps its id. Raises ValueError if the copy would share a remote
    store or bucket with the original.
    """
    run = RunFolder(pathlib.Path(config.run_dir).resolve())
    home = pathlib.Path(run.home_file.read_text().strip()) if run.home_file.is_file() else run.path
    if not _is_copy_of(run.path, home):
        if not run.home_file.is_file() or home != run.path:
            replace_file(run.home_file, f"{run.path}\n".encode())
        return []
    if is_remote_store(config) or config.store.bucket:
        raise ValueError(
            f"{run.path} is a copy of the run folder {home}, and both would share one run in the store. Resume the "
            "original, or start a new run from its model (--config.model.path)."
        )
    for marks in (run.path / "trackers").glob("*.json"):
        marks.unlink()
    _put_new_id(run)
    return [f"{run.path} is a copy of the run folder {home}: it resumes as a separate run ({run_id(run.path)})"]


def _is_copy_of(folder: pathlib.Path, home: pathlib.Path) -> bool:
    try:
        return not os.path.samefile(folder, home) and run_id(home) == run_id(folder)
    except OSError:  # the original path no longer exists
        return False


def _put_new_id(run: RunFolder) -> None:
    replace_file(run.run_id_file, f"{uuid.uuid4().hex[:12]}\n".encode())
    replace_file(run.home_file, f"{run.path.resolve()}\n".encode())


def run_id(folder: str | os.PathLike[str]) -> str:
    """Returns the unique id of the run. Consecutive runs in one folder have different ids."""
    return RunFolder(pathlib.Path(folder)).run_id_file.read_text().strip()


def is_remote_store(config: Config) -> bool:
    """Returns True if the store is a server that other machines can reach."""
    return not config.store.url.startswith("sqlite:///") and bool(config.store.url)


def _is_same_store(old: _Json, config: Config) -> bool:
    """Returns True if both configs name one database, regardless of host, user or proxy."""
    before: str = old.get("store", {}).get("url", "")
    names = [_DATABASE.match(url) for url in (before, config.store.url)]
    return before == config.store.url or (None not in names and len({n["name"] for n in names if n}) == 1)


def store_url(config: Config) -> str:
    """Returns the URL of the store. Default: a SQLite file in the run folder."""
    return config.store.url or f"sqlite:///{RunFolder(pathlib.Path(config.run_dir)).store}"


def snapshot_root(config: Config) -> pathlib.Path:
    """Returns the parent folder of snapshots. Default: shared memory."""
    return pathlib.Path(config.publish.snapshot_dir or "/dev/shm")


def snapshot_folder(config: Config) -> pathlib.Path:
    """Returns the folder of this run's weight snapshots."""
    return snapshot_root(config) / f"sluice-{config.run.name}-{run_id(config.run_dir)}"


def _with_new_fields(old: _Json) -> _Json:
    """Returns an older config with the defaults of fields that it lacks; unchanged if it is no valid config."""
    try:
        return dataclasses.asdict(from_dict(old))
    except ValueError:
        return old


def _differences(old: _Json, new: _Json, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(cast(_Json, a), cast(_Json, b), f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} was {a!r}, now {b!r}")
    return found
