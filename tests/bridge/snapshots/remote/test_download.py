import socket
import threading

import blake3
import numpy as np
import pytest

from bridge.snapshots.remote import fetcher as fetching
from bridge.snapshots.remote.download import Chunks, DownloadStats, DownloadStoppedError, RetryPolicy, download
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError, UnreachableError, hashed, unhashed
from bridge.weight_types import FileEntry
from tests.bridge.snapshots.served import OTHER_TOKEN, TOKEN, Request, ScriptedServer, send_range
from tests.bridge.snapshots.written import flat

CHUNK = 1000
DATA = np.random.default_rng(0).integers(0, 256, 20 * CHUNK + 7, np.uint8)
FILE = hashed(unhashed("slot-0", DATA.size, smallest=CHUNK), DATA)
QUICK = RetryPolicy(
    num_ranges=3, range_bytes=4 * CHUNK, silence_s=0.3, give_up_s=1.0, first_backoff_s=0.01, last_backoff_s=0.02
)
CLOSED = "http://127.0.0.1:1"


@pytest.fixture
def served():
    """Makes servers that answer as they are told."""
    made: list[ScriptedServer] = []

    def make(script=None, data: bytes = DATA.tobytes()) -> ScriptedServer:
        made.append(ScriptedServer(data, script))
        return made[-1]

    yield make
    for server in made:
        server.close()


def fetch(
    *urls: str,
    into: np.ndarray | None = None,
    chunks=None,
    file: FileEntry = FILE,
    patience: RetryPolicy = QUICK,
    stop: threading.Event | None = None,
    token=TOKEN,
) -> tuple[np.ndarray, DownloadStats]:
    target = np.zeros(file.num_bytes, np.uint8) if into is None else into
    tally = DownloadStats()
    download(
        Chunks.of(file, flat(file.num_bytes), target),
        [(url, lambda url=url: fetching.source_at(url + "/v1", token=token)) for url in urls],
        wanted=range(file.num_chunks) if chunks is None else chunks,
        stop=stop or threading.Event(),
        patience=patience,
        tally=tally,
    )
    return target, tally


def test_download_arrives_whole_by_ranges_and_shows_the_token(served):
    server = served()
    got, tally = fetch(server.url)
    np.testing.assert_array_equal(got, DATA)
    assert (tally.num_bytes, tally.num_bad, tally.num_breaks) == (DATA.size, 0, 0)
    assert sorted(server.ranges())[0] == (0, 4000) and len(server.requests) == 6
    assert {r.authorization for r in server.requests} == {TOKEN.header}
    assert {r.path for r in server.requests} == {"/v1/slot-0"}


def test_download_of_some_chunks_asks_for_no_other_byte(served):
    server = served()
    got, _ = fetch(server.url, chunks=[3, 4, 9, 20])
    assert sorted(server.ranges()) == [(3000, 5000), (9000, 10000), (20000, 20007)]
    want = np.zeros_like(DATA)
    for start, end in server.ranges():
        want[start:end] = DATA[start:end]
    np.testing.assert_array_equal(got, want)


def flipped(request: Request, position: int) -> bytes:
    body = bytearray(DATA[request.start : request.end].tobytes())
    body[position - request.start] ^= 1
    return bytes(body)


def test_bit_flipped_on_the_wire_costs_only_its_chunk(served):
    is_first = [True]

    def script(request: Request, _) -> bytes:
        if is_first[0] and request.start <= 5500 < request.end:
            is_first[0] = False
            return flipped(request, 5500)
        return DATA[request.start : request.end].tobytes()

    server = served(script)
    got, tally = fetch(server.url)
    np.testing.assert_array_equal(got, DATA)
    assert (tally.num_bad, tally.num_bytes) == (1, DATA.size + CHUNK)
    assert [r for r in server.ranges() if r == (5000, 6000)]


def test_chunk_that_is_always_bad_is_taken_from_the_next_place(served):
    bad = served(lambda r, _: flipped(r, 5500) if r.start <= 5500 < r.end else DATA[r.start : r.end].tobytes())
    good = served()
    got, tally = fetch(bad.url, good.url)
    np.testing.assert_array_equal(got, DATA)
    assert tally.num_bad == 3 and good.ranges() == [(5000, 6000)]


