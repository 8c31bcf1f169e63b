"""Trackio tracker: writes to a folder of the run, or to the target of trackio's environment variables.

These are TRACKIO_DIR, TRACKIO_SPACE_ID with HF_TOKEN, or TRACKIO_SERVER_URL with TRACKIO_WRITE_TOKEN.
"""

import os
from collections.abc import Sequence
from typing import Any

from learner.metrics.trackers import Row, TrackerRunInfo, meanings, scalars

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """Trackio run, found again by its name, which contains the run's id."""

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


open_tracker = Trackio
