"""Connections of every kind delayed, stalled and reset, in the middle of whatever they carry."""

import contextlib
import random

import pytest

from tests.integration.network.conftest import NewCluster
from tests.integration.network.places import SNAPSHOT_PORT, Places
from tests.integration.network.proxy import proxy

pytestmark = pytest.mark.integration

DELAY_S = 0.002


@pytest.mark.parametrize("num_cuts", [12, pytest.param(200, marks=pytest.mark.nightly)])
def test_connections_cut_again_and_again_double_nothing_and_lose_nothing(
    new_cluster: NewCluster, where: Places, num_cuts: int
):
    net, chance = where.net, random.Random(0)
    store = (net["store"].address, where.port)
    with contextlib.ExitStack() as parts:
        to_store = {
            side: parts.enter_context(proxy(store, on=net[host]))
            for side, host in (("learner", "learner"), ("actor", "actors"))
        }
        to_learner = parts.enter_context(proxy((net["learner"].address, SNAPSHOT_PORT), on=net["actors"]))
        proxies = [*to_store.values(), to_learner]
        for one in proxies:
            one.delay_s = DELAY_S
        run = parts.enter_context(
            new_cluster(
                num_groups=10**6,
                model_bytes=12 * 2**20,
                store_url=where.store_url("learner", through=to_store["learner"]),
                actor_store_url=where.store_url("actor", through=to_store["actor"]),
                advertise=f"https://{net['actors'].address}:{to_learner.address[1]}",
            )
        )
        run.start_learner()
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait_for_groups(20)
        for number in range(num_cuts):
            run.wait_for_groups(run.num_trained + chance.randrange(1, 8))
            one = proxies[number % len(proxies)]
            if chance.random() < 0.2:
                one.stall()
                run.pass_time(0.3)
                one.flow()
            one.cut()
        assert all(one.num_connections > num_cuts / 4 for one in proxies), [p.num_connections for p in proxies]
        run.finish()
        run.check()
        assert run.versions("a")[-1] == run.versions("b")[-1]
