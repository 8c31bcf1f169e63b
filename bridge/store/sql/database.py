"""What a database is asked: fixed lists of statements, one text for every engine.

A script has no decision in it that Python would have to take between two of its statements; what its rows mean is
looked at when it has been committed. So an engine across a network gets it in one round trip, and holds no lock while
the one who asked is slow, stopped or cut off.

In the shared text
- `:name` is a parameter, and `:run` is in every statement: one database may serve many runs;
- `{now}` is the store's clock, in Unix seconds;
- `IN [name]` is membership in a list of texts, the parameter `name`.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from bridge.store.store_types import Mark, Topic

Row = tuple[Any, ...]
NO_LIMIT = 2**62
"""More than there ever is; SQLite would write it -1 and PostgreSQL NULL."""

_LIST = re.compile(r"IN \[(\w+)\]")
_PARAMETER = re.compile(r":(\w+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """One statement and its parameters."""

    sql: str
    params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """One transaction."""

    steps: Sequence[Statement]
    before_lock: Sequence[Statement] = ()
    """What is large and sent first, so that nobody waits for its way; undone with the rest."""
    locks: bool = True
    """Whether it takes its turn among the run's writers; one that doesn't writes nothing, or a row that none of them
    looks at: its own, or the count of engines."""
    incarnation: int | None = None
    """Of the learner that asks: nothing is done once another leads; None for whoever does not lead."""
    changes: Collection[Topic] = ()
    """What those who wait are told of; `notify_if` says whether."""
    notify_if: Statement | None = None
    """Asked before `steps`: those who wait are told if it gives a row; None: always."""
    told_after: Mapping[Topic, Statement] = dataclasses.field(default_factory=dict[Topic, Statement])
    """Topics that those who wait are told of if a step, asked after `steps`, gives a row."""
    timeout_s: float | None = None
    """How long a database that can't be reached is tried again; None: as long as it was told to when it was opened."""


class Database(Protocol):
    """An engine that runs scripts; safe to use from several threads, closed before a fork."""

    def write(self, run: str, script: Transaction) -> list[list[Row]]:
        """All of a script or nothing, on disk afterwards; the rows of each of its `steps`.

        It may be run again though it was committed, where the answer was lost: its statements see to that.

        Raises:
          SupersededLearnerError: another incarnation leads the run.
          StoreLostError: the database could not be reached.
        """
        ...

    def read(self, run: str, step: Statement, *, timeout_s: float | None = None) -> list[Row]:
        """The rows of one statement, of one moment; `timeout_s` is as a script's."""
        ...

    @property
    def num_breaks(self) -> int:
        """Times that the way to the database broke; whatever answers after one may be an older copy of it."""
        ...

    def mark(self, run: str) -> Mark:
        """See `SharedStore.mark`."""
        ...

    def wait(self, run: str, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        """See `SharedStore.wait`."""
        ...

    def close(self) -> None:
        """Ends what is under way and lets go of all connections."""
        ...


class StoreClosedError(RuntimeError):
    """`close` was called, in the middle of a call or before it."""


def list_names(sql: str) -> list[str]:
    """The parameters that are lists."""
    return _LIST.findall(sql)


def translate(sql: str, *, now: str, list_form: str, parameter_form: str) -> str:
    r"""The shared text in an engine's own words.

    Args:
      sql: shared text.
      now: what `{now}` becomes.
      list_form: what `IN [name]` becomes, a replacement with `\1` for the name.
      parameter_form: what `:name` becomes, likewise.
    """
    return _PARAMETER.sub(parameter_form, _LIST.sub(list_form, sql.replace("{now}", now)))
