"""Each operation on a SQLite store by a process that is killed (SIGKILL) before one of its statements, or after all.

    python -m tests.integration.support.statement_kills FOLDER

makes FOLDER/OPERATION/before.db, and for each statement of the operation a copy killed-N.db that a process was killed
on before its N-th statement; after.db is done uncut. It forks, which takes milliseconds where a start takes a second.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import sys

from bridge.store.open import SqliteStore
from tests.integration.support.store_operations import OPERATIONS, Operation


def operate(path: pathlib.Path, operation: Operation, *, kill_before: int | None) -> int:
    """Does it, as the learner that led before; returns how many statements it took."""
    store = SqliteStore(path)
    if operation.side == "learner":
        store._incarnation = 0
    count = 0

    def statement(text: str) -> None:
        nonlocal count
        if text.startswith("--"):  # a trigger's own, within another one
            return
        if count == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with store._database.connection() as db:  # type: ignore[attr-defined]
        db.set_trace_callback(statement)
    assert operation.call(store) == operation.want
    return count


def kill_at_each(folder: pathlib.Path, operation: Operation) -> None:
    folder.mkdir()
    with contextlib.closing(SqliteStore(folder / "before.db")) as store:
        store.acquire_leadership("here", lease_s=1e6)
        operation.before({"learner": store, "actor": store})
        store._incarnation = None  # nor resigns
    counted = in_child(copy(folder, "after.db"), operation, kill_before=None)
    assert counted > 0
    for number in range(counted):
        assert in_child(copy(folder, f"killed-{number}.db"), operation, kill_before=number) == -signal.SIGKILL
    # Killed after its last statement, before its caller hears of it.
    in_child(copy(folder, f"done-{counted}.db"), operation, kill_before=None)


def copy(folder: pathlib.Path, name: str) -> pathlib.Path:
    shutil.copy(folder / "before.db", folder / name)
    return folder / name


def in_child(path: pathlib.Path, operation: Operation, *, kill_before: int | None) -> int:
    """What `operate` returned in a process of its own, which doesn't close the store; or the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            code = operate(path, operation, kill_before=kill_before)
        except BaseException as e:
            print(repr(e), file=sys.stderr)
            code = 255
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != 255, "see above"
    return code


if __name__ == "__main__":
    for one in OPERATIONS:
        kill_at_each(pathlib.Path(sys.argv[1]) / one.name, one)
