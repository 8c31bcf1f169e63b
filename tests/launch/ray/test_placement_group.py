"""Places of the learner's processes, as they are asked of Ray; no cluster is there."""

import inspect
from types import SimpleNamespace

import pytest

from launch.ray.resources import ResourceRequest, parse

berths = pytest.importorskip("launch.ray.ray_backend", exc_type=ImportError)
SLICE = parse("tpu:v5p:4x4x4", flag="learner_on")


@pytest.mark.parametrize(
    ("kind", "count", "said"),
    [
        ("tpu:v5p:4x4x4", 4, "a v5p slice of 4x4x4 has 16 hosts; set learner.num_processes=16, one per host"),
        ("tpu:v9:4x4x4", 16, "Invalid accelerator_type"),
    ],
)
def test_processes_that_are_not_one_a_host_of_the_slice_are_refused_before_a_cluster_is_asked(kind, count, said):
    with pytest.raises(ValueError, match=said):
        berths.check_hosts(parse(kind, flag="learner_on"), count)
    berths.check_hosts(SLICE, 16)


def test_crew_refuses_them_while_that_is_still_the_users_input(tmp_path):
    crew = pytest.importorskip("launch.ray.ray_backend", exc_type=ImportError)
    from configs.schema import Config
    from configs.sections import LearnerConfig, MeshConfig, PackingConfig

    config = Config(
        preset="test", mesh=MeshConfig(fsdp=64), packing=PackingConfig(rows=64), learner=LearnerConfig(num_processes=8)
    )
    cpu = parse("cpu", flag="actors_on")
    with pytest.raises(ValueError, match="has 16 hosts"):
        crew.RayBackend(
            config, tmp_path, learner_on=SLICE, actors_on=cpu, actor_store="", placement_timeout_s=1.0, console=None
        )


def test_slice_is_looked_for_as_long_as_the_user_said(monkeypatch):
    import ray.util.tpu

    asked = []

    def reserve(topology, accelerator, **given):
        inspect.signature(ray.util.tpu.SlicePlacementGroup).bind(topology, accelerator, **given)
        asked.append(given["head_reservation_timeout_s"])
        return SimpleNamespace(placement_group=None)

    monkeypatch.setattr(ray.util.tpu, "slice_placement_group", reserve)
    berths.LearnerPlacementGroup(SLICE, ResourceRequest(num_cpus=1), 16, name="x", placement_timeout_s=7.0)
    assert asked == [7.0]


def test_slice_that_ray_does_not_have_ends_the_run_with_a_line(monkeypatch):
    import ray.util.tpu

    def refuse(*_, **__):
        raise ValueError("Invalid accelerator topology")

    monkeypatch.setattr(ray.util.tpu, "slice_placement_group", refuse)
    with pytest.raises(OSError, match="Ray has no v5p slice of 4x4x4: Invalid accelerator topology"):
        berths.LearnerPlacementGroup(SLICE, ResourceRequest(num_cpus=1), 16, name="x", placement_timeout_s=7.0)
