"""A full disk on the machine of the actor, the learner or the store: a clear error or a wait; nothing is lost."""

import contextlib
import dataclasses
import json
import time
from pathlib import Path

import pytest

from tests.integration.network.cluster import cluster
from tests.integration.network.conftest import NewCluster
from tests.integration.network.places import Places, fill, resize, store_server, tmpfs

pytestmark = pytest.mark.integration

MIB = 2**20


def test_actor_without_room_for_weights_says_so_others_go_on_and_it_serves_when_there_is_room(
    new_cluster: NewCluster, where: Places
):
    with tmpfs(where.root / "shm", num_bytes=2 * MIB) as shm, new_cluster(num_groups=10**6, model_bytes=8 * MIB) as run:
        run.start_learner()
        run.start_actor("has-room")
        run.start_actor("is-full", shm=shm)
        run.wait_for_groups(40)
        run.wait(lambda: "bytes more for snapshots" in run.log("is-full"), "the refusal")
        assert run.versions("is-full") == []
        resize(shm, num_bytes=64 * MIB)
        run.wait(lambda: len(run.versions("is-full")) > 1, "it serves, and follows")
        run.finish()
        run.check()
        assert run.versions("is-full")[-1] == run.versions("has-room")[-1]


def test_learner_without_room_ends_with_one_line_keeps_what_it_has_and_goes_on_later(
    new_cluster: NewCluster, where: Places
):
    disk = tmpfs(where.root / "learner", num_bytes=2 * MIB)
    with disk as folder, new_cluster(num_groups=100, model_bytes=4 * MIB, snapshot_dir=str(folder)) as run:
        run.told.ledger.symlink_to(folder / "ledger")
        run.start_actor("a")
        run.start_learner()
        (line,) = run.wait_for_failure()
        assert "bytes more for snapshots" in line
        resize(folder, num_bytes=64 * MIB)
        run.start_learner()
        run.wait_for_groups(30)
        filler = fill(folder)
        *_, line = run.wait_for_failure()
        assert "No space left on device" in line
        filler.unlink()
        run.start_learner()
        run.wait_for_end()
        run.check()


@pytest.mark.nightly
def test_store_without_room_holds_the_run_up_and_loses_nothing(where: Places, tmp_path: Path):
    with contextlib.ExitStack() as parts:
        disk = parts.enter_context(tmpfs(where.root / "store-disk", num_bytes=160 * MIB))
        full = dataclasses.replace(where, store=disk / "store", port=where.port + 1)
        server = parts.enter_context(store_server(full))
        run = parts.enter_context(cluster(full, tmp_path, "full", num_groups=10**6, response_tokens=500, token_s=0.002))
        run.start_learner()
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait_for_groups(40)
        filler = fill(disk)
        run.wait(lambda: run.is_held_up(for_s=3.0), "the run is held up")
        run.pids()  # nobody has ended
        num_groups = run.num_trained
        server_lived = server.poll() is None
        filler.unlink()
        if not server_lived:  # it ends where its log of transactions has no room
            parts.enter_context(store_server(full))
        room_s = time.time()
        run.wait_for_groups(num_groups + 1)
        print(json.dumps({"server_lived": server_lived, "goes_on_after_s": run.ledger[num_groups].trained_s - room_s}))
        run.finish()
        run.check()
