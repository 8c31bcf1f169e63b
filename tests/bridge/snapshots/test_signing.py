import dataclasses
from typing import Any

import blake3
import pytest

from bridge import codec
from bridge.credentials import Token
from bridge.snapshots.snapshot_format import SnapshotError, check_signature, sign
from bridge.weight_types import DeltaEntry
from tests.bridge.factories import with_file, with_piece
from tests.bridge.snapshots.served import OTHER_TOKEN, TOKEN, announced, at, open_writer, publish


@pytest.fixture
def signed(tmp_path):
    writer = open_writer(tmp_path / "w", token=TOKEN)
    yield publish(writer, 3)
    writer.close()


def test_writer_with_a_token_signs_and_without_one_does_not(tmp_path, signed):
    check_signature(signed, TOKEN)
    writer = open_writer(tmp_path / "plain")
    assert publish(writer, 1).hmac is None
    writer.close()


def test_signature_is_a_keyed_blake3_of_the_message_without_it(signed):
    key = blake3.blake3(b"0123456789abcdef" * 2, derive_key_context="sluice 2026-11-22 manifest signature").digest()
    message = codec.encode(dataclasses.replace(signed, hmac=None))
    assert signed.hmac == blake3.blake3(message, key=key).hexdigest()


def test_unsigned_manifest_or_another_tokens_is_refused(signed):
    with pytest.raises(SnapshotError, match="unsigned manifest"):
        check_signature(dataclasses.replace(signed, hmac=None), TOKEN)
    with pytest.raises(SnapshotError, match="not signed with this actor's token") as caught:
        check_signature(signed, OTHER_TOKEN)
    assert "fedc" not in str(caught.value) and signed.hmac not in str(caught.value)
    shown = Token(TOKEN.header.removeprefix("Bearer "))  # what a server is shown
    for forged in (dataclasses.replace(signed, hmac=""), sign(signed, shown)):
        with pytest.raises(SnapshotError, match="not signed with this actor's token"):
            check_signature(forged, TOKEN)


def delta(manifest: Any) -> DeltaEntry:
    return DeltaEntry(
        base_version=at(2), codec="c", name="delta-0", chunk_ends=tuple(range(manifest.shards[0].file.num_chunks))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {"version": at(4)},
        lambda m: {"run": "another"},
        lambda m: {"tokenizer_hash": "another"},
        lambda m: {"created_s": m.created_s + 1},
        lambda m: {"tensors": (dataclasses.replace(m.tensors[0], name="v"),)},
        lambda m: {"shards": with_file(m, chunk_hashes=bytes(len(m.shards[0].file.chunk_hashes))).shards},
        lambda m: {"shards": with_piece(m, delta=delta(m)).shards},
        lambda m: {"shards": with_piece(m, host=1).shards},
        lambda m: {"shards": with_piece(m, blocks=()).shards},
        lambda m: {"hmac": m.hmac[:-1] + ("0" if m.hmac[-1] != "0" else "1")},
    ],
)
def test_any_changed_field_breaks_the_signature(signed, change):
    with pytest.raises(SnapshotError, match="not signed"):
        check_signature(dataclasses.replace(signed, **change(signed)), TOKEN)


def test_signing_again_gives_the_same_signature(signed):
    assert sign(signed, TOKEN) == signed


@pytest.fixture
def announcement(signed):
    return announced(signed, "https://learner:1", "s3://bucket")


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"sources": (*a.sources, "https://another:1/v1")},
        lambda a: {"sources": a.sources[::-1]},
        lambda a: {"sources": ()},
        lambda a: {"manifest": sign(dataclasses.replace(a.manifest, version=at(2)), TOKEN)},
        lambda a: {"manifest": dataclasses.replace(a.manifest, hmac=None)},
        lambda a: {"hmac": a.manifest.hmac},  # the token's, of another message
        lambda a: {"hmac": sign(a, OTHER_TOKEN).hmac},
    ],
)
def test_announcement_with_any_other_field_is_refused(announcement, change):
    check_signature(announcement, TOKEN)
    with pytest.raises(SnapshotError, match="the announcement of version 0:[23] was not signed"):
        check_signature(dataclasses.replace(announcement, **change(announcement)), TOKEN)


def test_unsigned_announcement_of_a_signed_manifest_is_refused(announcement):
    with pytest.raises(SnapshotError, match="version 0:3 has an unsigned announcement"):
        check_signature(dataclasses.replace(announcement, hmac=None), TOKEN)
