"""Learner processes of a real `jax.distributed`: each publishes and serves its own rows, and an actor downloads all.

What it puts together is byte for byte what a single process writes.
"""

import contextlib
import pathlib
import subprocess
import threading
from collections.abc import Iterator

import pytest

from bridge import codec
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.verified_copy import is_verified
from bridge.weight_types import Announcement
from tests.learner import several_hosts

_PUBLISH = """
import dataclasses, json, pathlib, jax, numpy as np
from bridge import codec
from bridge.files import replace_file
from bridge.credentials import Tls
from bridge.snapshots.snapshot_format import version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from configs.sections import PublishConfig
from learner.distributed.sharding import make_mesh, param_shardings
from learner.model.decoder import abstract_params
from learner.publish.destinations import Destination
from learner.publish.publisher import Publisher
from tests.bridge.snapshots.served import serving
from tests.learner.streams import MODEL

root, axes = pathlib.Path(sys.argv[4]), json.loads(sys.argv[5])
architecture = dataclasses.replace(MODEL, vocab_size=96, hidden_size=64, intermediate_size=128)

def params_of(step):
    random = np.random.default_rng(0)
    made = jax.tree.map(lambda x: random.normal(0, 1, x.shape).astype(np.float32), abstract_params(architecture))
    for leaf in jax.tree.leaves(made):
        leaf.reshape(-1)[: 2 * step] += 1.0
    shardings = param_shardings(made, make_mesh(**axes))
    put = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return jax.tree.map(put, made, shardings)

folder = root / f"machine-{index}"
writer = SnapshotWriter(
    folder, run="r", tokenizer_hash="t", host=index, num_hosts=count, full_every=9, chunk_bytes=4096
)
with serving(folder) as running:
    put = lambda m: (version_url(running.url, "r", m.version),)
    destination = Destination(name="server", put=put, is_required=True)
    announce = lambda a: replace_file(root / f"announced-{a.manifest.version.step}", codec.encode(a))
    published = Publisher(
        writer, architecture.param_names, PublishConfig(), incarnation=7 * hosts.is_leader, dtype="bfloat16",
        hosts=hosts, destinations=[destination], announce=announce if hosts.is_leader else None,
    )
    for step in (1, 2):
        params = params_of(step)
        published.publish(params, step=step)
        for leaf in jax.tree.leaves(params):
            leaf.delete()  # as the next step does
        published.finish()
        print(step, flush=True)
        input()
    published.close()
"""


@contextlib.contextmanager
def learner(root: pathlib.Path, axes: dict[str, int], count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that publish a version, and the next one for each line that they are sent."""
    root.mkdir()
    processes = several_hosts.start(several_hosts.CONNECT + _PUBLISH, root, json_of(axes), count=count)
    try:
        yield processes
        go_on(processes)  # they end together
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()


def go_on(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def json_of(axes: dict[str, int]) -> str:
    return str(axes).replace("'", '"')


def fetched(root: pathlib.Path, axes: dict[str, int], count: int) -> list[tuple[bytes, int, int]]:
    """Of each version: the file that an actor has, how many pieces it is of, and bytes that came over the network."""
    got: list[tuple[bytes, int, int]] = []
    fetcher = SnapshotFetcher(run="r", tokenizer_hash="t")
    with learner(root, axes, count) as processes:
        for step in (1, 2):
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == f"{step}\n", process.communicate(timeout=60)
            announcement = codec.decode(Announcement, (root / f"announced-{step}").read_bytes())
            assert str(announcement.manifest.version) == f"7:{step}"
            into, before = root / f"copy-{step}", root / f"copy-{step - 1}"
            tally = fetcher.fetch(announcement, into, stop=threading.Event(), base=before)
            manifest = is_verified(into)
            assert manifest is not None
            got.append((into.read_bytes()[: manifest.num_bytes], len(manifest.shards), tally.num_bytes))
            if step == 1:
                go_on(processes)
    fetcher.close()
    return got


def check(tmp_path: pathlib.Path, axes: dict[str, int], count: int) -> None:
    many, one = fetched(tmp_path / "many", axes, count), fetched(tmp_path / "one", {}, 1)
    assert [num_pieces for _, num_pieces, _ in many] == [count] * 2
    assert [data for data, _, _ in many] == [data for data, _, _ in one]
    assert many[0][0] != many[1][0]
    assert all(second < first / 4 for (_, _, first), (_, _, second) in (many, one))  # a delta, of every piece


@pytest.mark.integration
def test_two_processes_publish_what_one_does_and_an_actor_puts_it_together(tmp_path):
    check(tmp_path, {"fsdp": 2}, 2)


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize(
    "axes", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"data": 4}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}], ids=json_of
)
def test_four_processes_publish_what_one_does_and_an_actor_puts_it_together(tmp_path, axes):
    check(tmp_path, axes, 4)
