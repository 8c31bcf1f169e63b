"""The snapshot server as a process, and what kills do to it, to its parent and to who downloads."""

import os
import pathlib
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from bridge import codec
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.verified_copy import map_tensors
from launch.services.snapshot_server import ServerProcess
from tests.bridge.snapshots.served import (
    CHUNK_BYTES,
    RUN,
    TOKEN,
    TOKENIZER,
    ScriptedServer,
    announced,
    at,
    certificates,
    file_path,
    get,
    open_writer,
    publish,
    values,
)
from tests.integration.support.processes import REPO, piped, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def environment(tmp_path, monkeypatch):
    server, client = certificates(tmp_path / "tls")
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("0123456789abcdef" * 2)
    monkeypatch.setenv("SLUICE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("SLUICE_TLS_CERT", str(server.certificate))
    monkeypatch.setenv("SLUICE_TLS_KEY", str(server.key))
    return client


@pytest.fixture
def writer(tmp_path):
    made = open_writer(tmp_path / "w", token=TOKEN, lock_timeout_s=20.0)
    yield made
    made.close()


def start(tmp_path, *, listen: str = "127.0.0.1:0", scheme: str = "https") -> ServerProcess:
    return ServerProcess(tmp_path / "w", listen=listen, scheme=scheme, reader_grace_s=5.0, log=tmp_path / "server.log")


def test_server_process_serves_what_is_published_and_ends_by_sigterm(tmp_path, environment, writer):
    server = start(tmp_path)  # before there is anything to serve
    for step in (1, 2):
        manifest = publish(writer, step)
        assert get(server.url, file_path(manifest), token=TOKEN, ca=environment).body == values(step).tobytes()
        assert get(server.url, file_path(manifest), ca=environment).status == 401
    server.close()
    assert server.returncode == 0
    assert "0123456789abcdef" not in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize(
    ("listen", "scheme", "without", "complaint"),
    [
        ("0.0.0.0:0", "http", "", "is reachable from other machines"),
        ("0.0.0.0:0", "https", "SLUICE_TOKEN_FILE", "without a token"),
        ("127.0.0.1:0", "https", "SLUICE_TLS_CERT", "SLUICE_TLS"),
    ],
)
def test_server_process_that_must_not_start_says_why_in_one_line(
    tmp_path, environment, monkeypatch, listen, scheme, without, complaint
):
    monkeypatch.delenv(without, raising=False)
    with pytest.raises(ValueError, match=f"snapshot server start failed: error: .*{complaint}") as caught:
        start(tmp_path, listen=listen, scheme=scheme)
    assert "\n" not in str(caught.value)


PARENT = """
import os, pathlib, sys, time
from launch.services.snapshot_server import ServerProcess
server = ServerProcess(pathlib.Path(sys.argv[1]), listen="127.0.0.1:0", scheme="http", reader_grace_s=5.0,
                       log=pathlib.Path(sys.argv[2]))
print(server.pid, flush=True)
sys.stdin.read()
"""


def test_server_process_dies_with_a_parent_that_is_killed(tmp_path):
    parent = piped(PARENT, tmp_path / "w", tmp_path / "log")
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    held = os.pidfd_open(pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: bool(select.select([held], [], [], 0)[0]), "the server ends")
    os.close(held)


DOWNLOADER = """
import pathlib, sys, threading
from bridge import codec
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.weight_types import (Announcement)
announcement = codec.decode(Announcement, pathlib.Path(sys.argv[2]).read_bytes())
patience = RetryPolicy(num_ranges=1, range_bytes=1, silence_s=1e6, give_up_s=1e6)
fetcher = SnapshotFetcher(run=sys.argv[3], tokenizer_hash=sys.argv[4], patience=patience)
SharedDownload(pathlib.Path(sys.argv[1]), run=sys.argv[3], fetcher=fetcher).fetch(announcement, stop=threading.Event())
"""


def test_downloader_killed_in_the_middle_is_gone_on_with_by_the_next(tmp_path, writer):
    """It fetched 7 chunks when it was killed; another process of the host, which was waiting, fetches the others."""
    manifest = publish(writer, 1)
    data = values(1).tobytes()
    seven_are_there, is_dead = threading.Event(), threading.Event()

    def script(request, connection):
        if request.start >= 7 * CHUNK_BYTES and not is_dead.is_set():
            seven_are_there.set()
            connection.recv(1)
            return None
        return data[request.start : request.end]

    server = ScriptedServer(data, script)
    announcement = announced(manifest, server.url)
    (tmp_path / "announcement").write_bytes(codec.encode(announcement))
    first = subprocess.Popen(
        [sys.executable, "-c", DOWNLOADER, str(tmp_path / "memory"), str(tmp_path / "announcement"), RUN, TOKENIZER],
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )
    assert seven_are_there.wait(30)
    next_ = SharedDownload(
        tmp_path / "memory", run=RUN, fetcher=SnapshotFetcher(run=RUN, tokenizer_hash=TOKENIZER), wait_s=60.0
    )
    got: list[pathlib.Path] = []
    waiting = threading.Thread(target=lambda: got.append(next_.fetch(announcement, stop=threading.Event())))
    waiting.start()
    server.requests.clear()
    is_dead.set()
    first.send_signal(signal.SIGKILL)
    first.wait()
    waiting.join()
    assert sum(end - start for start, end in server.ranges()) == len(data) - 7 * CHUNK_BYTES
    np.testing.assert_array_equal(map_tensors(got[0], manifest)["w"], values(1))
    assert manifest.version == at(1)
    next_.close()
    assert list((tmp_path / "memory").iterdir()) == []
    server.close()