def test_chunk_that_is_bad_everywhere_fails_and_says_which(served):
    server = served(lambda r, _: flipped(r, 5500) if r.start <= 5500 < r.end else DATA[r.start : r.end].tobytes())
    into = np.zeros_like(DATA)
    with pytest.raises(SnapshotError, match=r"20 of 21 chunks downloaded: .*chunk 5 does not match its hash, 3 times"):
        fetch(server.url, into=into)
    assert len([r for r in server.ranges() if r[0] <= 5500 < r[1]]) == 3
    np.testing.assert_array_equal(np.delete(into, slice(5000, 6000)), np.delete(DATA, slice(5000, 6000)))


def cut_after(num_bytes: int, server_data: bytes = DATA.tobytes()):
    """Sends so many bytes of a range and hangs up."""

    def cut(request: Request, connection: socket.socket) -> None:
        body = server_data[request.start : request.end]
        send_range(connection, request, body[:num_bytes], total=len(server_data), length=len(body))
        connection.shutdown(socket.SHUT_RDWR)

    return cut


def test_truncated_body_costs_only_what_did_not_arrive(served):
    cut = cut_after(2500)
    server = served(lambda r, c: cut(r, c) if r.number == 0 else DATA[r.start : r.end].tobytes())
    got, tally = fetch(server.url, patience=QUICK, chunks=range(4))
    np.testing.assert_array_equal(got[:4000], DATA[:4000])
    assert tally.num_breaks == 1
    start = server.ranges()[1][0]
    assert start in (0, 2000)  # whole blocks before the cut may have been handed over, or not
    assert server.ranges()[1][1] - start <= 2000  # shorter ranges after a failure


def test_server_that_dies_in_the_middle_and_comes_back_is_gone_on_with(served):
    num = [0]

    def script(request: Request, connection: socket.socket) -> bytes | None:
        num[0] += 1
        if 2 <= num[0] <= 8:
            connection.shutdown(socket.SHUT_RDWR)
            return None
        return DATA[request.start : request.end].tobytes()

    got, tally = fetch(served(script).url)
    np.testing.assert_array_equal(got, DATA)
    assert tally.num_breaks >= 1 and tally.num_bad == 0


@pytest.mark.heavy
@pytest.mark.parametrize("extra", [-100, 100])
def test_wrong_content_length_is_never_taken_for_the_data(served, extra):
    """Too short: the rest is missing. Too long: more is promised than comes."""

    def script(request: Request, connection: socket.socket) -> None:
        body = DATA[request.start : request.end].tobytes()
        send_range(connection, request, body[: len(body) + min(extra, 0)], total=DATA.size, length=len(body) + extra)
        connection.shutdown(socket.SHUT_RDWR)

    liar, good = served(script), served()
    got, _ = fetch(liar.url, good.url)
    np.testing.assert_array_equal(got, DATA)
    with pytest.raises(SnapshotError):
        fetch(liar.url, chunks=[7])


@pytest.mark.heavy
def test_body_longer_than_its_range_writes_nothing_beyond_it(served):
    def script(request: Request, connection: socket.socket) -> None:
        body = DATA[request.start : request.end].tobytes() + b"\xff" * 5000
        send_range(connection, request, body, total=DATA.size)
        connection.shutdown(socket.SHUT_RDWR)

    into = np.zeros_like(DATA)
    with pytest.raises(SnapshotError):
        fetch(served(script).url, into=into, chunks=[7], patience=QUICK)
    assert not into[8000:].any() and not into[:7000].any()


def status(code: str):
    def script(_: Request, connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 {code}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_RDWR)

    return script


@pytest.mark.parametrize("code", ["410 Gone", "404 Not Found"])
def test_version_that_no_place_has_is_superseded_at_once(served, code):
    first, second = served(status(code)), served(status("410 Gone"))
    with pytest.raises(SupersededError, match="no source has it any more"):
        fetch(first.url, second.url, patience=RetryPolicy(give_up_s=1e6, silence_s=1e6))


