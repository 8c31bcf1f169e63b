"""Weights & Biases tracker: sends to the server if a key is set, else writes offline into the run's folder.

The wandb environment variables apply: WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL, WANDB_DIR.
"""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from learner.metrics.trackers import Row, TrackerRunInfo, meanings, scalars, written_s

INIT_S = 60.0
"""Timeout for the server's answer, in seconds; opening is retried afterwards."""


class Wandb:
    """Wandb run with the run's id, so that a restarted learner resumes it."""

    is_sure_when_closed = False

    def __init__(self, info: TrackerRunInfo) -> None:
        """Opens the run; raises an exception of wandb if the server is unreachable or rejects the key."""
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        info.folder.mkdir(parents=True, exist_ok=True)
        is_offline = _is_offline(wandb.login)
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


def _is_offline(login: Callable[..., bool]) -> bool:
    """Returns True if no server is configured; without a key wandb would prompt for one."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] in ("offline", "dryrun")
    return not login(prompt=False, verify=False)  # uses wandb's own lookup without a prompt


open_tracker = Wandb
