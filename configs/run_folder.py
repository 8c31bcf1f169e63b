"""A run's folder: where each of its files lies, whose run it is, and where its snapshots are."""

import dataclasses
import json
import os
import pathlib
import re
import uuid
from typing import Any, cast

from bridge.files import replace_file
from bridge.text.chat_template import today
from configs.overrides import to_json
from configs.schema import Config

_Json = dict[str, Any]
_MAY_DIFFER = (
    *("run.num_updates ", "run.dir ", "run.trackers ", "run.project ", "supervision ", "supervision."),
    *("actor.shutdown_grace_s ", "actor.max_unstored_groups "),
    *("checkpoint.max_failed_in_a_row ", "checkpoint.on_stop ", "learner ", "learner.", "mesh."),
    *("samples ", "samples."),
    *("store.bucket ", "store.inline_bytes ", "store.actor_role ", "store.leader_lease_s ", "store.outage_timeout_s "),
    *("publish.when_late ", "publish.serve ", "publish.listen ", "publish.advertise ", "publish.reader_grace_s "),
    *(
        "publish.slow_reader_grace_s ",
        "publish.max_connections ",
        "publish.bucket ",
        "publish.bucket_keep ",
        "publish.bucket_wait_s ",
        "publish.full_every ",
    ),
)
_DATABASE = re.compile(r"postgres(?:ql)?://[^/]*/(?P<name>[^?]*)")


class RunFolder:
    """Names each file of a run folder, once; makes and reads none."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        """The config that the run was set up with."""
        self.run_id_file = path / "run_id"
        """What `run_id` reads."""
        self.home_file = path / "run_home"
        """The path of the folder that the run id belongs to: a copy of the folder has the original's."""
        self.model_path_file = path / "model_path.txt"
        """The model folder that the run began with; written last, so a folder that has it is set up."""
        self.store = path / "store.sqlite"
        """Tickets, groups and heartbeats (SQLite)."""
        self.learner_lock = path / "learner.lock"
        """Held by the one live learner."""
        self.supervisor_lock = path / "supervisor.lock"
        """Held by the one live `launch.local`."""
        self.checkpoints = path / "checkpoints"
        """A folder a step; their hashes lie beside it, in `checkpoints.hashes`."""
        self.metrics = path / "metrics.jsonl"
        """One row a step, evaluation, probe or round (JSONL)."""
        self.evaluated = path / "evaluated"
        """What `launch.tools.evaluate` found of its checkpoints: a file an evaluation, STEP-TIME.json."""
        self.abandoned_metrics = path / "metrics.abandoned.jsonl"
        """Rows of steps that a restarted learner went back behind."""
        self.samples = path / "samples.jsonl"
        """Some of what was sampled, as text: a line a group (JSONL)."""
        self.report = path / "report.html"
        """What `launch.tools.report` makes of all this: one HTML file."""
        self.tensorboard = path / "tensorboard"
        """The same scalars for TensorBoard."""
        self.events = path / "events"
        """The event log, a file a process."""
        self.trace = path / "trace.json"
        """The event log as one file for Perfetto; written at the run's end."""
        self.gold_failures = path / "gold_failures.json"
        """Rows whose own answers do not pass, found when the run was set up (JSON)."""
        self.quarantine = path / "quarantine.jsonl"
        """Rows of the prompts that were set aside, and why (JSONL)."""
        self.loss_constants = path / "loss.json"
        """The loss's constants, with every default filled in."""
        self.summary = path / "summary.json"
        """The run in a few numbers; written at its end."""

    def tracker(self, name: str) -> pathlib.Path:
        """What a tracker keeps on this machine: a folder, and beside it what it has of the run, NAME.json."""
        return self.path / "trackers" / name

    def log(self, role: str) -> pathlib.Path:
        """What a process of `launch.local` prints."""
        return self.path / "logs" / f"{role}.log"

    def limits(self, actor: str) -> pathlib.Path:
        """An actor's engine limits, where they differ from the config's."""
        return self.path / "limits" / f"{actor}.json"

    def model(self, step: int) -> pathlib.Path:
        """The trained model in Hugging Face's format."""
        return self.path / f"model-{step}"

    def adapter(self, step: int) -> pathlib.Path:
        """The trained adapters in PEFT's format."""
        return self.path / f"adapter-{step}"


def check_run_folder(config: Config) -> None:
    """Checks that the run folder is new, or belongs to this very config.

    A run may be continued for longer or elsewhere, so `run.num_updates` and `run.dir` may differ; so may where it is
    shown (`run.trackers`, `run.project`), how many processes and devices train (`learner`, `mesh`), what is taken for a
    hang (`supervision`), where the store's database is reached, and how weights go to other machines.

    Raises:
      ValueError: the folder holds another config (the fields that differ are named), or other files.
    """
    folder = pathlib.Path(config.run_dir)
    file = RunFolder(folder).config_file
    if (old := _set_up_with(file)) is not None:
        differing = _differences(old, dataclasses.asdict(config))
        differing = [d for d in differing if not d.startswith(_MAY_DIFFER)]
        if not (config.prompts.template_date and _template_date(old)):
            differing = [d for d in differing if not d.startswith("prompts.template_date ")]
        if _is_same_store(old, config):
            differing = [d for d in differing if not d.startswith(("store ", "store.url "))]
        if differing:
            raise ValueError(
                f"{folder} is the run of another config: {'; '.join(differing)}. "
                "Choose another --config.run.dir, or remove the folder."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} has files but no {file.name}, so it is no run of ours; choose another --config.run.dir"
        )
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another --config.run.dir")


