"""Trackio: into a folder of the run, or wherever trackio's own environment says.

That is TRACKIO_DIR, TRACKIO_SPACE_ID with HF_TOKEN, or TRACKIO_SERVER_URL with TRACKIO_WRITE_TOKEN.
"""

import os
from collections.abc import Sequence
from typing import Any

from learner.metrics.trackers import Row, TrackerRunInfo, meanings, scalars

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """A run of trackio, found again by its name, which has the run's id."""

    is_sure_when_closed = True
    """A thread of trackio's takes rows from a queue in memory, twice a second."""

    def __init__(self, info: TrackerRunInfo) -> None:
        """Opens it.

        Raises:
          Exception: the server is away, or refuses.
        """
        is_local = not any(os.environ.get(name) for name in _ELSEWHERE)
        folder = os.environ.setdefault("TRACKIO_DIR", str(info.folder.resolve() / "trackio"))
        import trackio  # pyright: ignore[reportMissingImports]  # reads where to write when it is imported

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
        """Queues them for trackio's own thread, which writes them in batches; it takes no time of ours."""
        for row in rows:
            self._run.log(scalars(row), step=row["step"])

    def close(self) -> None:
        """Waits until they are written."""
        self._run.finish()


open_tracker = Trackio
