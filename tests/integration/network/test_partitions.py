"""Each leg between learner, store and actors cut and healed: who waits and how long; nothing is lost or doubled."""

import itertools
import json
import time
from typing import Any

import pytest

from tests.integration.network.cluster import Cluster, memory_bytes
from tests.integration.network.conftest import SLOW as SPARE
from tests.integration.network.conftest import NewCluster
from tests.integration.network.namespaces import HOSTS

pytestmark = pytest.mark.integration

LEGS = list(itertools.combinations(HOSTS, 2))
RECOVERY_S = 30.0
"""Where the machine is shared; tests/bench/results/network.md says what it takes."""
SETTLE_S = 2.0
"""What was on its way when a leg was cut has arrived by then."""
MAX_GROWTH = 1.1
SOME = 30
"""Groups a version, and to wait for."""


@pytest.mark.parametrize(
    ("cut_s", "recovery_s"),
    [(4.0, RECOVERY_S), pytest.param(60.0, 10.0, marks=pytest.mark.nightly)],
    ids=["short", "long"],
)
def test_each_leg_is_cut_and_heals_without_loss_and_memory_stays_flat(
    new_cluster: NewCluster, cut_s: float, recovery_s: float
):
    with new_cluster(num_groups=10**6, groups_per_version=SOME, token_s=0.02) as run:
        run.start_learner()
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait_for_groups(2 * SOME)
        rows = [cut(run, leg, cut_s=cut_s) for leg in LEGS]
        print(json.dumps(rows))
        run.finish()
        run.check()
    for row in rows:
        assert row["groups_meanwhile"] == 0, rows  # or it was no partition
        assert row["recovery_s"] < recovery_s, rows
        assert row["memory_growth"] < MAX_GROWTH, rows


def test_learner_that_is_cut_off_is_superseded_and_ends_and_the_run_goes_on_elsewhere(new_cluster: NewCluster):
    with new_cluster(num_groups=10**6, groups_per_version=20) as run:
        run.start_learner()
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait_for_groups(60)
        with run.where.net.partition("learner", "store"):
            run.wait(run.is_held_up, "the cut is noticed")
            num_groups = run.num_trained
            old = run.move_learner(SPARE)
            run.wait_for_groups(num_groups + 60)
        run.wait(lambda: old.poll() is not None, "the old learner's end")
        assert old.returncode == 1
        (line,) = [x for x in run.log("learner").splitlines() if x.startswith("error: ")]
        assert "another learner" in line.lower(), line
        run.finish()
        run.check()
        assert max(v.incarnation for v in run.versions("a")) == 1


def cut(run: Cluster, leg: tuple[str, str], *, cut_s: float) -> dict[str, Any]:
    """Cuts a leg for a while; says how long the run took to go on, and how its memory grew meanwhile."""
    run.wait_for_groups(run.num_trained + SOME)
    pids = run.pids()
    before = {pid: memory_bytes(pid) for pid in pids}
    with run.where.net.partition(*leg):
        start = time.monotonic()
        run.pass_time(SETTLE_S)
        settled = run.num_trained
        if leg == ("learner", "actors"):  # the store is there, and nobody can fetch what new tickets ask for
            run.wait(run.is_held_up, "no actor follows any more", deadline_s=60)
            settled = run.num_trained
        run.pass_time(cut_s - (time.monotonic() - start))
        num_trained = run.num_trained
        after = {pid: memory_bytes(pid) for pid in pids}
        assert run.pids() == pids, run.logs()
    healed_s = time.time()
    run.wait_for_groups(num_trained + SOME, deadline_s=60)
    first_s = run.ledger[num_trained].trained_s
    return {
        "leg": "-".join(leg),
        "cut_s": round(time.monotonic() - start, 1),
        "recovery_s": round(first_s - healed_s, 2),
        "groups_meanwhile": num_trained - settled,
        "memory_growth": round(max(after[pid] / before[pid] for pid in pids), 3),
    }
