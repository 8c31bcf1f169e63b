import contextlib
import errno
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from learner import checkpoint_hosts
from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError


def arrays(step):
    """A tree like a train state's, of values that name the step."""
    return {
        "params": {"kernel": jnp.arange(12, dtype=jnp.float32).reshape(3, 4) / 3 + step},
        "moments": jnp.full((5,), step + 0.5, jnp.bfloat16),
        "step": jnp.asarray(step, jnp.int32),
    }


def host(step):
    return {"queue": {"unacknowledged": [f"{step:09d}", "x"]}, "planner": {"num_issued": step}, "empty": []}


ABSTRACT = jax.eval_shape(lambda: arrays(0))


@contextlib.contextmanager
def opened(tmp_path, *, keep=2, **options):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=keep, **options)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def save(checkpoints, step):
    """Returns the step once it is saved; None if that failed."""
    checkpoints.save(step, arrays(step), host(step))
    return checkpoints.wait()


def save_all(tmp_path, *steps, keep=2):
    with opened(tmp_path, keep=keep) as checkpoints:
        for step in steps:
            assert save(checkpoints, step) == step


def restored_step(tmp_path, *, keep=2):
    """The step that a new learner starts from, its contents checked; None if it starts afresh."""
    with opened(tmp_path, keep=keep) as checkpoints:
        restored = checkpoints.restore_latest(ABSTRACT)
    if restored is None:
        return None
    step, tree, host_state = restored
    jax.tree.map(np.testing.assert_array_equal, tree, arrays(step))
    assert jax.tree.map(lambda x: x.dtype, tree) == jax.tree.map(lambda x: x.dtype, arrays(step))
    assert host_state == host(step)
    return step


def test_part_of_what_was_saved_is_restored_alone(tmp_path):
    save_all(tmp_path, 1, 2)
    with opened(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest({"params": ABSTRACT["params"]}, is_part=True)
    assert restored is not None
    step, tree, host_state = restored
    assert step == 2 and host_state == host(2) and tree.keys() == {"params"}
    np.testing.assert_array_equal(tree["params"]["kernel"], arrays(2)["params"]["kernel"])


def data_files(folder: pathlib.Path):
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)


def flip_byte(file: pathlib.Path, at=0.5):
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x40
    file.write_bytes(data)


def test_save_keeps_the_last_ones_with_their_hashes(tmp_path):
    save_all(tmp_path, 1, 2, 3, 4)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"3", "4"}
    assert {p.name for p in (tmp_path / "checkpoints.hashes").iterdir()} == {"3.json", "4.json"}


def test_committed_reports_a_step_once_and_only_when_hashed(tmp_path):
    with opened(tmp_path) as checkpoints:
        assert checkpoints.committed() is None
        checkpoints.save(3, arrays(3), host(3))
        while (step := checkpoints.committed()) is None:
            pass
        assert step == 3
        assert (tmp_path / "checkpoints.hashes" / "3.json").is_file()
        assert checkpoints.committed() is None and checkpoints.wait() is None


def test_save_after_arrays_changed_holds_the_values_of_the_call(tmp_path):
    values = np.arange(6, dtype=np.float32)
    with opened(tmp_path) as checkpoints:
        state = {"x": jnp.asarray(values)}
        checkpoints.save(1, state, {})
        state["x"].delete()  # what donation does to the next step's input
        checkpoints.wait()
        restored = checkpoints.restore_latest({"x": jax.ShapeDtypeStruct((6,), jnp.float32)})
    assert restored is not None
    np.testing.assert_array_equal(restored[1]["x"], values)


def test_restore_latest_any_flipped_byte_falls_back_to_the_step_before(tmp_path):
    save_all(tmp_path, 2, 4)
    newest = tmp_path / "checkpoints" / "4"
    names = [p.relative_to(newest) for p in data_files(newest)]
    assert len(names) >= 3
    with opened(tmp_path) as checkpoints:
        for name in names:
            file = newest / name
            good = file.read_bytes()
            flip_byte(file)
            assert checkpoints._damage(4) is not None, name
            file.write_bytes(good)
        assert checkpoints._damage(4) is None
    flip_byte(max(data_files(newest / "arrays"), key=lambda p: p.stat().st_size))
    assert restored_step(tmp_path) == 2