def test_version_superseded_in_the_middle_keeps_what_arrived(served):
    gone = status("410 Gone")
    server = served(lambda r, c: gone(r, c) if r.start >= 8000 else DATA[r.start : r.end].tobytes())
    into = np.zeros_like(DATA)
    with pytest.raises(SupersededError):
        fetch(server.url, into=into, patience=QUICK)
    np.testing.assert_array_equal(into[:8000], DATA[:8000])


@pytest.mark.parametrize("code", ["401 Unauthorized", "403 Forbidden"])
def test_token_that_is_refused_is_not_tried_again_and_not_told(served, code):
    server = served(status(code))
    with pytest.raises(SnapshotError, match="refused the token or the credentials") as caught:
        fetch(server.url, token=OTHER_TOKEN, patience=RetryPolicy(num_ranges=1))
    assert not isinstance(caught.value, SupersededError)
    assert "fedcba" not in str(caught.value) and "\n" not in str(caught.value)
    assert len(server.requests) == 1


def test_place_that_fails_is_left_for_the_next_one_and_broken_ones_are_asked_again(served):
    good = served()
    got, _ = fetch(CLOSED, served(status("500 Oops")).url, good.url)
    np.testing.assert_array_equal(got, DATA)
    num = [0]

    def script(request: Request, connection: socket.socket) -> bytes | None:
        num[0] += 1
        return status("503 Busy")(request, connection) if num[0] <= 5 else DATA[request.start : request.end].tobytes()

    got, _ = fetch(served(script).url)
    np.testing.assert_array_equal(got, DATA)


@pytest.mark.heavy
def test_silent_place_is_given_up_and_the_time_is_bounded(served):
    def silent(request: Request, connection: socket.socket) -> None:
        send_range(connection, request, b"x", total=DATA.size, length=request.end - request.start)
        connection.recv(1)

    with pytest.raises(UnreachableError, match=r"download failed for \d+ s, 0 of 21 chunks downloaded: .*sent nothing"):
        fetch(served(silent).url)
    good = served()
    got, _ = fetch(served(silent).url, good.url)
    np.testing.assert_array_equal(got, DATA)


def test_no_source_is_said_so():
    with pytest.raises(UnreachableError, match="it has no source"):
        fetch()


def test_stop_ends_a_download_that_waits_for_a_silent_place(served):
    entered, stop = threading.Event(), threading.Event()

    def silent(_: Request, connection: socket.socket) -> None:
        entered.set()
        connection.recv(1)

    server = served(silent)
    threading.Thread(target=lambda: (entered.wait(), stop.set())).start()
    with pytest.raises(DownloadStoppedError):
        fetch(server.url, stop=stop, patience=RetryPolicy(silence_s=1e6, give_up_s=1e6))


@pytest.mark.heavy
def test_slow_place_makes_progress_though_no_range_would_arrive_in_time(served):
    """On a bad day ranges shrink to one chunk, which is what can arrive before the silence is too long."""
    small = RetryPolicy(num_ranges=4, range_bytes=16 * CHUNK, silence_s=0.25, give_up_s=20.0, first_backoff_s=0.01)

    def slow(request: Request, connection: socket.socket) -> bytes | None:
        if request.end - request.start > CHUNK:  # more than the link carries in that time
            connection.recv(1)
            return None
        return DATA[request.start : request.end].tobytes()

    got, _ = fetch(served(slow).url, patience=small, chunks=range(6))
    np.testing.assert_array_equal(got[:6000], DATA[:6000])


@pytest.mark.heavy
def test_bucket_of_files_is_read_like_any_other_place(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "slot-0").write_bytes(DATA.tobytes())
    got, _ = fetch(f"file://{tmp_path}")
    np.testing.assert_array_equal(got, DATA)
    (tmp_path / "v1" / "slot-0").unlink()
    with pytest.raises(SupersededError):
        fetch(f"file://{tmp_path}")
    (tmp_path / "v1" / "slot-0").write_bytes(DATA[:9000].tobytes())
    with pytest.raises(SnapshotError):
        fetch(f"file://{tmp_path}")


def test_chunks_verified_are_those_of_the_announced_digests():
    """The oracle: what is compared is BLAKE3 of plain slices."""
    digests = [blake3.blake3(DATA[i : i + CHUNK].tobytes()).digest() for i in range(0, DATA.size, CHUNK)]
    assert FILE.chunk_hashes == b"".join(digests)
