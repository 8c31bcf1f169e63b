"""Snapshots that are forged, damaged, replayed or from elsewhere, and the actor that refuses them."""

import asyncio
import contextlib
import dataclasses
import http.client
import http.server
import pathlib
import stat
import threading
from collections.abc import Callable, Generator

import numpy as np
import pytest

from actor.weights.source import RemoteSource
from bridge.credentials import Token
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import HostFiles, SnapshotError, sign
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import Announcement, WeightManifest
from tests.bridge.factories import with_file, with_piece
from tests.bridge.snapshots.whole import full_blocks, write_whole
from tests.integration.security.rig import (
    NUM_VALUES,
    OTHER_TOKEN,
    RUN,
    TOKEN,
    Place,
    at,
    fetch,
    fetcher,
    serving,
    weights,
)
from tests.integration.security.test_snapshots import Redirecting

pytestmark = pytest.mark.integration


def with_tensor(manifest: WeightManifest, **fields: object) -> WeightManifest:
    tensor = dataclasses.replace(manifest.tensors[0], **fields)
    return with_piece(dataclasses.replace(manifest, tensors=(tensor,)), blocks=full_blocks((tensor,)))


def with_rows(manifest: WeightManifest, first_col: int, num_rows: int, num_cols: int) -> WeightManifest:
    block = manifest.shards[0].blocks[0]
    changed = dataclasses.replace(block, first_col=first_col, num_rows=num_rows, num_cols=num_cols)
    return with_piece(manifest, blocks=(changed,))


