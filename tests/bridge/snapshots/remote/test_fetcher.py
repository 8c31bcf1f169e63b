import contextlib
import dataclasses
import datetime
import errno
import http.server
import os
import shutil
import ssl
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bridge.credentials import Tls, Token
from bridge.snapshots.remote.download import DownloadStats, RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import (
    SnapshotBusyError,
    SnapshotError,
    SupersededError,
    manifest_path,
    part_path,
    sign,
)
from bridge.snapshots.verified_copy import is_verified, map_tensors
from bridge.weight_types import Announcement, WeightManifest
from tests.bridge.factories import with_file
from tests.bridge.snapshots.served import (
    CHUNK_BYTES,
    NUM_VALUES,
    OTHER_TOKEN,
    RUN,
    TOKEN,
    TOKENIZER,
    ScriptedServer,
    announced,
    at,
    certificates,
    open_writer,
    publish,
    serving,
    values,
)
from tests.bridge.snapshots.whole import write_whole

TABLE = {"w": ("float32", (NUM_VALUES,))}
QUICK = RetryPolicy(num_ranges=2, silence_s=2.0, give_up_s=0.5, first_backoff_s=0.01, last_backoff_s=0.02)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "w"


@pytest.fixture
def local(tmp_path):
    (tmp_path / "actor").mkdir()
    return tmp_path / "actor" / "copy"


@pytest.fixture
def writer(folder):
    made = open_writer(folder, token=TOKEN, lock_timeout_s=20.0)
    yield made
    made.close()


def fetcher(**kwargs) -> SnapshotFetcher:
    given: dict[str, Any] = {
        "run": RUN,
        "tokenizer_hash": TOKENIZER,
        "expected": TABLE,
        "token": TOKEN,
        "patience": QUICK,
    }
    given |= {"lock_timeout_s": 0.05} | kwargs
    return SnapshotFetcher(**given)


def fetch(announcement: Announcement, into: Path, **kwargs) -> DownloadStats:
    with contextlib.closing(fetcher(**kwargs)) as made:
        return made.fetch(announcement, into, stop=threading.Event())


def assert_holds(into: Path, manifest: WeightManifest, step: int) -> None:
    assert is_verified(into) == manifest and not part_path(into).exists()
    np.testing.assert_array_equal(map_tensors(into, manifest)["w"], values(step))


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_versions_fetched_one_after_another_are_those_published(folder, writer, local, tmp_path, scheme):
    server, client = certificates(tmp_path / "tls") if scheme == "https" else (None, Tls())
    with serving(folder, token=TOKEN, tls=server) as running, contextlib.closing(fetcher(tls=client)) as made:
        for step in (1, 2, 3):
            manifest = publish(writer, step)
            tally = made.fetch(announced(manifest, running.url), local, stop=threading.Event())
            assert tally.num_bytes == manifest.shards[0].file.num_bytes
            assert_holds(local, manifest, step)


def forged(manifest: WeightManifest, *, token: Token | None = TOKEN, **fields) -> WeightManifest:
    changed = dataclasses.replace(manifest, **fields)
    return changed if token is None else sign(changed, token)


