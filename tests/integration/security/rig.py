"""What is attacked: a snapshot server in a process of its own, and an actor's side that fetches from it."""

import contextlib
import dataclasses
import datetime
import http.client
import os
import pathlib
import ssl
import threading
from collections.abc import Generator

import numpy as np
import pytest
import trustme

from bridge import credentials
from bridge.credentials import Tls, Token
from bridge.rollout_types import Version
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import Announcement, WeightManifest
from launch.services.snapshot_server import ServerProcess
from tests.bridge.snapshots.whole import write_whole

RUN, TOKENIZER = "run-1", "tokenizer-1"
SECRET, OTHER_SECRET = "0123456789abcdef" * 4, "fedcba9876543210" * 4
TOKEN, OTHER_TOKEN = Token(SECRET), Token(OTHER_SECRET)
NUM_VALUES = 20_000
HASTE = RetryPolicy(silence_s=5.0, give_up_s=1.0, first_backoff_s=0.01, last_backoff_s=0.05)


def weights(step: int) -> np.ndarray:
    """A version's one tensor: what every honest reader must get."""
    return np.random.default_rng(step).standard_normal(NUM_VALUES).astype(np.float32)


def at(step: int) -> Version:
    return Version(incarnation=0, step=step)


def certificate(
    folder: pathlib.Path, *, host: str = "127.0.0.1", authority: trustme.CA | None = None, days: int = 1
) -> tuple[Tls, Tls]:
    """What a server shows, and what its clients trust; expired where `days` is negative."""
    folder.mkdir(parents=True)
    authority = authority or trustme.CA()
    now = datetime.datetime.now(datetime.UTC)
    made = authority.issue_cert(
        host, not_before=now - datetime.timedelta(days=9), not_after=now + datetime.timedelta(days)
    )
    paths = [folder / name for name in ("server.pem", "server.key", "ca.pem")]
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    contents = (chain, made.private_key_pem.bytes(), authority.cert_pem.bytes())
    for path, content in zip(paths, contents, strict=True):
        path.touch(mode=0o600)
        path.write_bytes(content)
    return Tls(certificate=paths[0], key=paths[1]), Tls(ca=paths[2])


@dataclasses.dataclass
class Place:
    """A snapshot folder with one version, and its server."""

    folder: pathlib.Path
    url: str
    log: pathlib.Path
    trust: Tls
    manifest: WeightManifest
    server: ServerProcess
    writer: SnapshotWriter

    def announcement(self, manifest: WeightManifest | None = None) -> Announcement:
        manifest = manifest or self.manifest
        version = at(4) if manifest.version == at(4) else self.manifest.version
        return sign(Announcement(manifest=manifest, sources=(version_url(self.url, RUN, version),)), TOKEN)

    def path(self, name: str | None = None) -> str:
        return version_url("", RUN, self.manifest.version) + "/" + (name or self.manifest.shards[0].file.name)

    def ask(
        self, path: str | None = None, *, header: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One request by Python's own client: (status, body)."""
        context = ssl.create_default_context(cafile=str(self.trust.ca))
        connection = http.client.HTTPSConnection(self.url.partition("//")[2], context=context, timeout=20)
        with contextlib.closing(connection):
            shown = {} if header is None else {"Authorization": header}
            connection.putrequest("GET", path or self.path(), skip_accept_encoding=True)
            for name, value in {**shown, **(headers or {})}.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read()

    def check_unharmed(self) -> None:
        """The right token still gets the very bytes that were published."""
        status, body = self.ask(header=TOKEN.header)
        assert (status, body[: 4 * NUM_VALUES]) == (200, weights(self.manifest.version.step).tobytes())


@contextlib.contextmanager
def environment(token: str | None, tls: Tls | None) -> Generator[None]:
    """The environment in which a server starts: its token and its certificate."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            credentials.TOKEN,
            credentials.TOKEN_FILE,
            credentials.CERTIFICATE,
            credentials.KEY,
            credentials.CA,
        ):
            patch.delenv(name, raising=False)
        if token is not None:
            patch.setenv(credentials.TOKEN, token)
        if tls is not None:
            patch.setenv(credentials.CERTIFICATE, os.fspath(tls.certificate or ""))
            patch.setenv(credentials.KEY, os.fspath(tls.key or ""))
        yield


@contextlib.contextmanager
def serving(folder: pathlib.Path, *, tls: tuple[Tls, Tls] | None = None) -> Generator[Place]:
    """A folder with version 0:3, served by https on loopback."""
    tls = tls or certificate(folder / "tls")
    writer = SnapshotWriter(folder / "snapshots", run=RUN, tokenizer_hash=TOKENIZER, token=TOKEN)
    with contextlib.closing(writer):
        manifest = write_whole(writer, at(3), {"w": weights(3)}, dtype="float32")
        with environment(SECRET, tls[0]):
            server = ServerProcess(
                folder / "snapshots", listen="127.0.0.1:0", scheme="https", reader_grace_s=5.0, log=folder / "log"
            )
        try:
            yield Place(folder / "snapshots", server.url, folder / "log", tls[1], manifest, server, writer)
        finally:
            server.close()


def fetcher(trust: Tls | None, *, token: Token | None = TOKEN) -> SnapshotFetcher:
    """An actor's."""
    expected = {"w": ("float32", (NUM_VALUES,))}
    return SnapshotFetcher(run=RUN, tokenizer_hash=TOKENIZER, expected=expected, token=token, tls=trust, patience=HASTE)


def fetch(fetcher: SnapshotFetcher, announcement: Announcement, into: pathlib.Path) -> np.ndarray:
    """What an actor would put into its engine."""
    with contextlib.closing(fetcher):
        fetcher.fetch(announcement, into, stop=threading.Event())
    return map_tensors(into, announcement.manifest)["w"].copy()