def test_restore_latest_a_disk_that_fails_while_it_reads_is_the_systems_error_and_nothing_is_set_aside(tmp_path):
    save_all(tmp_path, 2, 4)

    def break_disk(_):  # its files were found to be intact, and its books are read
        for file in (tmp_path / "checkpoints" / "4" / "arrays").rglob("d/*"):
            file.unlink()
            file.symlink_to(file)

    with opened(tmp_path) as checkpoints, pytest.raises(OSError, match="symbolic links"):
        checkpoints.restore_latest(ABSTRACT, check=break_disk)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "checkpoints.hashes"]


@pytest.mark.parametrize("harm", ["missing", "added", "torn"])
def test_restore_latest_missing_added_or_torn_file_falls_back(tmp_path, harm):
    save_all(tmp_path, 2, 4)
    file = data_files(tmp_path / "checkpoints" / "4" / "arrays")[0]
    if harm == "missing":
        file.unlink()
    elif harm == "added":
        file.with_name("stray").write_text("x")
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert restored_step(tmp_path) == 2


def test_restore_latest_damaged_step_can_be_reached_and_damaged_again(tmp_path):
    for _ in range(2):
        save_all(tmp_path, *([2, 4] if restored_step(tmp_path) is None else [4]))
        flip_byte(data_files(tmp_path / "checkpoints" / "4")[0])
        assert restored_step(tmp_path) == 2
        assert not (tmp_path / "checkpoints" / "4").exists()
    save_all(tmp_path, 4)
    assert restored_step(tmp_path) == 4


def test_restore_latest_with_none_intact_is_an_error_every_time(tmp_path):
    save_all(tmp_path, 2, 4)
    for step in (2, 4):
        flip_byte(data_files(tmp_path / "checkpoints" / str(step))[0])
    for _ in range(2):  # a supervisor starts the learner again: it must not begin at step 0
        with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"no intact checkpoint.*\[4, 2\]"):
            checkpoints.restore_latest(ABSTRACT)


def test_restore_latest_killed_before_hashing_uses_the_step_before(tmp_path):
    save_all(tmp_path, 2, 4)
    (tmp_path / "checkpoints.hashes" / "4.json").unlink()
    assert restored_step(tmp_path) == 2
    save_all(tmp_path, 4)
    assert restored_step(tmp_path) == 4


def test_restore_latest_killed_before_hashing_the_first_step_starts_afresh(tmp_path):
    # Nothing was acknowledged, so everything is still in the store.
    save_all(tmp_path, 2)
    (tmp_path / "checkpoints.hashes" / "2.json").unlink()
    assert restored_step(tmp_path) is None
    save_all(tmp_path, 2)
    assert restored_step(tmp_path) == 2


def test_restore_latest_with_all_hashes_lost_is_an_error(tmp_path):
    save_all(tmp_path, 2, 4)
    for file in (tmp_path / "checkpoints.hashes").iterdir():
        file.unlink()
    with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no intact checkpoint"):
        checkpoints.restore_latest(ABSTRACT)


@pytest.mark.parametrize("step", [3, 4])
def test_save_of_a_step_that_is_not_after_the_latest_is_refused(tmp_path, step):
    save_all(tmp_path, 2, 4)
    with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=f"above the latest .*, got {step}"):
        checkpoints.save(step, arrays(0), host(0))
    assert restored_step(tmp_path) == 4


