"""What is refused before anything is written, and what is worked out from the config."""

import dataclasses
import json
import math
from typing import Any

import pytest

from launch.supervision.supervisor import ENDING_S
from launch.tools.deploy.deployment import deploy
from tests.launch.tools.deploy.cases import KUBERNETES, SLURM, config, gpus_alone, one_node, settings, v5p_and_h100

CLUSTER: dict[str, Any] = {**KUBERNETES, "learner": "v5p", "actors": "h100"}
ADAPTERS = {"lora__rank": 8, "publish__lora": "adapter"}
SHARED = {"preset": "colocated"}
HELPED = {"rounds__train_start": "group_ready", "rounds__groups_per_update": 96, "helpers__num_engines": 1}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (CLUSTER | {"learner": ""}, "--learner must be one of v5e, v5p, v6e, h100, h200, cpu"),
        (CLUSTER | {"actors": "v5p"}, "--actors must be one of h100, h200, cpu, got 'v5p'"),
        (CLUSTER | {"learner_image": ""}, "set --learner_image=REGISTRY/NAME:TAG"),
        (CLUSTER | {"actor_image": ""}, "set --actor_image=REGISTRY/NAME:TAG"),
        (CLUSTER | {"storage_claim": ""}, "set --storage_claim=NAME"),
        (CLUSTER | {"mount": "runs"}, "--mount must be a folder's absolute path"),
        (CLUSTER | {"grace_s": 1.0}, "--grace_s must be at least 30"),
        (CLUSTER | {"learner": "h100", "topology": "2x2"}, "--topology requires a TPU learner"),
        (CLUSTER | {"one_node": True, "learner": "h100"}, "--actors: no effect with --one_node"),
        (
            SLURM | {"one_node": True, "learner": "h100", "actor_options": ("gpus=1",), "actor_user": "bob"},
            "--actor_option, --actor_user: no effect with --one_node",
        ),
        (SLURM | {"learner": "v5p", "actors": "h100"}, "--target=slurm supports only GPU learners, got --learner=v5p"),
        (SLURM | {"learner": "h100", "actors": "h100", "python": ""}, "--python: expected an absolute path"),
        (SLURM | {"learner": "h100", "actors": "h100", "keys": "keys"}, "--keys: expected an absolute path"),
        (
            SLURM | {"learner": "h100", "actors": "h100", "actor_options": ("a\nrm",)},
            "--actor_option must be one sbatch option",
        ),
    ],
)
def test_settings_that_are_missing_or_wrong_are_refused_by_their_flag(given, says):
    with pytest.raises(ValueError, match=says):
        settings(given)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"store__url": ""}, r"need PostgreSQL, got store.url=\(a file\); set --config.store.url"),
        ({"store__url": "postgresql://learner@db.example/sluice"}, "add .sslmode=verify-full"),
        ({"store__url": "postgresql://db.example/sluice?sslmode=verify-full"}, "store.url: no user"),
        ({"store__url": "postgresql://learner@127.0.0.1/sluice"}, "is local to this machine"),
        (SHARED, "share devices of one machine; set --one_node"),
        ({"publish__serve": "none"}, "weights must reach other machines, got publish.serve=none"),
        ({"publish__serve": "http"}, "got publish.serve=http"),
        (ADAPTERS, "actor pods mount no storage; set --config.actor.base_path"),
        (ADAPTERS | {"actor__base_path": "/opt/base"}, None),
        ({"publish__bucket": "file:///weights"}, "publish.bucket=file:///weights is a folder"),
        ({"publish__advertise": "https://a.example"}, "publish.advertise=https://a.example must be empty"),
        ({"publish__listen": "0.0.0.0:9000"}, "has a different port than --port=8443"),
        ({"run__dir": "runs/it"}, "run.dir must be below /sluice"),
        ({"model__path": "/models/a"}, "model.path must be below /sluice, where the claim is, got '/models/a'"),
        ({"prompts__path": "/sluice/../etc/a"}, "prompts.path must be below /sluice"),
        ({"prompts__path": "hf:owner/name"}, None),
        ({"prompts__path": "hf:/etc/name"}, "prompts.path must be below /sluice"),
        ({"prompts__path": "", "prompts__mixture__a__path": "/etc/a.jsonl"}, "prompts.mixture.a.path must be below"),
        ({"run__name": "Run_7"}, "--config.run.name=run-7"),
        ({"run__name": "a" * 41}, "40 at most"),
        ({"actor__tensor_parallel_size": 16}, "an engine must fit on one host: expected at most 8 GPUs .h100., got 16"),
        ({"actor__tensor_parallel_size": 3}, None),
        ({"mesh__fsdp": 32, "packing__rows": 32}, None),
        ({"mesh__fsdp": 48, "packing__rows": 48}, "the mesh has 48 chips, v5p slices have"),
    ],
)
def test_config_that_cannot_work_on_a_cluster_is_refused_by_its_field(fields, says):
    if says is None:
        deploy(config(**fields), settings(CLUSTER))
        return
    with pytest.raises(ValueError, match=says) as refused:
        deploy(config(**fields), settings(CLUSTER))
    assert "\n" not in str(refused.value)


