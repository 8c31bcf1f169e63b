"""The tiny preset on a Ray cluster of two nodes, each a network namespace, with real engines."""

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.integration.network.namespaces import network
from tests.integration.network.places import Places, places
from tests.integration.ray.nodes import Nodes, nodes, pgpass_of_both
from tests.integration.support.jobs import SMALL, Job, check_every_group_trained_once
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.heavy]

HOSTS = ("head", "node", "store")
DEADLINE_S = 900.0
NUM_UPDATES = 160


@pytest.fixture(scope="module")
def where() -> Generator[Places]:
    with network(HOSTS) as net, places(net) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(where: Places) -> Generator[Nodes]:
    env = dict(where.learner_env)
    env["PGPASSFILE"] = str(pgpass_of_both(where.store, where.root / "both.pgpass"))
    with nodes(where.net, ("head", "node"), num_cpus=3, env=env) as made:
        yield made


def start(cluster: Nodes, where: Places, folder: Path, *flags: str, **fields: object) -> Job:
    return cluster.drive(where, folder, SMALL | {k.replace("__", "."): v for k, v in fields.items()}, *flags)


def test_learner_over_two_nodes_waits_for_actors_without_a_place_starts_again_when_its_node_tells_it_and_ends_when_told(
    cluster: Nodes, where: Places, tmp_path: Path
):
    job = start(cluster, where, tmp_path / "run", "--actors_on=gpu", learner__num_processes=2, mesh__fsdp=2)
    said = tmp_path / "driver.log"
    try:
        wait_until(
            lambda: "no live actor" in said.read_text() or job.process.poll() is not None,
            "alone",
            deadline_s=DEADLINE_S,
        )
        assert job.process.poll() is None, said.read_text()[-5000:]
        status = cluster.status()
        (pid,) = re.findall(r"learner: pid (\d+)", said.read_text())[-1:]
        os.kill(int(pid), signal.SIGTERM)  # as on a node that is taken away
        again = "restarting (restart 1)"
        wait_until(lambda: again in said.read_text() or job.process.poll() is not None, "a start", deadline_s=120.0)
        assert job.process.poll() is None, said.read_text()[-5000:]
    finally:
        if job.process.poll() is None:
            job.process.terminate()
            job.process.wait(120)
    text = said.read_text()
    assert "learner exited with code 3" in text
    places = set(re.findall(r"learner(?:-1)? is on \S+ \((\S+)\)", text))
    assert places == {where.net["head"].address, where.net["node"].address}
    assert "2.0/6.0 CPU" in status, status  # the learner's two; the actor's GPU is nowhere
    assert "actor-0: waiting for resources (1 CPU, 1 GPU)" in text
    assert "learner | " in text and "stopped step=0" in text
    assert job.process.returncode == 130, text[-5000:]


@pytest.mark.engine
@pytest.mark.nightly
def test_run_on_two_nodes_survives_a_killed_actor(cluster: Nodes, where: Places, tmp_path: Path):
    job = start(
        cluster,
        where,
        tmp_path / "run",
        "--actors_on=cpu",
        actor__num_engines=3,
        learner__num_processes=2,
        mesh__fsdp=2,
        # Rounds of seconds, so that what looks at the run late still finds it at work.
        run__num_updates=NUM_UPDATES,
        rounds__groups_per_round=64,
        checkpoint__every_n_steps=32,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
    )
    said = tmp_path / "driver.log"

    def pids() -> list[str]:
        return re.findall(r"actor-1: pid (\d+)", said.read_text())

    try:
        wait_until(
            lambda: (len(job.rows("step")) >= 2 and bool(pids())) or job.process.poll() is not None,
            "steps",
            deadline_s=DEADLINE_S,
        )
        assert job.process.poll() is None, said.read_text()[-5000:]
        os.kill(int(pids()[-1]), signal.SIGKILL)
        status = cluster.status()  # a Python of its own takes seconds; the killed actor's place is kept
        job.process.wait(DEADLINE_S)
    finally:
        if job.process.poll() is None:
            job.process.terminate()
            job.process.wait(120)
    text = said.read_text()
    assert job.process.returncode == 0, text[-5000:]
    assert "5.0/6.0 CPU" in status, status  # two of the learner, three actors
    assert "actor-1 was killed by signal 9" in text
    check_every_group_trained_once(job, num_updates=NUM_UPDATES, per_update=2)
