"""What the bench predicts, by hand, and that its clients do what it says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.tools.plan.profile import StoreProfile
from tests.bench.cluster import said
from tests.bench.cluster.__main__ import PAGE, PROFILE
from tests.bench.cluster.figure import variants
from tests.bench.cluster.measured import Case, groups_per_s
from tests.bench.cluster.predicted import predicted_download_s, predicted_groups_per_s
from tests.integration.support.store_torture import Urls


def case_of(**fields) -> Case:
    sizes: dict[str, Any] = dict(
        engine="sqlite", num_samples=2, num_tokens=100, num_producers=2, num_lookers=0, num_groups=5
    )
    return Case(**(sizes | fields))


def test_groups_of_a_store_without_other_costs_are_one_over_their_seconds():
    # 2 x (100 x 13 + 155) + 2 x 4 + 155 bytes; each group is claimed once.
    store = StoreProfile(group_s=0.1, byte_s=1e-4, claim_call_s=0.05)
    assert predicted_groups_per_s(store, case_of()) == pytest.approx(1 / (0.1 + 3073e-4 + 0.05), rel=1e-3)


def test_actors_that_look_take_their_part_of_the_store():
    # 12 actors with 5.6 reads a second each: leases, announcements, the end, and one with every heartbeat.
    store = StoreProfile(group_s=0.1, read_s=0.005)
    looks = 12 * (1 + 4 + 0.1 + 0.5) * 0.005
    got = predicted_groups_per_s(store, case_of(num_lookers=10))
    assert got == pytest.approx((1 - looks) / 0.1, rel=1e-3)


def test_a_download_is_as_long_as_its_bytes_on_the_link():
    assert predicted_download_s(606_160_896, link_bytes_per_s=100e6) == pytest.approx(6.0616, rel=1e-3)


def test_a_store_ten_times_as_fast_is_that_in_all_its_seconds():
    last = variants({"group_s": 0.5, "read_s": 0.25, "max_connections": 100})[-1]
    assert "profile.store.group_s=0.05" in last and "profile.store.read_s=0.025" in last


def test_page_says_what_its_profile_comes_to():
    profile, text = json.loads(PROFILE.read_text()), PAGE.read_text()
    wanted = said.table(profile)
    assert wanted in text, f"the table of {PAGE} is to be:\n{wanted}"
    network, connections = profile["network"], profile["store"]["max_connections"]
    assert f"faster than {network['weights_bytes'] / network['fetch_bytes_per_s']:.0f} s" in text
    # Two for each actor and the learner, and ten besides: the first number of engines that takes all there are.
    first_out = (connections - 10) // 2 - 1
    assert (
        f"default of {connections} connections" in text and f"store's connections {first_out} | {first_out} |" in text
    )


def test_changes_are_found_to_the_engine():
    assert said.changes(lambda n: (n >= 77) + (n >= 1000)) == [(1, 0), (77, 1), (1000, 2)]
    assert said.changes(lambda n: (n >= 66) + (n >= 70)) == [(1, 0), (66, 1), (70, 2)]  # between two that are tried
    assert said.changes(lambda n: "") == [(1, "")]


def test_table_names_what_gives_out_and_from_where(monkeypatch):
    given = {"generation": 1, "store: looks": 33, "store: groups": 1200}

    def cell(config: Any, profile: Any, *, engines: list[int], learner_chips: list[int]) -> Any:
        (n,) = engines
        name = [name for name, first in given.items() if first <= n][-1]
        part = SimpleNamespace(name=name, full_name=name)
        return [[SimpleNamespace(limit=SimpleNamespace(part=part, groups_per_s=0.0 if n >= 2500 else 1.0))]]

    monkeypatch.setattr(said, "scale", cell)
    rows = said.table(json.loads(PROFILE.read_text())).split("\n")[2:]
    assert len(rows) == 4 and all(row.endswith("| store: looks 33, store: groups 1,200 | 2,500 |") for row in rows)


@pytest.mark.parametrize(("load", "is_kept"), [(2.0, True), (2.1, False), (15.1, False)])
def test_profile_and_page_are_written_where_the_machine_was_quiet(tmp_path: Path, monkeypatch, load, is_kept):
    monkeypatch.setattr(said, "table", lambda profile: f"{said._HEAD}\n| new | {profile['store']} | - |")
    path, page = tmp_path / "profile.json", tmp_path / "page.md"
    path.write_text("old")
    page.write_text(f"before\n\n{said._HEAD}\n| old | x | 1 |\n| old | y | 2 |\n\nafter\n")
    was = page.read_text()
    line = said.keep({"store": 7}, path, page, load=load, num_cores=2)
    assert "\n" not in line and f"load average {load}" in line and ("stays" in line) is not is_kept
    if is_kept:
        assert json.loads(path.read_text()) == {"store": 7}
        assert page.read_text() == f"before\n\n{said._HEAD}\n| new | 7 | - |\n\nafter\n"
    else:
        assert (path.read_text(), page.read_text()) == ("old", was)


def test_page_without_the_table_is_refused_and_nothing_is_written(tmp_path: Path):
    path, page = tmp_path / "profile.json", tmp_path / "page.md"
    page.write_text("no table")
    with pytest.raises(ValueError, match="0 tables"):
        said.keep(json.loads(PROFILE.read_text()), path, page, load=0.0, num_cores=2)
    assert not path.exists()


@pytest.mark.integration
@pytest.mark.heavy
def test_groups_come_from_producers_beside_actors_that_look(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    assert groups_per_s(Urls(learner=url, actor=url), case_of(num_lookers=3)) > 0
