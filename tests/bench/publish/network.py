"""Over HTTP and HTTPS on loopback: the bytes into a warm mirror, verified, beside a memcpy of as many.

    python -m tests.bench.publish.network SIZE

The server is the one that a learner starts, in a process of its own, with token and TLS; the reader is the actors'.
Fetched once with its hashes and once without, so that the way of the bytes shows apart; of that also the seconds of CPU
of reader and server together, over those of the memcpy.
"""

import os
import pathlib
import sys
import tempfile
import threading
from typing import Any
from unittest import mock

import numpy as np

from bridge import credentials
from bridge.rollout_types import Version
from bridge.snapshots.remote import download
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import hashed, manifest_path, part_path, sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Announcement
from launch.services.snapshot_server import ServerProcess
from launch.tools.store_server import certificates
from tests.bench.harness.parts import print_measured
from tests.bench.publish.timing import in_turns, medians, speed_over, with_cpu
from tests.bridge.snapshots.whole import write_whole
from tests.param_tensors import iter_tensors

ROUNDS = 5
RUN = "bench"


def provide_secrets(folder: pathlib.Path, host: str) -> tuple[credentials.Token, credentials.Tls]:
    """Makes certificates and a token, and puts them where the processes started from here find them."""
    certificates.make(folder, [host], days=1)
    os.environ |= {
        credentials.TOKEN_FILE: str(folder / certificates.TOKEN),
        credentials.CERTIFICATE: str(folder / certificates.CERTIFICATE),
        credentials.KEY: str(folder / certificates.KEY),
        credentials.CA: str(folder / certificates.CA),
    }
    token = credentials.read_token()
    assert token is not None
    return token, credentials.read_tls()


def random_tensors(size_name: str) -> dict[str, np.ndarray]:
    """A model's tensors in bfloat16's place, full of random bits that are numbers."""
    import ml_dtypes

    from tests.bench.publish.sizes import SIZES

    size = SIZES[size_name]
    leaves = {
        path: np.frombuffer(np.random.default_rng(0).bytes(int(np.prod(shape))), np.int8)
        .astype(ml_dtypes.bfloat16)
        .reshape(shape)
        for path, shape in size.shapes.items()
    }
    return dict(iter_tensors(size.names, leaves))


def measure(size_name: str) -> dict[str, Any]:
    """Seconds and ratios by name."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = pathlib.Path(name)
        token, tls = provide_secrets(folder / "secrets", "127.0.0.1")
        writer = SnapshotWriter(folder / "weights", run=RUN, tokenizer_hash="t", token=token)
        manifest = write_whole(writer, Version(incarnation=0, step=0), random_tensors(size_name), dtype="bfloat16")
        fetcher = SnapshotFetcher(run=RUN, tokenizer_hash="t", token=token, tls=tls)
        into = folder / "copy"
        servers = {
            scheme: ServerProcess(
                folder / "weights",
                listen="127.0.0.1:0",
                scheme=scheme,
                reader_grace_s=10.0,
                log=folder / f"{scheme}.log",
            )
            for scheme in ("http", "https")
        }

        def fetch(scheme: str) -> None:
            manifest_path(into).unlink(missing_ok=True)
            part_path(into).unlink(missing_ok=True)
            source = version_url(servers[scheme].url, RUN, manifest.version)
            announcement = sign(Announcement(manifest=manifest, sources=(source,)), token)
            fetcher.fetch(announcement, into, stop=threading.Event())

        def fetch_unhashed(scheme: str) -> None:
            with mock.patch.object(download, "is_chunk", lambda *_: True):
                fetch(scheme)

        source, target = (np.full(manifest.shards[0].file.num_bytes, i, np.uint8) for i in range(2))
        cpu: dict[str, list[float]] = {"memcpy": [], "http": [], "https": []}
        try:
            seconds = in_turns(
                {
                    "memcpy": with_cpu(lambda: np.copyto(target, source), cpu["memcpy"]),
                    "hash": lambda: hashed(manifest.shards[0].file, source),
                    "http": lambda: fetch("http"),
                    "http_bytes": with_cpu(lambda: fetch_unhashed("http"), cpu["http"], beside=servers["http"].pid),
                    "https": lambda: fetch("https"),
                    "https_bytes": with_cpu(lambda: fetch_unhashed("https"), cpu["https"], beside=servers["https"].pid),
                },
                rounds=ROUNDS,
            )
        finally:
            for server in servers.values():
                server.close()
            fetcher.close()
            writer.remove()
    return medians(seconds) | {
        "num_bytes": manifest.shards[0].file.num_bytes,
        "network_over_memcpy": speed_over(seconds, "http_bytes", than="memcpy"),
        "network_tls_over_memcpy": speed_over(seconds, "https_bytes", than="memcpy"),
        "network_cpu_over_memcpy": sum(cpu["http"]) / sum(cpu["memcpy"]),
        "network_tls_cpu_over_memcpy": sum(cpu["https"]) / sum(cpu["memcpy"]),
        "network_with_hash_over_memcpy": speed_over(seconds, "http", than="memcpy"),
        "network_tls_with_hash_over_memcpy": speed_over(seconds, "https", than="memcpy"),
    }


if __name__ == "__main__":
    print_measured(measure, sys.argv[1])