def with_template_date(config: Config) -> Config:
    """Returns the config with the date that the run's prompts have: its own, its folder's, or else today's in UTC.

    Raises:
      ValueError: the folder's config can't be read.
    """
    if config.prompts.template_date:
        return config
    old = _set_up_with(RunFolder(pathlib.Path(config.run_dir)).config_file)
    date = (_template_date(old) if old else "") or today()
    return dataclasses.replace(config, prompts=dataclasses.replace(config.prompts, template_date=date))


def _set_up_with(file: pathlib.Path) -> _Json | None:
    """The config in a run folder; None where there is none.

    Raises:
      ValueError: it can't be read.
    """
    if not file.is_file():
        return None
    try:
        old = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file} is not JSON ({e}); choose another --config.run.dir") from e
    if not isinstance(old, dict):
        raise ValueError(f"{file} is no JSON object; choose another --config.run.dir")
    return cast(_Json, old)


def _template_date(old: _Json) -> str:
    prompts = old.get("prompts")
    return str(cast(_Json, prompts).get("template_date") or "") if isinstance(prompts, dict) else ""


def set_up_run(config: Config) -> pathlib.Path:
    """Makes or opens the run folder and writes the config into it, with the date of its prompts.

    Raises:
      ValueError: see `check_run_folder`; or the folder can't be made, or written into.
      OSError: it was set up before, and can't be written into now.
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
            f"the run folder {run.path} can't be made or written: {e.strerror} ({e.filename}); "
            "choose another --config.run.dir"
        ) from e
    return run.path


def settle_run_id(config: Config) -> list[str]:
    """Gives the run folder an id of its own where it is a copy of another run's folder; returns what to know of it.

    The id names the run in shared memory and in trackers, so two folders that share one can't run at the same time. A
    folder that was moved, or whose original was removed, keeps its id.

    Raises:
      ValueError: it is a copy whose groups are in a store that both would share.
    """
    run = RunFolder(pathlib.Path(config.run_dir).resolve())
    home = pathlib.Path(run.home_file.read_text().strip()) if run.home_file.is_file() else run.path
    if not _is_copy_of(run.path, home):
        if not run.home_file.is_file() or home != run.path:
            replace_file(run.home_file, f"{run.path}\n".encode())
        return []
    if is_remote_store(config) or config.store.bucket:
        raise ValueError(
            f"{run.path} is a copy of the run folder {home}, and both would share one run in the store: continue the "
            "original, or start another run from its model (--config.model.path)"
        )
    for marks in (run.path / "trackers").glob("*.json"):
        marks.unlink()
    _put_new_id(run)
    return [f"{run.path} is a copy of the run folder {home}: it continues as a run of its own ({run_id(run.path)})"]


def _is_copy_of(folder: pathlib.Path, home: pathlib.Path) -> bool:
    try:
        return not os.path.samefile(folder, home) and run_id(home) == run_id(folder)
    except OSError:  # it was moved from there
        return False


def _put_new_id(run: RunFolder) -> None:
    replace_file(run.run_id_file, f"{uuid.uuid4().hex[:12]}\n".encode())
    replace_file(run.home_file, f"{run.path.resolve()}\n".encode())


def run_id(folder: str | os.PathLike[str]) -> str:
    """The run's own name in the world: two runs never share one, even in the same folder one after the other."""
    return RunFolder(pathlib.Path(folder)).run_id_file.read_text().strip()


def is_remote_store(config: Config) -> bool:
    """Whether the run's store is a server that other machines may reach."""
    return not config.store.url.startswith("sqlite:///") and bool(config.store.url)


def _is_same_store(old: _Json, config: Config) -> bool:
    """Whether the store that a run began with is the one it would go on with, by whatever host, user or proxy."""
    before: str = old.get("store", {}).get("url", "")
    names = [_DATABASE.match(url) for url in (before, config.store.url)]
    return before == config.store.url or (None not in names and len({n["name"] for n in names if n}) == 1)


def store_url(config: Config) -> str:
    """Where the run's store is: a file in the run's folder unless the config says otherwise."""
    return config.store.url or f"sqlite:///{RunFolder(pathlib.Path(config.run_dir)).store}"


def snapshot_root(config: Config) -> pathlib.Path:
    """Where snapshots of runs live: shared memory unless the config says otherwise."""
    return pathlib.Path(config.publish.snapshot_dir or "/dev/shm")


def snapshot_folder(config: Config) -> pathlib.Path:
    """Where this run's weight snapshots live."""
    return snapshot_root(config) / f"sluice-{config.run.name}-{run_id(config.run_dir)}"


def _differences(old: _Json, new: _Json, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(cast(_Json, a), cast(_Json, b), f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} was {a!r}, now {b!r}")
    return found
