"""Weights & Biases: to its server where there is a key, else offline into the run's folder.

Whatever wandb reads from its environment holds: WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL, WANDB_DIR.
"""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from learner.metrics.trackers import Row, TrackerRunInfo, meanings, scalars, written_s

INIT_S = 60.0
"""How long the server may take to answer; then it counts as away, and is asked again later."""


class Wandb:
    """A run of wandb; its id is the run's, so that a learner that was started again goes on in it."""

    is_sure_when_closed = False

    def __init__(self, info: TrackerRunInfo) -> None:
        """Opens it.

        Raises:
          Exception: the server is away, or refuses the key.
        """
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
        # wandb's own step never goes back, and an evaluation's row is of an earlier step than those before it.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # A folder a start; wandb takes those of one run together.
        folders = pathlib.Path(self._run.dir).parent.parent / f"offline-run-*-{info.run}"
        self.where = f"wandb sync {folders}" if is_offline else self._run.url or ""

    def send(self, rows: Sequence[Row]) -> None:
        """Hands them to wandb's own process, which keeps them on disk, too, and sends them by itself."""
        for row in rows:
            self._run.log({"step": row["step"], "_timestamp": written_s(row), **scalars(row)})

    def close(self) -> None:
        """Waits until they are out."""
        self._run.finish()


def _is_offline(login: Callable[..., bool]) -> bool:
    """Whether nothing says how to reach a server: without a key wandb would ask for one."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] in ("offline", "dryrun")
    return not login(prompt=False, verify=False)  # looks where wandb does, and asks nobody


open_tracker = Wandb
