import contextlib
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from bridge.snapshots.remote.download import DownloadStoppedError, RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import SnapshotBusyError, SnapshotError, SupersededError
from bridge.snapshots.verified_copy import map_tensors
from tests.bridge.snapshots.served import (
    OTHER_TOKEN,
    RUN,
    TOKEN,
    TOKENIZER,
    ScriptedServer,
    announced,
    open_writer,
    publish,
    serving,
    values,
)

QUICK = RetryPolicy(num_ranges=1, silence_s=30.0, give_up_s=0.5, first_backoff_s=0.01, last_backoff_s=0.02)


def join(root: Path, *, wait_s: float = 20.0, token=TOKEN, run: str = RUN) -> SharedDownload:
    made = SnapshotFetcher(run=run, tokenizer_hash=TOKENIZER, token=token, patience=QUICK, lock_timeout_s=0.05)
    return SharedDownload(root, run=run, fetcher=made, wait_s=wait_s)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "memory"


@pytest.fixture
def writer(tmp_path):
    made = open_writer(tmp_path / "w", token=TOKEN, lock_timeout_s=20.0)
    yield made
    made.close()


def folders(root: Path) -> list[str]:
    return [p.name for p in root.iterdir()]


def fetch(shared: SharedDownload, announcement, stop: threading.Event | None = None) -> Path:
    return shared.fetch(announcement, stop=stop or threading.Event())


def test_two_processes_take_one_download_and_two_files_in_turn(root, writer):
    with contextlib.closing(join(root)) as one, contextlib.closing(join(root)) as two:
        for step in range(4):
            manifest = publish(writer, step)
            server = ScriptedServer(values(step).tobytes())
            announcement = announced(manifest, server.url)
            path = fetch(one, announcement)
            num_requests = len(server.requests)
            assert fetch(two, announcement) == path == root / folders(root)[0] / f"copy-{step % 2}"
            assert len(server.requests) == num_requests
            np.testing.assert_array_equal(map_tensors(path, manifest)["w"], values(step))
            server.close()


def test_two_that_race_download_once_and_both_get_it(root, writer):
    manifest = publish(writer, 1)
    data = values(1).tobytes()
    server = ScriptedServer(data)
    sharing = [join(root) for _ in range(4)]
    got: list[Path] = []
    together = threading.Barrier(len(sharing))

    def race(shared: SharedDownload) -> None:
        together.wait()
        got.append(fetch(shared, announced(manifest, server.url)))

    threads = [threading.Thread(target=race, args=(s,)) for s in sharing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4 and len(set(got)) == 1
    assert sum(end - start for start, end in server.ranges()) == len(data)
    for shared in sharing:
        shared.close()
    server.close()


def test_who_waits_for_a_download_is_bounded_and_can_be_stopped(root, writer):
    manifest = publish(writer, 1)
    entered, go_on = threading.Event(), threading.Event()
    data = values(1).tobytes()

    def held(request, _):
        entered.set()
        go_on.wait()
        return data[request.start : request.end]

    server = ScriptedServer(data, held)
    announcement = announced(manifest, server.url)
    with contextlib.closing(join(root)) as one, contextlib.closing(join(root, wait_s=0.1)) as two:
        thread = threading.Thread(target=fetch, args=(one, announcement))
        thread.start()
        entered.wait()
        with pytest.raises(SnapshotBusyError, match="another process of this host is still downloading"):
            fetch(two, announcement)
        stopped = threading.Event()
        stopped.set()
        with pytest.raises(DownloadStoppedError):
            fetch(two, announcement, stopped)
        go_on.set()
        thread.join()
        assert fetch(two, announcement).name == "copy-0"
    server.close()


def test_older_version_than_the_hosts_newest_is_never_fetched(root, writer, tmp_path):
    old, new = publish(writer, 1), publish(writer, 2)
    with serving(tmp_path / "w", token=TOKEN) as running, contextlib.closing(join(root)) as shared:
        fetch(shared, announced(new, running.url))
        with pytest.raises(SupersededError, match="0:2 is on this host"):
            fetch(shared, announced(old, running.url))


def test_forged_manifest_is_refused_also_when_the_host_has_the_version(root, writer, tmp_path):
    manifest = publish(writer, 1)
    with (
        serving(tmp_path / "w", token=TOKEN) as running,
        contextlib.closing(join(root)) as one,
        contextlib.closing(join(root, token=OTHER_TOKEN)) as two,
    ):
        fetch(one, announced(manifest, running.url))
        with pytest.raises(SnapshotError, match="not signed with this actor's token"):
            fetch(two, announced(manifest, running.url))


@pytest.mark.heavy
def test_version_one_process_has_yet_to_load_is_not_overwritten_but_replaced(root, writer, tmp_path):
    """One process is slow: it fetched version 1 and loads it only when version 3 is on the host."""
    with (
        serving(tmp_path / "w", token=TOKEN) as running,
        contextlib.closing(join(root)) as slow,
        contextlib.closing(join(root)) as quick,
    ):
        first = publish(writer, 1)
        path = fetch(slow, announced(first, running.url))
        mapped = map_tensors(path, first)
        for step in (2, 3, 4):
            manifest = publish(writer, step)
            got = fetch(quick, announced(manifest, running.url))
            np.testing.assert_array_equal(map_tensors(got, manifest)["w"], values(step))
            np.testing.assert_array_equal(mapped["w"], values(1))
        assert fetch(slow, announced(manifest, running.url)) == got


def test_last_to_leave_removes_the_folder_and_nobody_else_does(root):
    one, two = join(root), join(root)
    assert len(folders(root)) == 1
    one.close()
    one.close()
    assert len(folders(root)) == 1
    two.close()
    assert folders(root) == []


def test_folder_that_dead_processes_left_is_swept_and_a_live_ones_is_not(root):
    dead = root / f"sluice-shared-{os.geteuid()}-gone"
    dead.mkdir(parents=True)
    (dead / "users").touch()
    (dead / "copy-0").write_bytes(b"x")
    live = join(root, run="another")
    mine = join(root)
    assert not dead.exists()
    assert len(folders(root)) == 2
    mine.close()
    live.close()


def test_folder_is_closed_to_others_and_one_that_they_may_write_is_refused(root, writer):
    """Another user of the host reads or replaces fetched weights | folders 0700, files 0600; others' refused"""
    server = ScriptedServer(values(1).tobytes())
    with contextlib.closing(join(root)) as shared:
        path = fetch(shared, announced(publish(writer, 1), server.url))
        assert [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)] == [0o700, 0o600]
    server.close()
    folder = root / f"sluice-shared-{os.geteuid()}-{'run%201'}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="other users can write to it"):
        join(root)
    folder.rmdir()
    (root / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(root / "elsewhere")
    with pytest.raises(ValueError, match="other users can write to it"):
        join(root)
