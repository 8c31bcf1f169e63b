"""Another user of the host, who came first or comes in between: nothing of his is read, written or served."""

import contextlib
import os
import pathlib
import shutil
import stat

import numpy as np
import pytest

from actor.weights.source import LocalCopy, sweep
from bridge.files import make_private_folder, open_own
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import MANIFEST, HostFiles, SnapshotError, latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy
from tests.bridge.snapshots.whole import write_whole
from tests.bridge.snapshots.written import KEYS, at, publish

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which root alone can")


def given_away(path: pathlib.Path) -> pathlib.Path:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def foreign_folder(path: pathlib.Path) -> None:
    path.mkdir(mode=0o700)
    given_away(path)


def open_folder(path: pathlib.Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def group_folder(path: pathlib.Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def linked_folder(path: pathlib.Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def plain_file(path: pathlib.Path) -> None:
    path.touch()


def dangling_link(path: pathlib.Path) -> None:
    path.symlink_to(path.parent / "nowhere")


SQUATS = [
    pytest.param(foreign_folder, marks=as_root),
    open_folder,
    group_folder,
    linked_folder,
    plain_file,
    dangling_link,
]


@pytest.mark.parametrize("squat", SQUATS)
@pytest.mark.parametrize("user", ["writer", "shared", "itself"])
def test_folder_that_is_not_this_users_alone_is_refused_and_nothing_is_put_there(tmp_path, squat, user):
    users = {
        "writer": ("run", lambda: SnapshotWriter(tmp_path / "run", **KEYS)),
        "shared": (f"sluice-shared-{os.geteuid()}-r", lambda: SharedDownload(tmp_path, run="r", fetcher=None)),  # pyright: ignore[reportArgumentType]
        "itself": ("any", lambda: make_private_folder(tmp_path / "any")),
    }
    name, begin = users[user]
    squat(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"{name}: other users can write to it"):
        begin()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_folder_and_files_of_a_version_are_closed_whatever_the_umask(tmp_path, umask):
    """Another user of the host reads or changes weights in shared memory | slots and locks 0600"""
    old = os.umask(umask)
    try:
        writer = SnapshotWriter(tmp_path / "run", **KEYS, has_spare=True)
        publish(writer, 1)
        writer.close()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    for name in (*HostFiles().slots, HostFiles().writer):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600


def test_own_folder_that_others_could_only_read_is_closed_to_them(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    SnapshotWriter(tmp_path / "run", **KEYS).close()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["slot-0", "slot-1", "writer"])
@pytest.mark.parametrize("planted", [pytest.param("foreign", marks=as_root), "link", "fifo"])
def test_file_planted_in_the_folder_is_refused_and_not_written(tmp_path, name, planted):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir(mode=0o700)
    victim.write_bytes(b"precious")
    if planted == "foreign":
        (folder / name).touch()
        given_away(folder / name)
    elif planted == "link":
        (folder / name).symlink_to(victim)
    else:
        os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name} is not this user's own file"):
        SnapshotWriter(folder, **KEYS)
    assert victim.read_bytes() == b"precious"


@as_root
@pytest.mark.parametrize("swapped", ["manifest", "slot", "both"])
def test_reader_refuses_a_version_that_another_user_put_in_the_folders_place(tmp_path, swapped):
    writer = SnapshotWriter(tmp_path / "run", **KEYS)
    manifest = publish(writer, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "evil")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "evil").rename(tmp_path / "run")
    slot = tmp_path / "run" / manifest.shards[0].file.name
    for path in {"manifest": [MANIFEST], "slot": [slot.name], "both": [MANIFEST, slot.name]}[swapped]:
        given_away(tmp_path / "run" / path)
    with (
        contextlib.closing(VerifiedCopy(tmp_path / "run", tmp_path / "local", **KEYS)) as mirror,
        pytest.raises(SnapshotError, match="is not this user's own file"),
    ):
        mirror.fetch(manifest)
    if swapped != "slot":
        with pytest.raises(SnapshotError, match="is not this user's own file"):
            latest(tmp_path / "run")
    writer.close()


@pytest.mark.parametrize("planted", [pytest.param("foreign", marks=as_root), "link"])
def test_mirror_refuses_a_local_file_that_another_user_made_first(tmp_path, planted):
    into, victim = tmp_path / "local", tmp_path / "victim"
    victim.write_bytes(b"precious")
    if planted == "foreign":
        into.touch()
        given_away(into)
    else:
        into.symlink_to(victim)
    with pytest.raises(ValueError, match="is not this user's own file"):
        VerifiedCopy(tmp_path / "run", into, **KEYS)
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("squat", [pytest.param(foreign_folder, marks=as_root), linked_folder, plain_file])
def test_actors_copy_is_not_made_in_what_another_user_put_there(tmp_path, squat):
    squat(tmp_path / "run.copy-a")
    with pytest.raises(ValueError, match="run.copy-a: other users can write to it"):
        LocalCopy(tmp_path / "run", "a")


def test_actors_copy_is_closed_to_others(tmp_path):
    copy = LocalCopy(tmp_path / "run", "a")
    assert stat.S_IMODE(copy.file.parent.stat().st_mode) == 0o700
    copy.close()


@as_root
def test_sweep_of_dead_copies_leaves_another_users_folder_and_follows_no_link(tmp_path):
    theirs, victim = tmp_path / "run.copy-evil", tmp_path / "made-by-sweep"
    theirs.mkdir()
    (theirs / "owner").symlink_to(victim)
    given_away(theirs)
    sweep(tmp_path / "run")
    assert theirs.is_dir() and not victim.exists()


def test_open_own_reads_what_this_user_wrote_and_says_what_is_missing(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    fd = open_own(tmp_path / "file", os.O_RDONLY)
    assert os.read(fd, 9) == b"text"
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "none", os.O_RDONLY)
    with pytest.raises(ValueError, match="is not this user's own file"):
        open_own(tmp_path, os.O_RDWR)


def test_version_written_and_mirrored_by_one_user_is_what_was_written(tmp_path):
    writer = SnapshotWriter(tmp_path / "run", **KEYS)
    manifest = write_whole(writer, at(1), {"w": np.full(1000, 42.0, np.float32)}, dtype="float32")
    with contextlib.closing(VerifiedCopy(tmp_path / "run", tmp_path / "deep" / "er" / "local", **KEYS)) as mirror:
        mirror.fetch(manifest)
    assert (tmp_path / "deep" / "er" / "local").stat().st_size >= manifest.num_bytes
    writer.close()
