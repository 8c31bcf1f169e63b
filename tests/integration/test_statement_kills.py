"""Every operation on SQLite by a process that is killed before each of its statements: done whole, or not at all."""

import contextlib
import pathlib

import pytest

from bridge.store.open import SqliteStore
from tests.integration.support.processes import spawn
from tests.integration.support.store_operations import BEAT, OPERATIONS, dump_sqlite

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What is left of each operation, killed before each of its statements."""
    folder = tmp_path_factory.mktemp("kills")
    process = spawn("tests.integration.support.statement_kills", folder)
    assert process.wait(timeout=300) == 0
    return folder


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
def test_operation_of_a_process_killed_at_any_statement_was_done_whole_or_not_at_all(operation, folder):
    left = folder / operation.name
    before, after = (dump_sqlite(str(left / f"{name}.db")) for name in ("before", "after"))
    killed = sorted(left.glob("killed-*.db"))
    assert len(killed) >= 3  # BEGIN, what it does, COMMIT
    for file in killed:
        # A rollback deletes later groups in transactions of their own, and is repeated at the restart.
        assert dump_sqlite(str(file)) in ([before, after] if operation.name == "roll_back" else [before]), file.name
        with contextlib.closing(SqliteStore(file)) as store:  # nobody's lock is left
            store.heartbeat(BEAT)
    (done,) = left.glob("done-*.db")
    assert dump_sqlite(str(done)) == after
