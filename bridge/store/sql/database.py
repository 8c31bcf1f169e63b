"""Database interface: transactions as fixed lists of statements, in one SQL dialect for every engine.

A transaction contains no decision in Python between two of its statements. Results are evaluated after the commit. A
remote engine therefore needs one round trip, and holds no lock while the client is slow, suspended or disconnected.

In the shared dialect
- `:name` is a parameter, and every statement has `:run`, because one database may hold many runs;
- `{now}` is the store's clock, in Unix seconds;
- `IN [name]` is membership in the list of texts in parameter `name`.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from bridge.store.store_types import Mark, Topic

Row = tuple[Any, ...]
NO_LIMIT = 2**62
"""Limit larger than any count; SQLite would write no limit as -1 and PostgreSQL as NULL."""

_LIST = re.compile(r"IN \[(\w+)\]")
_PARAMETER = re.compile(r":(\w+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """SQL statement and its parameters."""

    sql: str
    params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Transaction: statements that are committed together."""

    steps: Sequence[Statement]
    before_lock: Sequence[Statement] = ()
    """Statements with large data that run before the run's lock is taken, so that no other writer waits for the
    transfer."""
    locks: bool = True
    """True to take the run's write lock. Without the lock, a transaction may write only rows that no other writer
    reads, such as its own row or the count of engines."""
    incarnation: int | None = None
    """Incarnation of the calling learner: the transaction fails if another learner leads. None for other callers."""
    changes: Collection[Topic] = ()
    """Topics whose waiting processes are notified, subject to `notify_if`."""
    notify_if: Statement | None = None
    """Condition that runs before `steps`: processes are notified of `changes` if it returns a row; None: always."""
    told_after: Mapping[Topic, Statement] = dataclasses.field(default_factory=dict[Topic, Statement])
    """Topics whose waiting processes are notified if the statement, run after `steps`, returns a row."""
    timeout_s: float | None = None
    """Seconds for which an unreachable database is retried; None: the database's own retry time."""


class Database(Protocol):
    """Database engine that runs transactions. Thread-safe; must be closed before a fork."""

    def write(self, run: str, script: Transaction) -> list[list[Row]]:
        """Runs a transaction and returns the rows of each of its `steps`. It is on disk afterwards, or has no effect.

        If the answer is lost, the transaction may run again after its commit. Its statements must be idempotent. Raises
        SupersededLearnerError if another incarnation leads the run, and StoreLostError if the database is unreachable.
        """
        ...

    def read(self, run: str, step: Statement, *, timeout_s: float | None = None) -> list[Row]:
        """Returns the rows of one statement, from one snapshot; `timeout_s` is as in a transaction."""
        ...

    @property
    def num_breaks(self) -> int:
        """Cumulative number of broken connections. After a break, an older copy of the database may answer."""
        ...

    def mark(self, run: str) -> Mark:
        """Returns a mark, as `SharedStore.mark`."""
        ...

    def wait(self, run: str, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        """Waits for a change, as `SharedStore.wait`."""
        ...

    def close(self) -> None:
        """Aborts running calls and closes all connections."""
        ...


class StoreClosedError(RuntimeError):
    """Error for a call on a store that was closed before or during the call."""


def list_names(sql: str) -> list[str]:
    """Returns the names of list parameters."""
    return _LIST.findall(sql)


def translate(sql: str, *, now: str, list_form: str, parameter_form: str) -> str:
    r"""Translates a shared statement into an engine's dialect.

    `now` replaces `{now}`, `list_form` replaces `IN [name]`, and `parameter_form` replaces `:name`; `\1` stands for the
    name.
    """
    return _PARAMETER.sub(parameter_form, _LIST.sub(list_form, sql.replace("{now}", now)))
