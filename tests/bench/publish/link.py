"""The pause for new weights that came over a link of 100 MB/s, beside the pause for weights out of shared memory.

    python -m tests.bench.publish.link SIZE

Learner and actor are two network namespaces; `tc tbf` bounds the link between them. Both actors have their real source
and their real client (prefetch, verify, swap); what stands for the engine loads by copying every mapped tensor into an
array of its own, which is the part of a pause that depends on where the weights lie. They take their turns.
"""

import asyncio
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

import numpy as np

from bridge import codec
from bridge.credentials import Token
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Announcement
from tests.bench.harness.parts import print_measured
from tests.bench.publish.network import RUN, provide_secrets, random_tensors
from tests.bridge.snapshots.whole import write_whole
from tests.integration.network import namespaces

RATE_BYTES_PER_S = 100_000_000
NUM_VERSIONS = 8
NUM_COLD = 2
"""First versions, whose files are not warm yet."""
PORT = 8443
THIS = "tests.bench.publish.link"


def measure(size_name: str) -> dict[str, Any]:
    """Seconds and the ratio; only `link_unavailable`, and why, where no namespaces can be made."""
    if (reason := namespaces.unavailable()) is not None:
        return {"pause_ratio_slow_link": None, "link_unavailable": reason}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        namespaces.network(("learner", "actor"), rate_bytes_per_s=RATE_BYTES_PER_S) as net,
    ):
        folder, learner = pathlib.Path(name), net["learner"]
        token, _ = provide_secrets(folder / "secrets", learner.address)
        writer = SnapshotWriter(folder / "weights", run=RUN, tokenizer_hash="t", token=token)
        arguments = (f"--folder={folder / 'weights'}", f"--listen={learner.address}:{PORT}", "--scheme=https")
        log = open(folder / "server.log", "w")  # noqa: SIM115 - of a process that outlives this line
        processes = [
            learner.spawn("launch.services.snapshot_server", *arguments, shm=pathlib.Path("/dev/shm"), output=log),
            _actor([sys.executable, "-m", THIS, "actor", "local", size_name, str(folder)]),
            _actor(net["actor"].command(sys.executable, "-m", THIS, "actor", "remote", size_name, folder)),
        ]
        try:
            url = f"https://{learner.address}:{PORT}"
            rows = _rows(writer, token, random_tensors(size_name), url, folder, processes[1:])
        finally:
            for process in processes:
                process.kill()
                process.wait()
            writer.remove()
    pauses = {side: [r[side]["pause_s"] for r in rows] for side in ("local", "remote")}
    prefetches = {side: [r[side]["prefetch_s"] for r in rows] for side in ("local", "remote")}
    ratios = [r / loc for r, loc in zip(pauses["remote"], pauses["local"], strict=True)]
    return {
        "pause_ratio_slow_link": statistics.median(ratios),
        "pause_shared_memory_s": statistics.median(pauses["local"]),
        "pause_slow_link_s": statistics.median(pauses["remote"]),
        "prefetch_shared_memory_s": statistics.median(prefetches["local"]),
        "prefetch_slow_link_s": statistics.median(prefetches["remote"]),
    }


def _rows(
    writer: SnapshotWriter,
    token: Token,
    tensors: dict[str, np.ndarray],
    url: str,
    folder: pathlib.Path,
    actors: list[Any],
) -> list[dict[str, Any]]:
    rows = []
    for step in range(NUM_VERSIONS):
        # Other bits in every chunk, so that each is fetched.
        changed = {name: (x.view(np.uint16) ^ np.uint16(step)).view(x.dtype) for name, x in tensors.items()}
        manifest = write_whole(writer, Version(incarnation=0, step=step), changed, dtype="bfloat16")
        source = version_url(url, RUN, manifest.version)
        announcement = folder / f"announcement-{step}"
        signed = sign(Announcement(manifest=manifest, sources=(source,)), token)
        announcement.write_bytes(codec.encode(signed))
        rows.append({})
        for side, actor in zip(("local", "remote"), actors, strict=True):
            print(announcement, file=actor.stdin, flush=True)
            rows[-1][side] = json.loads(actor.stdout.readline())
    return rows[NUM_COLD:]


def _actor(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class ArrayEngine:
    """Serves nothing; loads weights into arrays."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.version: Version | None = None
        self._tensors = {name: np.array(x) for name, x in tensors.items()}

    async def swap_weights(self, path: pathlib.Path, manifest: Any) -> Any:
        """As the real one: looks at the tensors while it generates, loads them in the pause."""
        from actor.engine_protocol import SwapTimings
        from bridge.snapshots.verified_copy import map_tensors

        start = time.perf_counter()
        shapes = {name: x.shape for name, x in map_tensors(path, manifest).items()}
        assert shapes == {name: x.shape for name, x in self._tensors.items()}
        paused = time.perf_counter()
        for name, x in map_tensors(path, manifest).items():
            np.copyto(self._tensors[name], x)
        self.version = manifest.version
        end = time.perf_counter()
        return SwapTimings(check_s=paused - start, pause_s=end - paused, load_s=end - paused)


class AnnouncedFile:
    """A store that announces what it was told."""

    announcement: Announcement | None = None

    def announced(self) -> Announcement | None:
        """What it was told last."""
        return self.announcement


def act(side: str, size_name: str, folder: pathlib.Path, told: IO[str]) -> None:
    """Updates to each version that is announced, and says how long each part took."""
    from actor.weights.client import WeightClient
    from actor.weights.source import LocalSource, RemoteSource
    from bridge.credentials import read_tls, read_token
    from bridge.snapshots.remote.fetcher import SnapshotFetcher
    from bridge.snapshots.remote.shared_download import SharedDownload
    from bridge.timeline import Timeline

    tensors = random_tensors(size_name)
    expected = {name: (str(x.dtype), x.shape) for name, x in tensors.items()}
    keys: dict[str, Any] = {"run": RUN, "tokenizer_hash": "t", "expected": expected}
    store: Any = AnnouncedFile()
    if side == "local":
        source: Any = LocalSource(folder / "weights", folder / "copy", **keys)
    else:
        fetcher = SnapshotFetcher(token=read_token(), tls=read_tls(), **keys)
        source = RemoteSource(store, SharedDownload(folder, run=RUN, fetcher=fetcher))
    engine: Any = ArrayEngine(tensors)
    client = WeightClient(source, engine, timeline=Timeline(folder / "events", side))

    async def update() -> None:
        manifest = await client.prefetch()
        assert manifest is not None and await client.swap(manifest)

    for line in told:
        store.announcement = codec.decode(Announcement, pathlib.Path(line.strip()).read_bytes())
        asyncio.run(update())
        print(json.dumps(client.timings), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "actor":
        act(sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4]), sys.stdin)
    else:
        print_measured(measure, sys.argv[1])
