"""Snapshots that several hosts write: together they are the file that a single one would have written."""

import contextlib
import dataclasses
import os
import pathlib

import numpy as np
import pytest

from bridge import codec
from bridge.snapshots.snapshot_format import HostFiles, SnapshotError, SupersededError, check_layout, latest
from bridge.snapshots.verified_copy import VerifiedCopy, map_tensors
from tests.bridge.factories import with_piece
from tests.bridge.snapshots.hosts import ENTRIES, HostWriters, alone, model
from tests.bridge.snapshots.served import RUN, TOKENIZER, at
from tests.bridge.snapshots.written import BFLOAT16

KEYS = {"run": RUN, "tokenizer_hash": TOKENIZER, "expected": {name: (dtype, shape) for name, dtype, shape in ENTRIES}}


@pytest.fixture
def hosts(tmp_path):
    """Four on one machine."""
    made = HostWriters([tmp_path / "snap"] * 4, full_every=100)
    yield made
    made.close()


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
def test_mirror_puts_together_byte_for_byte_what_one_host_writes(tmp_path, num_hosts):
    hosts = HostWriters([tmp_path / "snap"] * num_hosts)
    local = tmp_path / "actor" / "weights"
    with contextlib.closing(VerifiedCopy(tmp_path / "snap", local, **KEYS)) as mirror:
        for step in (1, 2, 3):
            manifest = hosts.publish(step)
            assert [piece.host for piece in manifest.shards] == list(range(num_hosts))
            mirror.fetch(manifest)
            assert local.read_bytes()[: manifest.num_bytes] == alone(tmp_path / f"alone-{step}", step)
    got = map_tensors(local, manifest)
    np.testing.assert_array_equal(got["embed"], model(3)["embed"].astype(BFLOAT16))
    hosts.close()


def test_single_hosts_piece_is_the_file_itself(tmp_path):
    manifest = HostWriters([tmp_path / "snap"]).publish(1)
    (piece,) = manifest.shards
    assert piece.file.num_bytes == manifest.num_bytes and piece.file.name == "slot-0"
    assert (tmp_path / "snap" / "slot-0").read_bytes()[: manifest.num_bytes] == alone(tmp_path / "alone", 1)


def test_version_is_not_there_until_all_hosts_have_sealed_it(hosts, tmp_path):
    first = hosts.publish(1)
    drafts = [hosts.write(host, 2) for host in range(4)]
    parts = [draft.seal() for draft in drafts[:3]]
    drafts[3].abort()
    assert latest(tmp_path / "snap") == first
    with pytest.raises(SnapshotError, match="version 0:2: no piece has"):
        hosts.writers[0].join(parts)
    with contextlib.closing(VerifiedCopy(tmp_path / "snap", tmp_path / "weights", **KEYS)) as mirror:
        mirror.fetch(first)  # whole, in slots that nobody wrote meanwhile
        second = hosts.publish(2)  # again, into the same slots
        assert {p.file.name.split(".")[0] for p in second.shards} == {"slot-1"}
        mirror.fetch(second)
        with pytest.raises(SupersededError, match="announced is 0:2"):
            mirror.fetch(first)


def test_parts_of_unlike_versions_are_not_joined(hosts):
    parts = [hosts.write(host, 1).seal() for host in range(4)]
    late = dataclasses.replace(parts[3], version=at(2))
    with pytest.raises(SnapshotError, match="belong to different snapshots"):
        hosts.writers[0].join([*parts[:3], late])
    with pytest.raises(SnapshotError, match="two pieces have the same part of tensor embed"):
        twice = with_piece(parts[0], host=3, file=dataclasses.replace(parts[0].shards[0].file, name="slot-0.host-3"))
        hosts.writers[0].join([*parts[:3], twice])
    assert hosts.writers[0].join(parts[::-1]) == hosts.writers[0].join(parts)


def test_piece_that_is_not_on_this_machine_is_said(hosts, tmp_path):
    manifest = hosts.publish(1)
    (tmp_path / "snap" / "slot-0.host-2").unlink()
    with (
        contextlib.closing(VerifiedCopy(tmp_path / "snap", tmp_path / "weights", **KEYS)) as mirror,
        pytest.raises(SnapshotError, match="slot-0.host-2 does not exist; where the learner has several machines"),
    ):
        mirror.fetch(manifest)


def test_corrupt_chunk_of_one_host_is_refused_and_named(hosts, tmp_path):
    manifest = hosts.publish(1)
    with open(tmp_path / "snap" / "slot-0.host-2", "r+b") as f:
        f.seek(5000)
        byte = f.read(1)
        f.seek(5000)
        f.write(bytes([byte[0] ^ 1]))
    with (
        contextlib.closing(VerifiedCopy(tmp_path / "snap", tmp_path / "weights", **KEYS)) as mirror,
        pytest.raises(SnapshotError, match=r"1 of \d chunks of slot-0.host-2 do not match their hash, first 1"),
    ):
        mirror.fetch(manifest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: dataclasses.replace(m, shards=m.shards[1:]), "no piece has a part of tensor embed"),
        (lambda m: with_piece(m, blocks=m.shards[1].blocks), "two pieces have"),
        (lambda m: with_piece(m, blocks=m.shards[0].blocks[::-1]), ""),
        (lambda m: with_piece(m, file=m.shards[1].file), "not a slot of host 0"),
        (lambda m: with_piece(m, blocks=()), "no piece has"),
    ],
)
def test_pieces_that_do_not_tile_are_refused_before_anything_is_read(hosts, tmp_path, change, said):
    forged = change(hosts.publish(1))
    if said:
        with pytest.raises(SnapshotError, match=said):
            check_layout(forged)
        (tmp_path / "snap" / "manifest").write_bytes(codec.encode(forged))
        with contextlib.closing(VerifiedCopy(tmp_path / "snap", tmp_path / "weights", **KEYS)) as mirror:
            with pytest.raises(SnapshotError, match=said):
                mirror.fetch(forged)
            assert os.stat(tmp_path / "weights").st_size == 0


def test_learner_with_fewer_processes_removes_what_dead_ones_left_and_no_live_ones(hosts, tmp_path):
    hosts.publish(1)
    hosts.writers[2].close()
    with pytest.raises(SnapshotError, match="another live process"):
        HostWriters([tmp_path / "snap"])
    hosts.writers[0].close()
    one = HostWriters([tmp_path / "snap"])
    there = {path.name for path in (tmp_path / "snap").iterdir()}
    assert not there & set(HostFiles(2).all) and set(HostFiles(1).slots[:2]) | {"writer.host-3"} <= there
    one.publish(2)
    one.close()


def test_hosts_of_one_machine_remove_the_folder_together(tmp_path):
    hosts = HostWriters([tmp_path / "snap"] * 3)
    hosts.publish(1)
    for writer in hosts.writers:
        assert (tmp_path / "snap").exists()
        writer.remove()
    assert not (tmp_path / "snap").exists()


def test_folder_that_another_host_deletes_meanwhile_is_removed_without_an_error(tmp_path, monkeypatch, caplog):
    hosts = HostWriters([tmp_path / "snap"] * 2)
    hosts.publish(1)
    rmdir = pathlib.Path.rmdir

    def after_the_other_host(folder: pathlib.Path) -> None:
        monkeypatch.undo()
        try:
            rmdir(folder)
        finally:
            hosts.writers[1].remove()

    monkeypatch.setattr(pathlib.Path, "rmdir", after_the_other_host)
    hosts.writers[0].remove()
    hosts.writers[0].remove()
    assert not (tmp_path / "snap").exists() and not caplog.text
