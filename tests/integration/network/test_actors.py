"""Actors elsewhere join, leave and are killed in every phase of an update; store and snapshots behind TLS."""

import signal

import pytest

from tests.integration.network.conftest import NewCluster
from tests.integration.network.simulated.engine import PHASES

pytestmark = [pytest.mark.integration]


def test_eight_actors_join_leave_and_die_in_every_phase_and_every_group_is_trained_once(new_cluster: NewCluster):
    # Three chunks a download; slow enough for a dozen processes on two cores to keep up with.
    with new_cluster(num_groups=10**6, groups_per_version=40, window=64, model_bytes=12 * 2**20, token_s=0.03) as run:
        run.start_learner()
        doomed = {f"dies-at-{phase}": f"{phase}:{step}" for step, phase in enumerate(PHASES, start=1)}
        for name, die_at in doomed.items():
            run.start_actor(name, die_at=die_at)
        for name in ("stays", "leaves", "is-killed"):
            run.start_actor(name)
        run.wait_for_groups(20)
        for name in doomed:
            assert run.wait_for_death(name) == -signal.SIGKILL, run.logs()
        assert run.stop_actor("leaves") == 0
        run.kill_actor("is-killed")
        for name in ("joins-late", "joins-last"):
            run.start_actor(name)
        for name in ("joins-late", "joins-last"):
            run.wait(lambda name=name: bool(run.versions(name)), f"{name} serves")
        run.wait_for_groups(run.num_trained + 40)
        run.finish()
        run.check()
        newest = max(v for name in run.actors for v in run.versions(name))
        assert newest.step == run.told.last_step
        for name in run.actors:
            served = run.versions(name)
            assert served == sorted(set(served)) and served[-1] == newest
        assert {"stays", "joins-late", "joins-last"} <= {e.actor for e in run.ledger}


@pytest.mark.nightly
def test_killed_learner_goes_on_where_its_ledger_ends_and_its_actors_follow(new_cluster: NewCluster):
    with new_cluster(num_groups=200, groups_per_version=20) as run:
        run.start_learner()
        for name in ("a", "b"):
            run.start_actor(name)
        for num_groups in (30, 90, 150):
            run.wait_for_groups(num_groups)
            run.kill_learner()
            run.start_learner()
        run.wait_for_end()
        run.check()
        assert {v.incarnation for v in run.versions("a")} == {0, 1, 2, 3}
