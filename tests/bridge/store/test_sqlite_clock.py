"""Leases of a SQLite store under clocks that are set, stand still between calls, and begin again at a reboot."""

import pathlib
import sqlite3

import pytest

from bridge.store.open import SqliteStore
from bridge.store.sqlite_database import SqliteClock
from tests.bridge.factories import make_ticket

LEASE_S = 30.0


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def waited_until_offered(store: SqliteStore, clock: Clock, *, most_s: float = 8000.0) -> float:
    """Seconds until another actor gets the ticket of one that is dead; asked every second."""
    waited_s = 0.0
    while not store.claim("other", limit=1, lease_s=LEASE_S):
        assert waited_s < most_s
        clock.now_s += 1.0
        waited_s += 1.0
    return waited_s


@pytest.mark.parametrize("back_s", [0.0, 0.5, 2.0, 3600.0, 86400.0 * 365])
@pytest.mark.parametrize("reopens", [False, True])
def test_dead_actors_ticket_is_offered_after_its_lease_however_far_the_clock_went_back(tmp_path, back_s, reopens):
    clock = Clock(1_700_000_000.0)
    store = SqliteStore(tmp_path / "s.sqlite", clock=clock)
    store.put_tickets([make_ticket("a")])
    assert store.claim("dies", limit=1, lease_s=LEASE_S)
    clock.now_s -= back_s
    if reopens:
        store.close()
        store = SqliteStore(tmp_path / "s.sqlite", clock=clock)
    assert LEASE_S - 2.0 <= waited_until_offered(store, clock) <= LEASE_S + 2.0
    store.close()


@pytest.mark.parametrize(
    "steps", [(-100.0, 5.0, -100.0), (-3600.0, 20.0, 3600.0), (-10.0, 0.0, -10.0), (0.9, -50.0, 0.9, -50.0)]
)
def test_stores_time_never_goes_back_over_several_steps(tmp_path, steps):
    clock = Clock(5000.0)
    store, seen = SqliteStore(tmp_path / "s.sqlite", clock=clock), []
    for step in (0.0, *steps):
        clock.now_s += step
        store.put_tickets([])  # nothing is written
        seen.append(store.now_s())
        store.put_tickets([make_ticket(f"t{len(seen)}")])
        seen.append(store.now_s())
    assert all(later >= earlier - 1e-6 for earlier, later in zip(seen, seen[1:], strict=False))
    store.close()


def test_lease_that_was_renewed_after_a_step_back_holds_for_its_time(tmp_path):
    clock = Clock(10_000.0)
    store = SqliteStore(tmp_path / "s.sqlite", clock=clock)
    store.put_tickets([make_ticket("a")])
    store.claim("lives", limit=1, lease_s=LEASE_S)
    clock.now_s -= 3600.0
    assert store.renew("lives", ["a"], lease_s=LEASE_S) == ["a"]
    clock.now_s += LEASE_S - 3.0
    assert store.claim("other", limit=1, lease_s=LEASE_S) == []
    store.close()


def kept(path: pathlib.Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
    return db


class Boots(SqliteClock):
    """A machine's clock since boot, beside its wall clock."""

    def __init__(self, since_boot_s: float, unix_s: float) -> None:
        super().__init__()
        self._reading, self._unix = Clock(since_boot_s), Clock(unix_s)


@pytest.mark.parametrize(
    ("unix_after_s", "want_s"),
    [
        (1_700_000_600.0, 1_700_000_600.0),  # down for ten minutes: leases of before are over
        (1_600_000_000.0, 1_700_000_002.0),  # its wall clock was lost: the store goes on from where it was
    ],
)
def test_reboot_goes_on_in_unix_time_or_from_where_the_store_was(tmp_path, unix_after_s, want_s):
    db = kept(tmp_path / "a")
    before = Boots(86_400.0, 1_700_000_000.0)
    assert before.tick(db) == before.look(db) == pytest.approx(1_700_000_000.0)
    after = Boots(12.0, unix_after_s)
    assert after.tick(db) == pytest.approx(want_s)
    later = Boots(13.5, 0.0)  # whatever the wall clock says meanwhile
    assert later.look(db) == pytest.approx(want_s + 1.5)


def test_wall_clock_set_while_the_machine_runs_moves_nothing(tmp_path):
    db = kept(tmp_path / "a")
    first = Boots(1000.0, 1_700_000_000.0).tick(db)
    for since_boot_s, unix_s in ((1010.0, 1_700_009_999.0), (1020.0, 1.0)):
        assert Boots(since_boot_s, unix_s).tick(db) == pytest.approx(first + since_boot_s - 1000.0)


def test_readings_close_to_the_kept_one_write_nothing(tmp_path):
    db = kept(tmp_path / "a")
    Boots(1000.0, 5e8).tick(db)
    changes = db.total_changes
    Boots(1000.4, 5e8).tick(db)
    Boots(999.9, 5e8).tick(db)
    assert db.total_changes == changes