class Disk:
    """Stands for the disk: the `where` of a save fails while it is full."""

    def __init__(self, monkeypatch, where: str) -> None:
        self.is_full = False
        for name, (owner, function) in {
            "beginning": (ocp.CheckpointManager, "save"),
            "writing": (ocp.CheckpointManager, "wait_until_finished"),
            "hashing": (checkpoint_hosts, "hash_files"),
        }.items():
            if name == where:
                monkeypatch.setattr(owner, function, self.failing(getattr(owner, function)))

    def failing(self, real):
        def call(*args, **options):
            result = real(*args, **options)
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return result

        return call


@pytest.fixture(params=["beginning", "writing", "hashing"])
def disk(monkeypatch, request):
    return Disk(monkeypatch, request.param)


def steps_there(tmp_path):
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())


@pytest.mark.heavy
def test_save_that_fails_leaves_nothing_is_counted_and_the_next_one_is_made(tmp_path, disk, caplog):
    with opened(tmp_path, max_failed_in_a_row=3) as checkpoints:
        for step in range(1, 9):
            disk.is_full = step in (3, 4, 6, 7)
            assert save(checkpoints, step) == (None if disk.is_full else step)
            if disk.is_full:
                assert steps_there(tmp_path) == [str(s) for s in ({3: (1, 2), 4: (1, 2)}.get(step, (2, 5)))]
                with pytest.raises(
                    CheckpointError, match=rf"cannot save the checkpoint of step {step}: its disk is full$"
                ):
                    checkpoints.check_saved(step)
        assert checkpoints.num_failed == 4 and checkpoints.latest == 8
    assert restored_step(tmp_path) == 8
    assert [caplog.text.count(left) for left in ("and 2 further failures end", "and 1 further failure ends")] == [2, 2]


def test_save_that_fails_opens_nothing_before_the_next_so_the_host_that_hears_of_it_first_waits_for_no_other(
    tmp_path, disk, monkeypatch
):
    real, opens = Checkpoints._open, []
    monkeypatch.setattr(Checkpoints, "_open", lambda self: opens.append(0) or real(self))
    with opened(tmp_path, max_failed_in_a_row=3) as checkpoints:
        disk.is_full = True
        assert save(checkpoints, 1) is None and len(opens) == 1
        disk.is_full = False
        assert save(checkpoints, 2) == 2 and len(opens) == 2


def test_saves_that_fail_too_often_in_a_row_are_an_error_and_the_last_one_that_did_not_is_restored(tmp_path, disk):
    with opened(tmp_path, max_failed_in_a_row=2) as checkpoints:
        save(checkpoints, 1)
        disk.is_full = True
        save(checkpoints, 2)
        with pytest.raises(CheckpointError, match=r"step 3: its disk is full \(the last 2 failed"):
            save(checkpoints, 3)
        assert steps_there(tmp_path) == ["1"]
        disk.is_full = False
    assert restored_step(tmp_path) == 1


@pytest.mark.parametrize("what", ["step", "hashes"])
def test_old_checkpoints_that_cannot_be_deleted_fail_no_save_and_go_later(tmp_path, monkeypatch, what):
    owner, name = {"step": (shutil, "rmtree"), "hashes": (pathlib.Path, "unlink")}[what]
    real, failed = getattr(owner, name), []

    def fail(self, *args, **options):
        if what == "hashes" and self.suffix != ".json":
            return real(self, *args, **options)
        failed.append(args)
        raise PermissionError("not yours")

    with opened(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            for step in (2, 3):
                assert save(checkpoints, step) == step
        assert len(failed) >= 2 and checkpoints.num_failed == 0 and checkpoints.latest == 3
        save(checkpoints, 4)
        assert steps_there(tmp_path) == ["4"]
        assert [p.name for p in (tmp_path / "checkpoints.hashes").iterdir()] == ["4.json"]
    assert restored_step(tmp_path) == 4


def test_half_a_save_of_a_killed_learner_is_removed_by_the_next_one(tmp_path):
    save_all(tmp_path, 1)
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    (half / "arrays").mkdir(parents=True)
    assert restored_step(tmp_path) == 1
    assert steps_there(tmp_path) == ["1"]
