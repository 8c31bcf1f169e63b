import fcntl
import os
import pathlib

import pytest

from bridge import files
from bridge.files import replace_file, try_flock


def test_try_flock_is_taken_once_and_free_when_its_holder_is_gone(tmp_path):
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_flock(first, fcntl.LOCK_EX)
    assert not try_flock(second, fcntl.LOCK_EX) and not try_flock(second, fcntl.LOCK_SH)
    os.close(first)
    assert try_flock(second, fcntl.LOCK_EX)
    os.close(second)


@pytest.mark.parametrize("is_durable", [False, True])
def test_replace_file_others_see_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch, is_durable):
    path = tmp_path / "file"
    replace_file(path, b"old", is_durable=is_durable)
    seen, flushed = [], []
    real_replace, real_fsync = os.replace, os.fsync

    def replace(part, target):
        seen.append((part.read_bytes(), target.read_bytes(), len(flushed)))
        real_replace(part, target)

    monkeypatch.setattr(files.os, "replace", replace)
    monkeypatch.setattr(files.os, "fsync", lambda fd: (flushed.append(fd), real_fsync(fd)))
    replace_file(path, b"new one", is_durable=is_durable)
    assert seen == [(b"new one", b"old", int(is_durable))]
    assert path.read_bytes() == b"new one" and list(tmp_path.iterdir()) == [path]


def test_replace_file_by_two_processes_of_one_id_on_a_shared_folder_is_whole_each_time(tmp_path, monkeypatch):
    path, real_replace = tmp_path / "file", os.replace
    monkeypatch.setattr(files.os, "getpid", lambda: 7)  # as in containers of two machines

    def replace(part, target):
        monkeypatch.setattr(files.os, "replace", real_replace)
        replace_file(path, b"the other's")  # while this one has written, and not replaced yet
        real_replace(part, target)

    monkeypatch.setattr(files.os, "replace", replace)
    replace_file(path, b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_replace_file_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def full(part, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_replace_file_sweeps_what_killed_writers_left_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "2[.json"
    foreign = [tmp_path / ".other", tmp_path / "1.json.sluice-part"]
    for file in foreign:
        file.touch()
        os.utime(file, (0, 0))

    def kill(*_):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", kill)
        patch.setattr(pathlib.Path, "unlink", lambda *_, **__: None)  # a killed process takes nothing back
        for name in ("1.json", "3.json"):
            with pytest.raises(OSError, match="killed"):
                replace_file(tmp_path / name, b"part")
    left, written_now = sorted(set(tmp_path.iterdir()) - set(foreign))
    os.utime(left, (0, 0))
    replace_file(path, b"new")
    assert set(tmp_path.iterdir()) == {path, written_now, *foreign}


def test_replace_file_with_a_mode_has_it_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "ca.pem", b"public", mode=0o644)
    finally:
        os.umask(before)
    assert (tmp_path / "ca.pem").stat().st_mode & 0o777 == 0o644
