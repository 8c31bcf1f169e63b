"""The trackers by name: what each needs to be installed, and how it is opened."""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence

from configs.extras import install_command
from learner.trackers.tracker import Told, Tracker


@dataclasses.dataclass(frozen=True)
class Kind:
    """A tracker that rows are brought to by a process of its own."""

    module: str
    """Ours, which has `open_tracker`; it is imported in that process alone."""
    packages: tuple[str, ...]
    """What must be importable."""
    extra: str
    """Of the project, which installs them."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What its library finds set when it is imported, where the user set nothing else."""


_MLFLOW = {
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # the lines below are of a database's first use
    # What fails is tried again by the feed, which says so; by itself MLflow would be silent for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}

KINDS = {
    "wandb": Kind("learner.trackers.wandb_run", ("wandb",), "wandb"),
    "mlflow": Kind("learner.trackers.mlflow_run", ("mlflow", "sqlalchemy", "alembic"), "mlflow", _MLFLOW),
    "trackio": Kind("learner.trackers.trackio_run", ("trackio",), "trackio"),
}
"""All but TensorBoard, which the learner writes itself."""


def check_installed(names: Sequence[str]) -> None:
    """Checks, without importing anything, that the trackers can be opened on this machine.

    Raises:
      ValueError: one can't; says what to install.
    """
    for name in names:
        kind = KINDS.get(name)
        missing = [p for p in kind.packages if importlib.util.find_spec(p) is None] if kind else []
        if kind and missing:
            raise ValueError(
                f"run.trackers has {name}, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"installed: {install_command(kind.extra)}, or leave it out"
            )


def opener(name: str, told: Told) -> Callable[[], Tracker]:
    """What opens a tracker; importing its library is part of it."""

    def open_tracker() -> Tracker:
        for variable, value in KINDS[name].environment.items():
            os.environ.setdefault(variable, value)
        return importlib.import_module(KINDS[name].module).open_tracker(told)

    return open_tracker