FORGERIES: dict[str, Callable[[WeightManifest], WeightManifest]] = {
    "unsigned": lambda m: dataclasses.replace(m, hmac=None),
    "signed with another token": lambda m: sign(m, OTHER_TOKEN),
    "signed with what a header shows": lambda m: sign(m, Token(TOKEN.header.removeprefix("Bearer "))),
    "signature of another version": lambda m: dataclasses.replace(m, version=at(9)),
    "empty signature": lambda m: dataclasses.replace(m, hmac=""),
    "other hashes": lambda m: with_file(m, chunk_hashes=bytes(len(m.shards[0].file.chunk_hashes))),
    "other tensors": lambda m: with_tensor(m, name="v"),
    "other tokenizer": lambda m: dataclasses.replace(m, tokenizer_hash="x"),
    "other time": lambda m: dataclasses.replace(m, created_s=0.0),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_manifest_that_the_token_has_not_signed_refused(unharmed, tmp_path, forgery):
    """A manifest that is unsigned, signed by another, or changed in any field | refused before anything is fetched"""
    forged = FORGERIES[forgery](unharmed.manifest)
    said = "unsigned manifest" if forged.hmac is None else "not signed with this actor's token"
    with pytest.raises(SnapshotError, match=said):
        fetch(fetcher(unharmed.trust), unharmed.announcement(forged), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


SIGNED_BUT_WRONG: dict[str, tuple[Callable[[WeightManifest], WeightManifest], str]] = {
    "run": (lambda m: dataclasses.replace(m, run="run-2"), "expected run 'run-1', got 'run-2'"),
    "tokenizer": (
        lambda m: dataclasses.replace(m, tokenizer_hash="x"),
        "expected tokenizer hash 'tokenizer-1', got 'x'",
    ),
    "name": (lambda m: with_tensor(m, name="v"), "differs from the model in 2 tensors, first v"),
    "dtype": (lambda m: with_tensor(m, dtype="float16", shape=(2 * NUM_VALUES,)), "differs from the model in 1"),
    "shape": (lambda m: with_tensor(m, shape=(NUM_VALUES // 2, 2)), "differs from the model in 1 tensors"),
    "size": (lambda m: with_tensor(m, shape=(NUM_VALUES * 2,)), "malformed tensor"),
    "file": (lambda m: with_file(m, name="passwd"), "not a slot"),
    "no piece": (lambda m: dataclasses.replace(m, shards=()), "no piece has tensor"),
    "piece of less": (lambda m: with_rows(m, 0, 1, NUM_VALUES - 1), "no piece has a part of tensor"),
    "piece of more": (lambda m: with_rows(m, 0, 2, NUM_VALUES), "block exceeds tensor"),
    "piece elsewhere": (lambda m: with_rows(m, 7, 1, NUM_VALUES), "block exceeds tensor"),
    "digest": (lambda m: with_file(m, blake3="0" * 64), "corrupt: its digests are not"),
}


@pytest.mark.parametrize("what", SIGNED_BUT_WRONG)
def test_signed_snapshot_of_another_run_model_or_tokenizer_refused(unharmed, tmp_path, what):
    """A signed snapshot of another run, tokenizer, or model | refused before anything is fetched, and says which"""
    change, said = SIGNED_BUT_WRONG[what]
    wrong = sign(change(unharmed.manifest), TOKEN)
    with pytest.raises(SnapshotError, match=said):
        fetch(fetcher(unharmed.trust), unharmed.announcement(wrong), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("position", [0, NUM_VALUES * 2, 4 * NUM_VALUES - 1], ids=["first", "middle", "last"])
def test_flipped_bit_in_a_chunk_refused(tmp_path, position):
    """One flipped bit in a chunk, where it lies or on its way | refused by its hash; the file is not called whole"""
    with serving(tmp_path / "served") as place:
        slot = place.folder / place.manifest.shards[0].file.name
        flip(slot, position)
        with pytest.raises(SnapshotError, match=r"version 0:3: download failed.*corrupt: chunk 0 does not match"):
            fetch(fetcher(place.trust), place.announcement(), tmp_path / "copy")
        assert not (tmp_path / "copy.manifest").exists()
        flip(slot, position)
        np.testing.assert_array_equal(fetch(fetcher(place.trust), place.announcement(), tmp_path / "copy"), weights(3))


def flip(path: pathlib.Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


class Announcing:
    """A store whose administrator may say what he likes."""

    def __init__(self, announcement: Announcement) -> None:
        self.announcement = announcement

    def announced(self) -> Announcement:
        return self.announcement


@contextlib.contextmanager
def following(
    place: Place, folder: pathlib.Path, announcement: Announcement
) -> Generator[tuple[RemoteSource, Announcing]]:
    """An actor's side that follows what a store announces."""
    store = Announcing(announcement)
    shared = SharedDownload(folder, run=RUN, fetcher=fetcher(place.trust))
    source = RemoteSource(store, shared)  # pyright: ignore[reportArgumentType]  # all that it asks of a store
    with contextlib.closing(source):
        yield source, store


async def fetch_announced(source: RemoteSource) -> pathlib.Path:
    manifest = await source.announced()
    assert manifest is not None
    return await source.fetch(manifest)


def test_old_manifest_replayed_refused(tmp_path):
    """An old manifest, rightly signed, announced again | refused by whoever has fetched a newer one, which stays"""
    with serving(tmp_path / "served") as place, following(place, tmp_path, place.announcement()) as (source, store):
        old = store.announcement
        asyncio.run(fetch_announced(source))
        newer = place.announcement(write_whole(place.writer, at(4), {"w": weights(4)}, dtype="float32"))
        store.announcement = newer
        file = asyncio.run(fetch_announced(source))
        store.announcement = old
        with pytest.raises(SnapshotError, match="version 0:3 is announced after 0:4 was fetched: an old manifest"):
            asyncio.run(fetch_announced(source))
        np.testing.assert_array_equal(map_tensors(file, newer.manifest)["w"], weights(4))


@pytest.mark.parametrize("signature", ["none", "another token's", "of the announcement before"])
def test_source_that_the_learner_did_not_announce_refused(unharmed, tmp_path, signature):
    """The store's administrator names a server of his own as a source | refused; no credential goes there"""
    asked: list[str | None] = []
    theirs = type("Theirs", (Redirecting,), {"shown": asked, "to": unharmed.url})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), theirs)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    honest = unharmed.announcement()
    forged = dataclasses.replace(honest, sources=(f"http://127.0.0.1:{server.server_port}/v1", *honest.sources))
    if signature == "none":
        forged = dataclasses.replace(forged, hmac=None)
    elif signature == "another token's":
        forged = sign(forged, OTHER_TOKEN)
    said = "has an unsigned announcement" if signature == "none" else "announcement of version 0:3 was not signed"
    try:
        with following(unharmed, tmp_path / "shm", forged) as (source, store):
            with pytest.raises(SnapshotError, match=said):
                asyncio.run(fetch_announced(source))
            store.announcement = honest
            asyncio.run(fetch_announced(source))
    finally:
        server.shutdown()
    assert asked == []


@pytest.mark.parametrize("source", ["https://192.0.2.1:8443/v1", "https://learner.example/v1", "s3://bucket/v1"])
def test_actor_without_a_token_takes_no_weights_from_another_machine(unharmed, tmp_path, source):
    """Unsigned weights on another machine or in a bucket, to an actor without a token | refused: it says what to set"""
    manifest = dataclasses.replace(unharmed.manifest, hmac=None)
    announcement = Announcement(manifest=manifest, sources=(source,))
    with pytest.raises(SnapshotError, match="set SLUICE_TOKEN_FILE"):
        fetch(fetcher(unharmed.trust, token=None), announcement, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_shared_memory_is_this_users_alone(tmp_path):
    """Another user of the host reads or replaces fetched weights | folders 0700, files 0600; others' refused"""
    with serving(tmp_path / "served") as place, following(place, tmp_path / "shm", place.announcement()) as (source, _):
        file = asyncio.run(fetch_announced(source))
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        for path in (file, *place.folder.glob("slot-*"), place.folder / HostFiles().writer):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        (theirs / file.parent.name).mkdir(mode=0o777)
        (theirs / file.parent.name).chmod(0o777)
        with pytest.raises(ValueError, match="other users can write to it"):
            SharedDownload(theirs, run=RUN, fetcher=fetcher(place.trust))
        (theirs / file.parent.name).rmdir()
        (theirs / file.parent.name).symlink_to(file.parent)
        with pytest.raises(ValueError, match="other users can write to it"):
            SharedDownload(theirs, run=RUN, fetcher=fetcher(place.trust))
