"""How a simulated learner's weights go out: real snapshots, a real server of them, real announcements."""

import contextlib
import pathlib
from collections.abc import Generator

from blake3 import blake3

from bridge import weight_types
from bridge.credentials import read_token
from bridge.rollout_types import Version
from bridge.snapshots.shard_map import lay_out
from bridge.snapshots.snapshot_format import sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.protocol import LearnerStore
from bridge.weight_types import Announcement, CardFile, RunCard
from configs.run_folder import snapshot_folder
from launch.services.snapshot_server import ServerProcess
from tests.integration.network.simulated import model
from tests.integration.network.simulated.setting import Setting

_FILES = ("config.json", "tokenizer.json")


class Publishing:
    """Writes versions and announces them."""

    def __init__(self, told: Setting, store: LearnerStore, writer: SnapshotWriter, base: str | None) -> None:
        self._told, self._store, self._writer, self._base = told, store, writer, base

    def publish(self, version: Version) -> None:
        """Returns when the actors are told."""
        manifest = self._writer.write(version, self._told.weights(version), dtype=model.DTYPE)
        sources = (version_url(self._base, self._told.run, version),) if self._base is not None else ()
        announcement, token = Announcement(manifest=manifest, sources=sources), read_token()
        self._store.announce(sign(announcement, token) if token is not None else announcement)


@contextlib.contextmanager
def publishing(told: Setting, store: LearnerStore) -> Generator[Publishing]:
    """Puts the run's card, serves the snapshots, and closes all that when the block ends."""
    folder = snapshot_folder(told.config)
    store.put_run_card(*make_run_card(told))
    writer = SnapshotWriter(
        folder,
        run=told.run,
        tokenizer_hash=_tokenizer_hash(told),
        token=read_token(),
        has_spare=told.config.publish.has_spare_slot,
        chunk_bytes=told.chunk_bytes,
    )
    try:
        with _serving(told, folder) as base:
            yield Publishing(told, store, writer, base)
    finally:
        writer.close()


@contextlib.contextmanager
def _serving(told: Setting, folder: pathlib.Path) -> Generator[str | None]:
    """A snapshot server, where one is wanted; its URL."""
    publish = told.config.publish
    if publish.serve == "none":
        yield None
        return
    server = ServerProcess(
        folder,
        listen=publish.listen,
        scheme=publish.serve,
        reader_grace_s=publish.reader_grace_s,
        slow_reader_grace_s=publish.slow_reader_grace_s,
        log=told.path / "snapshot_server.log",
    )
    try:
        yield publish.advertise or server.url
    finally:
        server.close()


def make_run_card(told: Setting) -> tuple[RunCard, dict[str, bytes]]:
    """The run's card and its files by their hashes; any vLLM will do, since none is loaded."""
    data = {name: (told.model / name).read_bytes() for name in _FILES}
    tensors, _ = lay_out((name, dtype, shape) for name, (dtype, shape) in told.tensors.items())
    card = RunCard(
        run=told.run,
        name=told.name,
        config=(told.path / "config.json").read_text(),
        files=tuple(CardFile(name=n, num_bytes=len(d), blake3=blake3(d).hexdigest()) for n, d in data.items()),
        tensors=tensors,
        sluice=weight_types.SLUICE,
        vllm="",
    )
    return card, {blake3(d).hexdigest(): d for d in data.values()}


def _tokenizer_hash(told: Setting) -> str:
    return blake3((told.model / "tokenizer.json").read_bytes()).hexdigest()
