"""Slices and hosts, against the numbers of their makers' pages."""

import pytest

from launch.tools.deploy import deploy_settings

# Google's table of slices: chips, topology, hosts, chips a host, its own name.
SLICES = [
    ("v5e", 1, "1x1", 1, 1, "v5litepod-1"),
    ("v5e", 4, "2x2", 1, 4, "v5litepod-4"),
    ("v5e", 8, "2x4", 1, 8, "v5litepod-8"),
    ("v5e", 16, "4x4", 4, 4, "v5litepod-16"),
    ("v5e", 256, "16x16", 64, 4, "v5litepod-256"),
    ("v5p", 4, "2x2x1", 1, 4, "v5p-8"),
    ("v5p", 64, "4x4x4", 16, 4, "v5p-128"),
    ("v5p", 128, "4x4x8", 32, 4, "v5p-256"),
    ("v6e", 8, "2x4", 1, 8, "v6e-8"),
    ("v6e", 256, "16x16", 64, 4, "v6e-256"),
]


@pytest.mark.parametrize(("kind", "chips", "topology", "hosts", "each", "name"), SLICES)
def test_tpu_slice_of_so_many_chips_is_googles(kind, chips, topology, hosts, each, name):
    found = deploy_settings.tpu_slice(kind, num_chips=chips)
    assert (found.count, found.chips, found.resource) == (hosts, each, "google.com/tpu")
    assert found.labels["cloud.google.com/gke-tpu-topology"] == topology
    assert f"{kind}-{chips} by its chips" in found.title and f"Google's name {name}:" in found.title


def test_tpu_slice_of_another_topology_is_taken_where_the_chips_are_as_many():
    found = deploy_settings.tpu_slice("v5p", num_chips=64, topology="2x4x8")
    assert found.labels["cloud.google.com/gke-tpu-topology"] == "2x4x8" and found.count == 16


@pytest.mark.parametrize(
    ("kind", "chips", "topology", "says"),
    [
        ("v5e", 12, "", "the mesh has 12 chips, v5e slices have 1, 4, 8"),
        ("v5p", 64, "8x8", "--topology of v5p has 3 sides, as in 2x2x4"),
        ("v5p", 64, "4x4x8", "--topology=4x4x8 does not have the mesh's 64 chips"),
        ("v5p", 6, "1x2x3", "6 chips of v5p do not fill hosts of 4"),
        ("v6e", 16, "4x04", "--topology of v6e has 2 sides"),
    ],
)
def test_tpu_slice_that_is_none_refused(kind, chips, topology, says):
    with pytest.raises(ValueError, match=says):
        deploy_settings.tpu_slice(kind, num_chips=chips, topology=topology)


def test_gpu_hosts_part_of_a_host_has_its_share():
    one, eight = (deploy_settings.gpu_hosts("h100", num_gpus=n, is_gke=True) for n in (1, 8))
    assert (one.count, one.chips, eight.count, eight.chips) == (1, 1, 1, 8)
    assert one.cpus * 8 <= eight.cpus <= 208 and one.memory_gib * 8 <= eight.memory_gib <= 1872


@pytest.mark.parametrize(("num_gpus", "hosts"), [(8, 1), (16, 2), (64, 8)])
def test_gpu_hosts_whole_ones(num_gpus, hosts):
    found = deploy_settings.gpu_hosts("h200", num_gpus=num_gpus, is_gke=False)
    assert (found.count, found.chips) == (hosts, 8)
    assert found.labels == {"nvidia.com/gpu.product": "NVIDIA-H200"}


@pytest.mark.parametrize("num_gpus", [9, 12, 20])
def test_gpu_hosts_that_are_not_whole_refused(num_gpus):
    with pytest.raises(ValueError, match=f"{num_gpus} GPUs do not fill h100 hosts of 8"):
        deploy_settings.gpu_hosts("h100", num_gpus=num_gpus, is_gke=True)
