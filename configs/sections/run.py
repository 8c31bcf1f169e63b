"""Where a run lives and when it ends."""

import dataclasses
import re

from configs.checks import Count, Seed, check_ranges
from configs.paths import LocalPath, expand_home

MAX_NAME_CHARS = 200
"""A file name has at most 255 bytes, and the names made from a run's add some."""
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and when it ends."""

    name: str = "run"
    """Names its folder, and the run in its store and its trackers."""
    dir: LocalPath = ""
    """The run's folder; empty means runs/<name>. A folder of the same config is resumed."""
    seed: Seed = 0
    """Of the order of prompts, and of what is sampled from them."""
    num_updates: Count = 100
    """Optimizer steps to train for."""
    trackers: str = "tensorboard"
    """Where metrics are shown besides metrics.jsonl: of tensorboard, wandb, mlflow and trackio those wanted, with
    commas between them; empty for none. Each but the first is an extra of its name, and takes its server and its key
    from its own environment (docs/trackers.md)."""
    project: str = "sluice"
    """The trackers' project, or MLflow's experiment."""

    def __post_init__(self) -> None:
        expand_home(self)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"run.name must be letters, digits, '.', '_' or '-' (it names a folder), got {self.name!r}"
            )
        check_ranges("run", self)
        if len(self.name) > MAX_NAME_CHARS:
            raise ValueError(
                f"run.name must have at most {MAX_NAME_CHARS} characters (it names folders), got {len(self.name)}"
            )
        unknown = [name for name in self.tracker_names if name not in TRACKERS]
        if unknown:
            raise ValueError(f"run.trackers knows {', '.join(TRACKERS)}, got {unknown[0]!r}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.project):
            raise ValueError(f"run.project must be letters, digits, '.', '_' or '-', got {self.project!r}")

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """`trackers`, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.trackers.split(",") if name.strip()))