def larger(manifest: WeightManifest, num_bytes: int) -> dict:
    file = manifest.shards[0].file
    num_chunks = -(-num_bytes // file.chunk_bytes)
    return {"num_bytes": num_bytes, "chunk_hashes": bytes(32 * num_chunks)}


def check_refused_before_a_byte_is_asked_for(writer, local, change, complaint) -> None:
    good = publish(writer, 1)
    server = ScriptedServer(values(1).tobytes())
    fetch(announced(good, server.url), local)
    num_requests, size = len(server.requests), local.stat().st_size
    with pytest.raises(SnapshotError, match=complaint):
        fetch(announced(change(good), server.url), local)
    server.close()
    assert (len(server.requests), local.stat().st_size) == (num_requests, size)
    assert_holds(local, good, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: forged(m, token=None, hmac=None), "unsigned manifest"),
        (lambda m: forged(m, token=OTHER_TOKEN), "not signed with this actor's token"),
        (lambda m: forged(m, token=None, version=at(9)), "not signed with this actor's token"),
    ],
)
def test_manifest_that_the_token_has_not_signed_is_refused(writer, local, change, complaint):
    """A manifest that is unsigned, signed by another, or changed in any field | refused before anything is fetched"""
    check_refused_before_a_byte_is_asked_for(writer, local, change, complaint)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: forged(m, run="another"), "got 'another'"),
        (lambda m: forged(m, tokenizer_hash="u"), "expected tokenizer hash 't', got 'u'"),
        (lambda m: forged(m, tensors=(dataclasses.replace(m.tensors[0], name="v"),)), "differs from the model"),
        (lambda m: forged(with_file(m, **larger(m, 2**24))), "16777216 bytes, its tensors need 80000"),
        (lambda m: forged(with_file(m, name="manifest")), "not a slot"),
        (lambda m: forged(with_file(m, chunk_hashes=bytes(20 * 32))), "digests are not"),
    ],
)
def test_signed_manifest_that_is_not_the_runs_is_refused(writer, local, change, complaint):
    """A signed snapshot of another run, tokenizer, or model | refused before anything is fetched, and says which"""
    check_refused_before_a_byte_is_asked_for(writer, local, change, complaint)


def test_without_a_token_an_unsigned_manifest_is_taken(tmp_path, local):
    writer = open_writer(tmp_path / "plain")
    manifest = publish(writer, 1)
    with serving(tmp_path / "plain") as running:
        fetch(announced(manifest, running.url), local, token=None)
    assert_holds(local, manifest, 1)
    writer.close()


@pytest.mark.parametrize("source", ["https://192.0.2.1:8443/v1", "https://learner.example/v1", "s3://bucket/v1"])
def test_actor_without_a_token_takes_no_weights_from_another_machine(writer, local, source):
    """Unsigned weights on another machine or in a bucket, to an actor without a token | refused: it says what to set"""
    manifest = dataclasses.replace(publish(writer, 1), hmac=None)
    with pytest.raises(SnapshotError, match="set SLUICE_TOKEN_FILE"):
        fetch(Announcement(manifest=manifest, sources=(source,)), local, token=None)
    assert not local.exists()


def test_bit_flipped_at_rest_is_refused_and_nothing_is_mapped(folder, writer, local):
    """One flipped bit in a chunk | refused by its hash; the file is not called whole"""
    manifest = publish(writer, 1)
    with open(folder / manifest.shards[0].file.name, "r+b") as f:
        f.seek(3 * CHUNK_BYTES)
        byte = f.read(1)[0]
        f.seek(3 * CHUNK_BYTES)
        f.write(bytes([byte ^ 1]))
        f.flush()
        with serving(folder, token=TOKEN) as running:
            with pytest.raises(SnapshotError, match="version 0:1: .*19 of 20 chunks downloaded: .*chunk 3 does not"):
                fetch(announced(manifest, running.url), local)
            assert is_verified(local) is None
            with pytest.raises(SnapshotError, match="no whole version"):
                map_tensors(local, manifest)
            f.seek(3 * CHUNK_BYTES)
            f.write(bytes([byte]))
            f.flush()
            tally = fetch(announced(manifest, running.url), local)
    assert tally.num_bytes == CHUNK_BYTES  # the other 19 were there
    assert_holds(local, manifest, 1)


@pytest.mark.heavy
def test_file_that_is_being_filled_passes_for_no_version(writer, local):
    old, new = publish(writer, 1), publish(writer, 2)
    good = ScriptedServer(values(1).tobytes())
    fetch(announced(old, good.url), local)
    good.close()
    with pytest.raises(SnapshotError, match="0 of 20 chunks downloaded"):
        fetch(announced(new, good.url), local)
    for version in (old, new):
        with pytest.raises(SnapshotError, match="no whole version"):
            map_tensors(local, version)


