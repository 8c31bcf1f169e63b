"""Trees in files: on one process, and on a mesh whose processes each read their own rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from learner.update.tree_file import hash_of, read_sharded, read_tree, write_tree
from tests.learner import several_hosts
from tests.learner.streams import config_of, fresh_params, pack, random_groups, steps_of

MERGE = (
    several_hosts.CONNECT
    + """
import pathlib
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from learner.update.tree_file import read_sharded
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def place(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: x[i])
like = {"split": place(np.zeros((4, 3), np.float32), "fsdp"), "whole": place(np.zeros(2, np.float32)),
        "sum": place(np.zeros((), np.float32))}
tree = read_sharded(pathlib.Path(sys.argv[4]), like)
for shard in tree["split"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), np.arange(12, dtype=np.float32).reshape(4, 3)[shard.index])
total = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x + y).sum(), a, b))(like, tree)
print({name: float(value) for name, value in total.items()})
"""
)


def test_batch_comes_back_with_its_dtypes_and_scalars(tmp_path):
    config = config_of()
    batch, *_ = (micro.batch for micro in pack(config, random_groups(0, 2)))
    digest = write_tree(tmp_path / "a", batch)
    assert digest == hash_of(tmp_path / "a")
    steps = steps_of(config)
    state = steps.init(fresh_params())
    again = read_tree(tmp_path / "a", batch)
    for path in ("tokens", "loss_mask", "denominator", "rewards"):
        np.testing.assert_equal(getattr(again, path), getattr(batch, path))
    assert again.denominator.shape == () and again.loss_mask.dtype == np.bool_
    one, other = (steps.accumulate(steps.init(fresh_params()), b).accumulator for b in (batch, again))
    assert float(one.loss) == float(other.loss) and int(state.step) == 0


def test_tree_of_another_model_is_refused(tmp_path):
    write_tree(tmp_path / "a", {"x": np.zeros((2, 3), np.float32)})
    with pytest.raises(ValueError, match="expected the arrays of this run's model, got others"):
        read_tree(tmp_path / "a", {"y": np.zeros((2, 3), np.float32)})
    with pytest.raises(ValueError, match=r"expected shape \(3, 2\), got \[2, 3\]"):
        read_sharded(tmp_path / "a", {"x": jnp.zeros((3, 2))})


@pytest.mark.heavy
def test_each_process_of_a_mesh_reads_its_own_rows(tmp_path):
    tree = {
        "split": np.arange(12, dtype=np.float32).reshape(4, 3),
        "whole": np.array([1.0, 2.0], np.float32),
        "sum": np.float32(5.0),
    }
    write_tree(tmp_path / "a", tree)
    said = several_hosts.run(MERGE, tmp_path / "a", count=2)
    assert [out.splitlines()[-1] for out in said] == ["{'split': 66.0, 'sum': 5.0, 'whole': 3.0}"] * 2
