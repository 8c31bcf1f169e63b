"""How long the hosts of a learner that publishes wait for each other, by its config."""

import dataclasses
import pathlib
import threading

import jax
import jax.numpy as jnp
import pytest

from configs import sections
from learner.distributed.channel import Channel, Processes
from learner.publish.commit import WAIT_S
from learner.publish.open_publisher import open_publisher
from tests.learner.streams import MODEL, config_of, fresh_params

DEADLINE_S = 60.0


class Follower(Processes, Channel):
    """A learner's second process, and its channels: the leader publishes nothing; how long it was waited for."""

    index, count, is_leader = 1, 2, False

    def __init__(self, name: str = "") -> None:
        self.name, self.waits_s, self.is_asked = name, [], threading.Event()
        self.channels: dict[str, Follower] = {}

    def channel(self, name: str) -> "Follower":
        return self.channels.setdefault(name, Follower(name))

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        self.waits_s.append(timeout_s)
        self.is_asked.set()
        return {"places": b"1", "hand over": b"0"}.get(self.name, b"")

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        return []


@pytest.mark.parametrize(("retry_s", "at_least_s"), [(10.0, WAIT_S), (600.0, 601.0), (1000.0, 1001.0)])
def test_leader_that_waits_for_its_store_before_it_begins_a_version_is_waited_for(
    tmp_path: pathlib.Path, retry_s: float, at_least_s: float
):
    run = sections.RunConfig(dir=str(tmp_path / "run"))
    config = dataclasses.replace(config_of(), run=run, store=sections.StoreConfig(outage_timeout_s=retry_s))
    config = dataclasses.replace(config, publish=dataclasses.replace(config.publish, snapshot_dir=str(tmp_path)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run_id").write_text("r")
    hosts = Follower()
    published = open_publisher(
        config,
        tmp_path / "run",
        tokenizer_hash="t",
        names=MODEL.param_names,
        hosts=hosts,
        token=None,
        destinations=[],
    )
    try:
        published.publish(jax.tree.map(jnp.asarray, fresh_params()), step=1)
        begins = hosts.channels["publish"]
        assert begins.is_asked.wait(DEADLINE_S)
        assert begins.waits_s[0] >= at_least_s
    finally:
        published.close()
