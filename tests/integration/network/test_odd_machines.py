"""Machines that are off: a clock by an hour, a link of 1 MB/s."""

import json
import re

import pytest

from tests.integration.network.conftest import SLOW, SLOW_BYTES_PER_S, NewCluster

pytestmark = pytest.mark.integration

HOUR_S = 3600.0


def test_clocks_an_hour_off_change_no_lease_and_no_sign_of_life(new_cluster: NewCluster):
    with new_cluster(num_groups=10**6, groups_per_version=50) as run:
        run.start_learner()
        clocks = {"ahead": HOUR_S, "behind": -HOUR_S, "right": 0.0}
        for name, clock_s in clocks.items():
            run.start_actor(name, clock_s=clock_s)
        run.wait(lambda: {e.actor for e in run.ledger} == set(clocks), "each has made what is trained")
        run.wait(lambda: run.num_trained >= 100, "two versions were published")
        beats = run.ask_store(lambda store: {b.process: store.now_s() - b.time_s for b in store.heartbeats()})
        assert all(-5 < age_s < 30 for age_s in beats.values()), beats
        run.finish()  # with every actor on the last version: none was taken to be gone
        run.check()
        assert not any("lease lost" in run.log(name) for name in clocks), run.logs()


def test_slow_reader_holds_up_neither_the_learner_for_long_nor_anyone_else(new_cluster: NewCluster):
    reader_grace_s, model_bytes = 1.0, 8 * 2**20
    assert model_bytes / SLOW_BYTES_PER_S > 4 * reader_grace_s
    with new_cluster(num_groups=10**6, model_bytes=model_bytes, reader_grace_s=reader_grace_s) as run:
        run.start_learner()
        run.start_actor("slow", host=SLOW)
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait(lambda: min(len(run.versions(name)) for name in "ab") >= 4, "the others follow")
        run.wait(lambda: bool(run.versions("slow")), "the slow one gets a whole version while newer ones come")
        assert run.versions("slow")[0] < run.versions("a")[-1]
        publishes_s = [float(s) for s in re.findall(r"published version=\S+ seconds=(\S+)", run.log("learner"))]
        assert max(publishes_s) < reader_grace_s + 5.0, publishes_s
        run.finish()  # the slow one too comes to serve the last version
        run.check()
        num_versions = {name: len(run.versions(name)) for name in run.actors}
        print(
            json.dumps({"longest_publish_s": max(publishes_s), "publishes": len(publishes_s), "served": num_versions})
        )
        assert run.versions("slow")[-1] == run.versions("a")[-1]
        assert len(run.versions("slow")) < len(run.versions("a"))
