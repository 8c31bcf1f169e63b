"""What a tracker is told of a run, and what it must do with the run's rows."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from learner.metrics import FAMILIES, METRICS, meaning

Row = Mapping[str, Any]
"""A row of metrics.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a tracker is told of a run when it is opened."""

    run: str
    """The run's id: a learner that was started again is the same run."""
    name: str
    """The run's name, which others may have, too."""
    project: str
    config: Mapping[str, Any]
    folder: pathlib.Path
    """Where a tracker keeps what it keeps on this machine, unless its own environment says otherwise; made by it."""


class Tracker(Protocol):
    """An open run of a tracker; used by one thread of a process of its own."""

    where: str
    """What to open or to call to see it; empty if that is not known."""
    is_sure_when_closed: bool
    """Whether what `send` took waits in this process, so that it is there for sure only once `close` has returned."""

    def send(self, rows: Sequence[Row]) -> None:
        """Takes rows, oldest first.

        Raises:
          Exception: it did not; the same rows come again.
        """
        ...

    def close(self) -> None:
        """Hands over what it still holds; what it is waiting for may take for ever, so others bound it."""
        ...


def scalars(row: Row) -> dict[str, float]:
    """A row's metrics: what has a name and a unit, and a value."""
    return {name: float(value) for name, value in row.items() if value is not None and meaning(name) is not None}


def written_s(row: Row) -> float:
    """When a row was written, in Unix seconds; of one that doesn't say it, as older versions', now."""
    return row.get("time_s") or time.time()


def meanings() -> dict[str, str]:
    """Unit and meaning of every metric, by its name; of families by their pattern."""
    return METRICS | FAMILIES


def table() -> str:
    """`meanings` as a Markdown table."""
    rows = [f"| `{name}` | {said} |" for name, said in meanings().items()]
    return "\n".join(["| metric | unit and meaning |", "|---|---|", *rows])
