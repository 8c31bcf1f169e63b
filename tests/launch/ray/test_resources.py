import dataclasses
from typing import Any

import pytest

from configs.presets.rolloutpipe import colocated
from configs.schema import Config
from configs.sections import ActorConfig, LearnerConfig, MeshConfig, PackingConfig
from launch.ray.resources import DeviceKind, ResourceRequest, check_spread, of_actor, of_learner, parse


def config(*, fsdp: int = 1, num_processes: int = 1, **of_actor: Any) -> Config:
    return Config(
        preset="test",
        mesh=MeshConfig(fsdp=fsdp),
        packing=PackingConfig(rows=fsdp),
        learner=LearnerConfig(num_processes=num_processes),
        actor=ActorConfig(**of_actor),
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("cpu", DeviceKind(device="cpu")),
        ("cpu:8", DeviceKind(device="cpu", num_cpus=8)),
        ("gpu", DeviceKind(device="gpu")),
        ("gpu:H100", DeviceKind(device="gpu", accelerator="H100")),
        ("tpu:v5p:4x4x4", DeviceKind(device="tpu", accelerator="v5p", topology="4x4x4")),
        ("tpu:v6e:16x16", DeviceKind(device="tpu", accelerator="v6e", topology="16x16")),
    ],
)
def test_parse_reads_what_a_process_computes_on(text, kind):
    assert parse(text, flag="learner_on") == kind


@pytest.mark.parametrize("text", ["", "tpu", "tpu:v5p", "tpu:v5p:64", "gpu:", "cpu:x", "cpu:-1", "GPU", "gpu:H100:8"])
def test_parse_refuses_anything_else_and_names_the_flag(text):
    with pytest.raises(ValueError, match=r"--actors_on must be cpu\[:CORES\]"):
        parse(text, flag="actors_on")


@pytest.mark.parametrize(
    ("kind", "given", "asked"),
    [
        ("cpu:4", {"fsdp": 8, "num_processes": 2}, {"CPU": 4}),
        ("gpu", {"fsdp": 8, "num_processes": 2}, {"CPU": 1, "GPU": 4}),
        ("gpu:H100", {"fsdp": 8}, {"CPU": 1, "GPU": 8, "accelerator_type:H100": 0.001}),
        ("tpu:v5p:4x4x4", {"fsdp": 64, "num_processes": 16}, {"CPU": 1, "TPU": 4}),
    ],
)
def test_learner_asks_each_node_for_its_part_of_the_mesh(kind, given, asked):
    assert of_learner(config(**given), parse(kind, flag="learner_on")).bundle() == asked


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("tpu:v5p:4x4x4", {"fsdp": 32, "num_processes": 8}, "the mesh has 32 devices, a 4x4x4 slice 64 chips"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(kind, given, said):
    with pytest.raises(ValueError, match=said):
        of_learner(config(**given), parse(kind, flag="learner_on"))


def test_actor_asks_for_its_engines_devices():
    assert of_actor(config(tensor_parallel_size=4), parse("gpu:H200", flag="a")).bundle() == {
        "CPU": 1,
        "GPU": 4,
        "accelerator_type:H200": 0.001,
    }
    assert of_actor(config(tensor_parallel_size=2), parse("cpu", flag="a")).bundle() == {"CPU": 2}
    with pytest.raises(ValueError, match="engines sample on GPUs"):
        of_actor(config(), parse("tpu:v5p:4x4x4", flag="a"))


def test_elastic_actor_asks_for_the_devices_of_its_largest_engine():
    elastic = {"elastic": True, "tensor_parallel_size": 2, "max_tensor_parallel_size": 4}
    assert of_actor(config(**elastic), parse("gpu", flag="a")).num_gpus == 4
    assert of_actor(config(**elastic | {"elastic": False}), parse("gpu", flag="a")).num_gpus == 2


def test_engines_that_share_the_learners_devices_are_refused():
    with pytest.raises(ValueError, match="share devices of one machine; use launch.local"):
        check_spread(colocated("paper"))


def test_what_is_asked_reads_as_a_user_would_say_it():
    assert str(ResourceRequest(num_cpus=1, num_gpus=8, accelerator="H100")) == "1 CPU, 8 GPU (H100)"
    assert str(dataclasses.replace(ResourceRequest(num_cpus=2), num_tpus=4)) == "2 CPU, 4 TPU"
