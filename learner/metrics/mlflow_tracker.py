"""MLflow tracker: sends to MLFLOW_TRACKING_URI, or writes an SQLite file in the run's folder.

The MLflow client's environment variables apply, such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_TOKEN.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from learner.metrics.trackers import Row, TrackerRunInfo, scalars, table, written_s

TAG = "sluice.run"
"""Tag by which a restarted learner finds its MLflow run."""
MAX_METRICS, MAX_PARAMS, MAX_VALUE, MAX_TAG, MAX_NAME = 1000, 100, 6000, 8000, 250
"""Limits of MLflow: metrics and parameters per request, and characters per value, tag and name."""
_NAME = re.compile(r"[\w\-. :/]+")
_REFUSED = re.compile(r"[^\w\-. :/]")


class MLflow:
    """MLflow run in the experiment named after the project."""

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


open_tracker = MLflow
