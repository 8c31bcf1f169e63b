"""The learner's store: who leads a run, and where a run lives."""

import contextlib
import pathlib

import pytest

from bridge.credentials import Token
from bridge.files import lock_owner
from bridge.snapshots.snapshot_format import check_signature
from bridge.store.open import SqliteStore
from bridge.store.store_types import LearnerLivesError
from configs.run_folder import set_up_run
from configs.schema import Config
from configs.sections import RunConfig, StoreConfig, SupervisionConfig
from learner import run_context as learner_store
from learner.run_context import acquire_leadership, announcer, open_run_store
from tests.bridge.factories import make_announcement

LEAD_S = 30.0


class Clock:
    """The store's, and the learner's: it goes on when the learner sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.while_asleep = lambda: None
        monkeypatch.setattr(learner_store.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(learner_store.time, "sleep", self.sleep)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.while_asleep()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def config_in(folder: pathlib.Path) -> Config:
    config = Config(
        preset="test", run=RunConfig(dir=str(folder)), supervision=SupervisionConfig(heartbeat_timeout_s=LEAD_S)
    )
    set_up_run(config)
    return config


@pytest.fixture
def open_store(tmp_path, clock):
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(contextlib.closing(SqliteStore(tmp_path / "store.sqlite", clock=clock)))


def test_learner_in_the_same_folder_leads_at_once(open_store, tmp_path, clock):
    config = config_in(tmp_path / "run")
    assert [acquire_leadership(open_store(), config, tmp_path / "run") for _ in range(3)] == [0, 1, 2]
    assert clock.now_s == 1000.0


def test_learner_elsewhere_waits_for_the_end_of_a_dead_ones_lease(open_store, tmp_path, clock):
    here, there = config_in(tmp_path / "here"), config_in(tmp_path / "there")
    acquire_leadership(open_store(), here, tmp_path / "here")
    assert acquire_leadership(open_store(), there, tmp_path / "there") == 1
    assert LEAD_S <= clock.now_s - 1000.0 <= LEAD_S + 2


def test_learner_elsewhere_is_refused_while_one_lives(open_store, tmp_path, clock):
    here, there = config_in(tmp_path / "here"), config_in(tmp_path / "there")
    living = open_store()
    acquire_leadership(living, here, tmp_path / "here")
    clock.while_asleep = lambda: living.renew_leadership(lease_s=LEAD_S)
    with pytest.raises(LearnerLivesError, match="has another learner"):
        acquire_leadership(open_store(), there, tmp_path / "there")
    living.renew_leadership(lease_s=LEAD_S)


def test_place_is_the_same_however_the_folder_is_named_and_another_where_another_folder_took_its_name(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    assert lock_owner(folder) == lock_owner(tmp_path / "link") == lock_owner(tmp_path / "x" / ".." / "run")
    before = lock_owner(folder)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    assert lock_owner(folder) != before


def test_run_of_a_store_may_be_served_by_the_role_that_it_names(tmp_path, monkeypatch):
    created = []
    monkeypatch.setattr(learner_store, "create_run", lambda url, **fields: created.append((url, fields["actor_role"])))
    config = Config(preset="test", run=RunConfig(dir=str(tmp_path / "run")), store=StoreConfig(actor_role="site_b"))
    set_up_run(config)
    open_run_store(config, tmp_path / "run").close()
    assert created == [(f"sqlite:///{tmp_path}/run/store.sqlite", "site_b")]


TOKEN = Token("0123456789abcdef" * 2)


def test_announcement_is_signed_where_there_is_a_token_and_plain_where_there_is_none(tmp_path):
    announcement = make_announcement(sources=("https://learner:1/v",))
    got = []
    for token in (TOKEN, None):
        with contextlib.closing(SqliteStore(tmp_path / f"{token is None}.sqlite")) as store:
            announcer(store, token)(announcement)
            got.append(store.announced())
    signed, plain = got
    assert (signed.manifest, signed.sources) == (announcement.manifest, announcement.sources)
    check_signature(signed, TOKEN)
    assert plain == announcement