def test_engines_that_do_not_fit_one_node_are_refused():
    wanted = config(mesh__fsdp=4, packing__rows=4, actor__num_engines=5)
    with pytest.raises(ValueError, match="expected at most 8 GPUs .h100., got 9"):
        deploy(wanted, settings(KUBERNETES, learner="h100", one_node=True))


def test_model_that_is_elsewhere_is_asked_for_its_size_and_one_here_is_measured(tmp_path):
    with pytest.raises(ValueError, match="set --num_params"):
        deploy(config(), settings(CLUSTER, num_params=0.0))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    with open(folder / "model.safetensors", "wb") as file:
        file.truncate(2 * 10**9)
    wanted = config(model__path=folder, prompts__path=tmp_path / "a.jsonl")
    found = deploy(wanted, settings(CLUSTER, num_params=0.0, mount=str(tmp_path)))
    # 10^9 parameters of two bytes on 16 hosts, three slots and half a slot beside each, a twentieth more, two GiB for
    # others.
    assert found.learner_shm_gib == math.ceil(4.5 * 1.05 * 2 * 10**9 / 16 / 2**30) + 2


def test_weights_that_do_not_fit_a_host_are_refused():
    with pytest.raises(ValueError, match="expected more than .* GiB .shared memory for copies of the weights"):
        deploy(config(), settings(CLUSTER, num_params=100e9))


def test_deployment_fills_in_what_the_cluster_decides_and_leaves_the_rest():
    given = config(actor__num_engines=32)
    found = v5p_and_h100()
    assert found.config.run.dir == "/sluice/runs/tpu-v5p-64"
    assert found.config.publish.listen == "0.0.0.0:8443"
    assert found.actor_store == "postgresql://actor@db.example/sluice?sslmode=verify-full"
    assert found.num_actors == 32 and v5p_and_h100(num_actors=7).num_actors == 7
    for section in ("rounds", "admission", "loss", "optimizer", "packing", "mesh", "actor", "store", "checkpoint"):
        assert getattr(found.config, section) == getattr(given, section)
    # As long as the cluster waits for it.
    assert found.config.supervision == dataclasses.replace(given.supervision, shutdown_grace_s=600.0)


def test_deployment_bounds_and_graces_are_the_configs():
    found = v5p_and_h100(grace_s=900.0)
    assert found.learner_grace_s == found.config.supervision.shutdown_grace_s == 900
    assert found.actor_grace_s > found.config.actor.shutdown_grace_s
    assert found.learner_bounds.progress_timeout_s == found.config.supervision.progress_timeout_s
    assert found.actor_bounds.start_timeout_s > found.config.supervision.start_timeout_s


def test_node_outlives_what_launch_local_gives_its_learner_and_then_its_actors():
    found = one_node(grace_s=900.0)
    assert found.config.supervision.shutdown_grace_s == 900
    assert found.learner_grace_s > found.config.supervision.shutdown_grace_s + ENDING_S


def test_deployment_of_one_node_needs_no_store_and_counts_all_gpus():
    assert one_node().learner.chips == 8 and one_node().actor_store == ""
    assert gpus_alone().learner.count == 2 and gpus_alone().actor.chips == 2


@pytest.mark.parametrize(("helping", "num_gpus"), [({}, 4), ({**HELPED, "actor__num_engines": 5}, 5)])
def test_engines_on_the_learners_devices_are_not_counted_again(helping, num_gpus):
    shared = {"mesh__fsdp": 4, "packing__rows": 4, "actor__num_engines": 4, "store__url": ""}
    wanted = config("colocated", **shared | helping)
    assert deploy(wanted, settings(KUBERNETES, learner="h100", one_node=True)).learner.chips == num_gpus
