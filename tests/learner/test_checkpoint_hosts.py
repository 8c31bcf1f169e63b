"""Saves of two processes that fail on one of them, or on both: all hear of it, go on, and save the next one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.checkpoint import Checkpoints
from tests.learner import several_hosts

SAVE = (
    several_hosts.CONNECT
    + """
import concurrent.futures
import contextlib
import errno
import json
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.checkpointers import async_checkpointer
from orbax.checkpoint._src.futures.future import ChainedFuture
from orbax.checkpoint._src.multihost import multihost
from learner import checkpoint_hosts
from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError

multihost._DEFAULT_BARRIER_TIMEOUT = 5  # the wait for a host that does not begin
folder, plan = sys.argv[4], json.loads(sys.argv[5])
fails = None

def failing(owner, name, where, before=False):
    real = getattr(owner, name)
    def call(*args, **options):
        result = None if before and fails == where else real(*args, **options)
        if fails == where:
            raise OSError(errno.ENOSPC, "No space left on device")
        return result
    setattr(owner, name, call)

failing(ocp.CheckpointManager, "save", "not begun", before=True)
failing(ocp.CheckpointManager, "save", "begun")
failing(ChainedFuture, "result", "written")
failing(async_checkpointer.AsyncCheckpointer, "_save_step_metadata", "made whole")
failing(checkpoint_hosts, "hash_files", "hashed")

mesh = jax.make_mesh((2,), ("x",))
sharding = NamedSharding(mesh, PartitionSpec("x"))
def arrays(step):
    return {"x": jax.make_array_from_callback((8,), sharding, lambda at: np.arange(8, dtype=np.float32)[at] + step)}

turn = hosts.channel("turn")
checkpoints = Checkpoints(folder, keep=2, max_failed_in_a_row=3, hosts=hosts)
end = ""
try:
    for step, (where, whose) in enumerate(plan, 1):
        turn.broadcast(b"save" if hosts.is_leader else None, timeout_s=60)  # as the leader tells what it decides
        fails = where if hosts.index in whose else None
        checkpoints.save(step, arrays(step), {"step": step})
        if hosts.is_leader and checkpoints._pending is not None:
            concurrent.futures.wait([checkpoints._pending[1]])
            checkpoints.committed()  # its own question, which the others are not asked
    checkpoints.wait()
except CheckpointError as e:
    end = str(e)
turn.broadcast(b"end" if hosts.is_leader else None, timeout_s=60)
fails = None
with contextlib.suppress(CheckpointError):
    checkpoints.close()
print(json.dumps({"num_failed": checkpoints.num_failed, "latest": checkpoints.latest, "end": end}))
turn.gather(b"closed", timeout_s=60)
turn.broadcast(b"closed" if hosts.is_leader else None, timeout_s=60)
"""
)


def saved(folder, *plan):
    """What each of two processes says of its saves; a save fails (where, at which of them)."""
    return [json.loads(out) for out in several_hosts.run(SAVE, folder, json.dumps(plan), count=2)]


def restored(folder):
    """Step and values, by one process alone."""
    checkpoints = Checkpoints(folder, keep=2)
    try:
        found = checkpoints.restore_latest(
            {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
        )
    finally:
        checkpoints.close()
    assert found is not None
    step, arrays, host_state = found
    np.testing.assert_array_equal(arrays["x"], np.arange(8, dtype=np.float32) + step)
    assert host_state == {"step": step}
    return step


@pytest.mark.heavy
@pytest.mark.parametrize(
    "failures",
    [
        pytest.param([("hashed", [1]), ("hashed", [0, 1])], id="hashing"),
        pytest.param([("written", [1]), ("written", [0])], id="writing at one"),
        pytest.param([("written", [0, 1]), ("made whole", [0])], id="writing at both, or at the end"),
        pytest.param([("begun", [1]), ("begun", [0, 1])], id="beginning"),
        pytest.param([("not begun", [1]), ("not begun", [0])], id="not beginning at one"),
    ],
)
def test_saves_that_fail_on_a_host_fail_on_all_and_the_next_one_is_made(tmp_path, failures):
    folder = tmp_path / "checkpoints"
    fine = ("", [])
    said = saved(folder, fine, *failures, fine)
    assert said == [{"num_failed": 2, "latest": 4, "end": ""}] * 2
    assert sorted(p.name for p in folder.iterdir()) == ["1", "4"]
    assert restored(folder) == 4


@pytest.mark.heavy
def test_saves_that_fail_too_often_on_one_host_end_all_and_say_whose_disk_is_full(tmp_path):
    folder = tmp_path / "checkpoints"
    full = ("written", [1])
    leader, follower = saved(folder, ("", []), full, full, full)
    assert leader["num_failed"] == follower["num_failed"] == 3 and leader["latest"] == follower["latest"] == 1
    assert "cannot save the checkpoint of step 4:" in leader["end"] and "host 1: its disk is full" in leader["end"]
    assert "cannot save the checkpoint of step 4:" in follower["end"] and "its disk is full" in follower["end"]
    assert restored(folder) == 1
