"""The memory of the documented deployment: what its hosts really write, what is rendered, and what a host looks for."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import pytest

from configs.overrides import apply, load_preset, to_json
from configs.sections import PublishConfig
from launch.startup import preflight
from launch.tools.deploy.deployment import Deployment, deploy
from tests.launch.tools.deploy.cases import KUBERNETES, config, settings, v5p_and_h100
from tests.learner import eight_devices

pytestmark = pytest.mark.heavy

GIB = 2**30
CODE = """
import json, jax, numpy as np
from bridge.param_names import flatten
from configs.model_sizes import MODEL_SIZES
from learner.distributed.sharding import make_mesh, param_shardings
from learner.model.architecture import Architecture
from learner.model.decoder import abstract_params
from learner.publish.weight_export import share_of
import pathlib, tempfile

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(MODEL_SIZES["Qwen2.5-7B"]))
model = Architecture.from_hf(folder)
params = abstract_params(model)
mesh = make_mesh(fsdp=64, devices=jax.devices())
leaves = flatten(jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    params, param_shardings(params, mesh),
))
sizes = []
for host in (0, 7, 15):
    share = share_of(leaves, model.param_names, host, host_of=lambda device: device.id // 4)
    sizes.append(2 * sum(b.num_tensors * b.num_rows * b.num_cols for b in share.blocks))
print(json.dumps({"shares": sizes, "whole": 2 * sum(int(np.prod(leaf.shape)) for leaf in leaves.values())}))
"""


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """Bytes in bfloat16 that hosts of 64 chips write of Qwen2.5-7B, by the learner's own shares; and the whole."""
    # The last flag of a name counts.
    return json.loads(eight_devices.run(CODE, xla_flags="--xla_force_host_platform_device_count=64").splitlines()[-1])


def sparse_model(folder: pathlib.Path, num_bytes: float) -> pathlib.Path:
    """A model's folder of which only the size is looked at."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    with open(folder / "model.safetensors", "wb") as file:
        file.truncate(int(num_bytes))
    return folder


@pytest.mark.heavy
def test_documented_hosts_hold_their_own_rows_and_the_rendered_memory_has_room_for_them(written):
    assert written["whole"] == pytest.approx(2 * 7.62e9, rel=0.01)
    largest = max(written["shares"])
    assert largest == pytest.approx(written["whole"] / 16, rel=0.02)
    found = v5p_and_h100()
    # Three slots, a delta of up to half a slot beside each.
    assert 3 * 1.5 * largest <= found.learner_shm_gib * GIB <= 3 * 1.5 * largest + 4 * GIB
    assert 2 * written["whole"] <= found.actor_shm_gib * GIB
    assert (found.learner_shm_gib, found.actor_shm_gib) == (7, 32)


def test_documented_learner_starts_in_the_memory_it_was_rendered(tmp_path, set_free, written):
    found = v5p_and_h100()
    path = tmp_path / "config.json"
    path.write_text(to_json(found.config))  # as the ConfigMap has it
    there = apply(load_preset(str(path)), {"run.dir": str(tmp_path / "run"), "publish.snapshot_dir": str(tmp_path)})
    assert there.actor.num_engines == 32 and there.learner.num_processes == 16
    model = sparse_model(tmp_path / "model", written["whole"])
    set_free(found.learner_shm_gib * GIB)
    preflight.check_snapshot_room(there, model)
    set_free(2 * written["whole"] / 16 - 0.1 * GIB)
    with pytest.raises(ValueError, match="1.8 GiB free for snapshots .two slots of one of 16 hosts"):
        preflight.check_snapshot_room(there, model)


@pytest.mark.parametrize(
    ("num_params", "fields", "learner_copies", "actor_copies"),
    [
        (32e9, {}, 4.5 / 16, 2),
        (70e9, {"actor__tensor_parallel_size": 4}, 4.5 / 16, 2),
        (235e9, {"actor__tensor_parallel_size": 8}, 4.5 / 16, 2),
        (70e9, {"actor__tensor_parallel_size": 4, "publish__full_every": 1}, 3 / 16, 2),
        (70e9, {"actor__tensor_parallel_size": 4, "publish__slow_reader_grace_s": 0}, 3 / 16, 2),
        (70e9, {"actor__tensor_parallel_size": 4, "mesh__fsdp": 128, "packing__rows": 128}, 4.5 / 32, 2),
    ],
)
def test_memory_of_larger_models_is_that_of_a_hosts_rows(num_params, fields, learner_copies, actor_copies):
    found = deploy(
        config(actor__num_engines=32, **fields),
        settings(KUBERNETES, learner="v5p", actors="h100", num_params=num_params),
    )
    whole = 2 * num_params / GIB
    assert found.learner_shm_gib == math.ceil(1.05 * learner_copies * whole) + 2
    assert found.actor_shm_gib == math.ceil(1.05 * actor_copies * whole) + 2


def test_one_node_counts_whole_slots_and_a_mirror_for_each_engine():
    wanted = config(
        mesh__fsdp=4, packing__rows=4, actor__num_engines=4, run__dir="/sluice/runs/it", publish__serve="none"
    )
    found: Deployment = deploy(wanted, settings(KUBERNETES, learner="h100", one_node=True, num_params=8e9))
    assert found.learner_shm_gib == math.ceil(1.05 * (2 + 4) * 16e9 / GIB) + 2
    assert found.config.learner.num_processes == wanted.learner.num_processes


@pytest.mark.parametrize(
    ("serve", "roles", "num_hosts", "copies"),
    [
        ("https", ("learner",), None, 2),  # engines are elsewhere
        ("https", ("learner",), 4, 0.5),
        ("none", ("learner",), 1, 2 + 3),  # engines can be on this machine only
        ("https", ("learner", "actor"), None, 2 + 3),  # launch.local
    ],
)
def test_room_is_looked_for_what_is_on_this_machine(tmp_path, set_free, serve, roles, num_hosts, copies):
    model = sparse_model(tmp_path / "model", 10 * GIB)
    given = config(
        "tiny",
        model__path="",
        prompts__path="",
        actor__num_engines=3,
        run__dir=tmp_path / "run",
        model__served_dtype="bfloat16",
    )
    given = dataclasses.replace(given, publish=PublishConfig(serve=serve, snapshot_dir=str(tmp_path)))
    set_free(copies * 10 * GIB)
    preflight.check_snapshot_room(given, model, roles=roles, num_hosts=num_hosts)
    set_free((copies * 10 - 0.01) * GIB)
    with pytest.raises(ValueError, match=f"{copies * 10:.1f} GiB free for snapshots"):
        preflight.check_snapshot_room(given, model, roles=roles, num_hosts=num_hosts)