@pytest.mark.heavy
def test_download_that_broke_off_goes_on_where_it_stopped(writer, local):
    manifest = publish(writer, 1)
    data = values(1).tobytes()

    def dies(request, connection):
        if request.start >= 8 * CHUNK_BYTES:
            connection.close()
            return None
        return data[request.start : request.end]

    one_by_one = dataclasses.replace(QUICK, num_ranges=1, range_bytes=CHUNK_BYTES)
    broken, whole = ScriptedServer(data, dies), ScriptedServer(data)
    with pytest.raises(SnapshotError, match="8 of 20 chunks downloaded"):
        fetch(announced(manifest, broken.url), local, patience=one_by_one)
    assert is_verified(local) is None and part_path(local).exists()
    fetch(announced(manifest, whole.url), local)
    assert min(whole.ranges())[0] == 8 * CHUNK_BYTES
    assert sum(end - start for start, end in whole.ranges()) == len(data) - 8 * CHUNK_BYTES
    assert_holds(local, manifest, 1)
    broken.close()
    whole.close()


def test_chunks_that_the_version_before_has_too_are_not_fetched_again(writer, folder, local):
    first = publish(writer, 1)
    changed = values(1)
    changed[5 * CHUNK_BYTES // 4] += 1
    second = write_whole(writer, at(2), {"w": changed}, dtype="float32")
    one, two = ScriptedServer(values(1).tobytes()), ScriptedServer(changed.tobytes())
    fetch(announced(first, one.url), local)
    fetch(announced(second, two.url), local)
    assert two.ranges() == [(5 * CHUNK_BYTES, 6 * CHUNK_BYTES)]
    np.testing.assert_array_equal(map_tensors(local, second)["w"], changed)
    one.close()
    two.close()


def test_kept_chunk_whose_bytes_changed_at_rest_is_fetched_again(writer, local):
    first = publish(writer, 1)
    second = write_whole(writer, at(2), {"w": values(1)}, dtype="float32")
    server = ScriptedServer(values(1).tobytes())
    fetch(announced(first, server.url), local)
    with open(local, "r+b") as f:
        f.seek(7 * CHUNK_BYTES + 5)
        f.write(b"\xff\xff")
    server.requests.clear()
    fetch(announced(second, server.url), local)
    assert server.ranges() == [(7 * CHUNK_BYTES, 8 * CHUNK_BYTES)]
    assert_holds(local, second, 1)
    server.close()


def test_version_superseded_before_or_while_it_is_read_says_so(folder, writer, local):
    old = publish(writer, 1)
    new = publish(writer, 2)
    with serving(folder, token=TOKEN) as running:
        with pytest.raises(SupersededError, match="version 0:1 was superseded"):
            fetch(announced(old, running.url), local)
        fetch(announced(new, running.url), local)
    assert_holds(local, new, 2)


def test_second_source_is_read_when_the_first_is_down(folder, writer, local, tmp_path):
    manifest = publish(writer, 1)
    bucket = tmp_path / "bucket"
    place = bucket / "v1" / "run%201" / "0:1"
    place.mkdir(parents=True)
    shutil.copy(folder / manifest.shards[0].file.name, place)
    os.truncate(place / manifest.shards[0].file.name, manifest.shards[0].file.num_bytes)
    source = Announcement(manifest=manifest, sources=("https://127.0.0.1:1/v1/run%201/0:1", place.as_uri()))
    fetch(sign(source, TOKEN), local)
    assert_holds(local, manifest, 1)


def test_folder_that_is_gone_is_superseded_and_not_made(writer, local, tmp_path):
    manifest = publish(writer, 1)
    with pytest.raises(SupersededError, match="no such folder"):
        fetch(announced(manifest, (tmp_path / "gone").as_uri()), local)
    assert not (tmp_path / "gone").exists()


def test_wrong_token_is_refused_with_a_clear_error(folder, writer, local):
    """An actor with another run's token | it refuses the manifest itself, before a byte is asked for"""
    manifest = publish(writer, 1)
    with pytest.raises(SnapshotError, match="not signed with this actor's token; learner and actors need the same"):
        fetch(announced(manifest, "http://127.0.0.1:1"), local, token=OTHER_TOKEN)
    assert not local.exists()
    signed = sign(manifest, OTHER_TOKEN)  # as if announcements were forged too
    with serving(folder, token=TOKEN) as running, pytest.raises(SnapshotError, match="refused the token") as caught:
        fetch(announced(signed, running.url, token=OTHER_TOKEN), local, token=OTHER_TOKEN)
    assert "fedcba" not in str(caught.value)


def test_expired_certificate_and_foreign_authority_are_refused_and_named(folder, writer, local, tmp_path):
    """An expired or foreign certificate, or one of another host | the actor refuses"""
    manifest = publish(writer, 1)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    expired, trusts_expired = certificates(tmp_path / "expired", not_after=past)
    good, trusts_good = certificates(tmp_path / "good")
    other_host, trusts_other = certificates(tmp_path / "other", host="example.org")
    for server, client, complaint in [
        (expired, trusts_expired, "Expired"),
        (good, trusts_expired, "UnknownIssuer|BadSignature"),
        (good, Tls(), "UnknownIssuer"),
        (other_host, trusts_other, "NotValidForName"),
    ]:
        with (
            serving(folder, token=TOKEN, tls=server) as running,
            pytest.raises(SnapshotError, match=f"certificate is refused: ({complaint})"),
        ):
            fetch(announced(manifest, running.url), local, tls=client)
    with serving(folder, token=TOKEN, tls=good) as running:
        fetch(announced(manifest, running.url), local, tls=trusts_good)
    assert_holds(local, manifest, 1)


def test_plain_http_to_another_machine_is_not_even_tried(writer, local):
    """An announced source by plain http on another machine | refused before anything is sent"""
    manifest = publish(writer, 1)
    with pytest.raises(SnapshotError, match="allowed only on loopback"):
        fetch(announced(manifest, "http://192.0.2.1:1"), local)


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Sends a reader elsewhere, and remembers what it showed."""

    to = ""
    shown: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.shown.append(self.headers.get("Authorization"))
        self.send_response(302 if self.to else 404)
        self.send_header("Location", self.to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_source_that_redirects_elsewhere_is_not_followed_with_the_token(writer, local, tmp_path, scheme):
    """A source redirects to another server, plain or encrypted | the credential does not go there; refused"""
    shown, trust = certificates(tmp_path / "tls")
    assert shown.certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.certificate, shown.key)
    there = type("There", (Redirecting,), {"shown": []})
    with contextlib.ExitStack() as ending:

        def serve(handler: type[Redirecting], *, tls: bool) -> str:
            server = ending.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            if tls:
                server.socket = context.wrap_socket(server.socket, server_side=True)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            ending.callback(server.shutdown)
            return f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"

        here = type("Here", (Redirecting,), {"shown": [], "to": serve(there, tls=scheme == "https")})
        with pytest.raises(SnapshotError):
            fetch(announced(publish(writer, 1), serve(here, tls=True)), local, tls=trust)
    assert TOKEN.header in here.shown and set(there.shown) <= {None}


def test_no_room_is_an_error_that_says_how_much(folder, writer, local, monkeypatch):
    manifest = publish(writer, 1)
    real = os.statvfs(folder)
    full = type("Full", (), {"f_bavail": 1, "f_frsize": real.f_frsize})
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(SnapshotError, match=f"needs {manifest.shards[0].file.num_bytes} bytes more"):
        fetch(announced(manifest, "http://127.0.0.1:1"), local)
    assert not manifest_path(local).exists()


def test_memory_that_others_fill_during_a_fetch_is_an_error_that_names_the_folder(writer, local, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    manifest = publish(writer, 0)
    monkeypatch.setattr("bridge.snapshots.remote.fetcher.replace_file", full)
    with pytest.raises(SnapshotError, match=f"cannot be written to {local.parent}: .*No space left"):
        fetch(announced(manifest, "http://127.0.0.1:1"), local)


def test_mapped_tensors_hold_off_the_next_fetch(folder, writer, local):
    first = publish(writer, 1)
    with serving(folder, token=TOKEN) as running:
        fetch(announced(first, running.url), local)
        tensors = map_tensors(local, first)
        second = publish(writer, 2)
        with pytest.raises(SnapshotBusyError):
            fetch(announced(second, running.url), local)
        np.testing.assert_array_equal(tensors["w"], values(1))
        del tensors
        fetch(announced(second, running.url), local)
    assert_holds(local, second, 2)
