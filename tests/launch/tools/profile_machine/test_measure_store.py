"""A store is measured on a real one, with real clients, at a fraction of the size."""

import dataclasses
import json

import pytest

from bridge.store.admin import open_runs
from configs.sections import StoreConfig
from launch.tools.plan.profile import StoreProfile
from launch.tools.profile_machine import measure_store as profile_store
from tests.postgres import ACTOR

pytestmark = [pytest.mark.integration, pytest.mark.heavy]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in dict(_NUM_GROUPS=(20, 5), _CALL_S=0.2, _NUM_TOLD=10, _NUM_OTHERS=10, _MOST_LISTENERS=5).items():
        monkeypatch.setattr(profile_store, name, value)


def test_sqlite_store_is_measured(tmp_path):
    got = profile_store.measure_store(f"sqlite:///{tmp_path}/store.db", ACTOR, tmp_path)
    profile = StoreProfile(**got)
    assert got.keys() < {f.name for f in dataclasses.fields(StoreProfile)}
    assert 0 < profile.read_s < profile.group_s < 5
    assert profile.claim_call_s > 0 and profile.write_s > 0
    assert profile.listener_s == 0 and profile.max_connections == 0


def test_postgres_store_is_measured_and_left_as_it_was(postgres, tmp_path):
    learner, _ = postgres.create_store()
    profile = StoreProfile(**profile_store.measure_store(learner, ACTOR, tmp_path))
    assert 0 < profile.read_s < profile.group_s < 5
    assert profile.max_connections == 100
    with open_runs(learner) as runs:
        assert runs.all() == []


def test_store_is_put_into_the_file_and_the_rest_is_left(tmp_path):
    out = tmp_path / "profile.json"
    out.write_text(json.dumps({"num_engines": 3, "store": {"group_s": 77}}))
    profile_store.put_store(StoreConfig(), out)
    profile = json.loads(out.read_text())
    assert profile["num_engines"] == 3 and 0 < StoreProfile(**profile["store"]).group_s < 5
    out.write_text("no profile")
    with pytest.raises(ValueError, match="exists and is not a profile"):
        profile_store.put_store(StoreConfig(), out)
