"""Trackers Weights & Biases, MLflow and Trackio, and their registry. A tracker's library is imported when it is opened.

The environment variables of a tracker's client name its server and its key, for example WANDB_API_KEY,
MLFLOW_TRACKING_URI, or TRACKIO_SPACE_ID with HF_TOKEN.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from configs.suggestions import install_command
from learner.metrics.trackers import Row, Tracker, TrackerRunInfo, meanings, scalars, table, written_s

INIT_S = 60.0
"""Timeout for the server's answer, in seconds; opening is retried afterwards."""


class Wandb:
    """Wandb run with the run's id, so that a restarted learner resumes it; offline in its folder without a key."""

    is_sure_when_closed = False

    def __init__(self, info: TrackerRunInfo) -> None:
        """Opens the run; raises an exception of wandb if the server is unreachable or rejects the key."""
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        info.folder.mkdir(parents=True, exist_ok=True)
        if mode := os.environ.get("WANDB_MODE"):
            is_offline = mode in ("offline", "dryrun")
        else:
            is_offline = not wandb.login(prompt=False, verify=False)  # finds no key; `init` would prompt for one
        self._run: Any = wandb.init(
            project=info.project,
            name=info.name,
            id=info.run,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(info.folder),
            mode="offline" if is_offline else None,
            config={**info.config, "metrics": meanings()},
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_S,
                disable_code=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        # The step of wandb cannot decrease, but an evaluation row can have an earlier step than the row before it.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # Each start has its own folder; `wandb sync` combines the folders of a run.
        folders = pathlib.Path(self._run.dir).parent.parent / f"offline-run-*-{info.run}"
        self.where = f"wandb sync {folders}" if is_offline else self._run.url or ""

    def send(self, rows: Sequence[Row]) -> None:
        """Passes the rows to wandb's process, which stores them on disk and sends them."""
        for row in rows:
            self._run.log({"step": row["step"], "_timestamp": written_s(row), **scalars(row)})

    def close(self) -> None:
        """Waits until the rows are sent."""
        self._run.finish()


TAG = "sluice.run"
"""Tag by which a restarted learner finds its MLflow run."""
MAX_METRICS, MAX_PARAMS, MAX_VALUE, MAX_TAG, MAX_NAME = 1000, 100, 6000, 8000, 250
"""Limits of MLflow: metrics and parameters per request, and characters per value, tag and name."""
_NAME = re.compile(r"[\w\-. :/]+")
_REFUSED = re.compile(r"[^\w\-. :/]")


class MLflow:
    """MLflow run in the experiment named after the project, on MLFLOW_TRACKING_URI or in an SQLite file of the run."""

    is_sure_when_closed = False

    def __init__(self, info: TrackerRunInfo) -> None:
        """Finds or creates the run; raises MlflowException if the server is unreachable or rejects it."""
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # an extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        local = info.folder / "mlflow.db"
        if not uri:
            info.folder.mkdir(parents=True, exist_ok=True)
        self._metric = Metric
        self._client: Any = MlflowClient(tracking_uri=uri or f"sqlite:///{local.resolve()}")
        experiment = self._experiment(info.project, None if uri else str(info.folder.resolve() / "artifacts"))
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{info.run}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {TAG: info.run, **_about()}
            self._run = self._client.create_run(experiment, run_name=info.name, tags=tags).info.run_id
            params = [Param(name, text[:MAX_VALUE]) for name, text in _leaves(info.config)]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run, params=params[start : start + MAX_PARAMS])
        self.where = (
            f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"
            if uri and uri.startswith("http")
            else f"mlflow ui --backend-store-uri {uri or f'sqlite:///{local}'}"
        )

    def send(self, rows: Sequence[Row]) -> None:
        """Logs the rows in requests of at most `MAX_METRICS` values."""
        metrics = [
            self._metric(metric_name(name), value, int(written_s(row) * 1e3), row["step"])
            for row in rows
            for name, value in scalars(row).items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MAX_METRICS])

    def close(self) -> None:
        """Marks the run as terminated; a resumed learner marks it as running again."""
        self._client.set_terminated(self._run)

    def _experiment(self, project: str, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        found = self._client.get_experiment_by_name(project)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(project, artifact_location=artifacts)
        except MlflowException:
            found = self._client.get_experiment_by_name(project)  # another run's tracker created it concurrently
            if found is None:
                raise
            return found.experiment_id


def metric_name(name: str) -> str:
    """Returns the MLflow name of a metric: `eval/math/avg@8` is `eval/math/avg_at_8`.

    MLflow allows letters, digits and `_-. :/`, normalized paths, and at most 250 characters. Every other character
    becomes `_`, and a hash suffix keeps such names unique.
    """
    spelled = name.replace("@", "_at_")
    parts = (_REFUSED.sub("_", part) if part.strip(".") else "_" for part in spelled.split("/"))
    taken = "/".join(parts)
    if taken == spelled and len(taken) <= MAX_NAME:
        return taken
    mark = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{taken[: MAX_NAME - len(mark) - 1]}-{mark}"


def _about() -> dict[str, str]:
    """Returns the table of metrics as the run's description, with the overflow in further tags."""
    parts = [""]
    for line in table().splitlines(keepends=True):
        if len(parts[-1]) + len(line) > MAX_TAG:
            parts.append("")
        parts[-1] += line
    return {f"sluice.metrics.{i}" if i else "mlflow.note.content": part for i, part in enumerate(parts)}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the config as (dotted path, value) pairs, including empty sections."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value and all(_NAME.fullmatch(key) for key in value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """Trackio run, found again by its name, which contains the run's id. Without a server, in a folder of the run."""

    is_sure_when_closed = True
    """True: a trackio thread sends rows from an in-memory queue twice per second."""

    def __init__(self, info: TrackerRunInfo) -> None:
        """Opens the run; raises an exception of trackio if the server is unreachable or rejects it."""
        is_local = not any(os.environ.get(name) for name in _ELSEWHERE)
        folder = os.environ.setdefault("TRACKIO_DIR", str(info.folder.resolve() / "trackio"))
        import trackio  # pyright: ignore[reportMissingImports]  # reads TRACKIO_DIR on import

        self._run: Any = trackio.init(
            project=info.project,
            name=f"{info.name}-{info.run}",
            resume="allow",
            config={**info.config, "metrics": meanings()},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = f"TRACKIO_DIR={folder} trackio show --project {info.project}" if is_local else ""

    def send(self, rows: Sequence[Row]) -> None:
        """Queues the rows for trackio's thread; does not block."""
        for row in rows:
            self._run.log(scalars(row), step=row["step"])

    def close(self) -> None:
        """Waits until the rows are written."""
        self._run.finish()


@dataclasses.dataclass(frozen=True)
class TrackerKind:
    """Tracker that runs in a separate process."""

    open: Callable[[TrackerRunInfo], Tracker]
    """Opens the tracker in that process, and imports its library there."""
    packages: tuple[str, ...]
    """Packages that must be importable."""
    extra: str
    """Project extra that installs the packages."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables set before the import, unless the user set them."""


_MLFLOW = {
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # INFO lines only report the creation of the database
    # The feed retries failures and logs them; MLflow itself would be silent for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


KINDS = {
    "wandb": TrackerKind(Wandb, ("wandb",), "wandb"),
    "mlflow": TrackerKind(MLflow, ("mlflow", "sqlalchemy", "alembic"), "mlflow", _MLFLOW),
    "trackio": TrackerKind(Trackio, ("trackio",), "trackio"),
}
"""Registry of trackers, without TensorBoard, which the learner writes itself."""


def check_installed(names: Sequence[str]) -> None:
    """Raises ValueError, with the packages to install, if a tracker's packages are missing; imports nothing."""
    for name in names:
        kind = KINDS.get(name)
        missing = [p for p in kind.packages if importlib.util.find_spec(p) is None] if kind else []
        if kind and missing:
            raise ValueError(
                f"run.trackers has {name}, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"installed: {install_command(kind.extra)}, or leave it out"
            )


def opener(name: str, info: TrackerRunInfo) -> Callable[[], Tracker]:
    """Returns a function that opens a tracker, with its environment variables set."""

    def open_tracker() -> Tracker:
        for variable, value in KINDS[name].environment.items():
            os.environ.setdefault(variable, value)
        return KINDS[name].open(info)

    return open_tracker
