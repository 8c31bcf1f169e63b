"""Shares of one GPU's memory: the sums done by hand, for each way in which learner and engines come to share one."""

import dataclasses
from typing import Any

import pytest

from configs import sections
from configs.presets.rolloutpipe import colocated
from configs.schema import Config
from launch.startup import preflight
from launch.supervision.placement import Machine, check_gpu_memory_shares, gpu_memory_variables, place

ONE, TWO = Machine(gpus=("0",), cores=(0, 1)), Machine(gpus=("0", "1"), cores=(0, 1))


def config_of(learner: float = 0.75, engine: float = 0.9, **fields: Any) -> Config:
    mesh = sections.MeshConfig(devices=fields.pop("mesh_devices", ""))
    return Config(
        preset="test",
        mesh=mesh,
        learner=sections.LearnerConfig(gpu_memory_fraction=learner),
        actor=sections.ActorConfig(gpu_memory_utilization=engine, **fields),
    )


def checked(config: Config, machine: Machine, **environment: str) -> None:
    check_gpu_memory_shares(config, place(config, machine), machine, environment)


@pytest.mark.parametrize(
    ("config", "machine", "environment", "fits"),
    [
        (config_of(), ONE, {}, False),  # 0.75 + 0.9
        (config_of(0.45, 0.5), ONE, {}, True),  # 0.95
        (config_of(0.46, 0.5), ONE, {}, False),  # 0.96
        (config_of(), TWO, {}, True),  # one each
        (config_of(devices="0", mesh_devices="0"), TWO, {}, False),
        (config_of(0.3, 0.6, devices="0", mesh_devices="0"), TWO, {}, True),
        (config_of(0.2, 0.4, num_engines=2, devices="0;0", mesh_devices="0"), TWO, {}, False),  # 0.2 + 2 * 0.4
        (config_of(0.15, 0.4, num_engines=2, devices="0;0", mesh_devices="0"), TWO, {}, True),
        (config_of(devices="1", mesh_devices="0"), TWO, {}, True),
        (config_of(), Machine(gpus=(), cores=(0,)), {}, True),
        (config_of(), ONE, {"JAX_PLATFORMS": "cpu"}, True),
        (config_of(), ONE, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, True),
        (config_of(), ONE, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}, True),
        (config_of(0.45, 0.5), ONE, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, False),
    ],
)
def test_shares_of_a_device_that_both_have_must_fit_it(config, machine, environment, fits):
    if fits:
        checked(config, machine, **environment)
        return
    with pytest.raises(ValueError, match=r"learner\.gpu_memory_fraction=.*actor\.gpu_memory_utilization=") as refused:
        checked(config, machine, **environment)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("engines", "devices"), [(1, ""), (2, "0;0"), (1, "0")])
def test_refusal_names_shares_that_fit(engines, devices):
    given = config_of(0.75, 0.4, num_engines=engines, devices=devices, mesh_devices="0")
    with pytest.raises(ValueError) as refused:
        checked(given, ONE)
    share = float(str(refused.value).partition("--config.learner.gpu_memory_fraction=")[2].split()[0])
    assert f"--config.actor.gpu_memory_utilization={share:g}," in str(refused.value)
    assert 0.9 < share * (1 + engines) <= 0.95
    checked(config_of(share, share, num_engines=engines, devices=devices, mesh_devices="0"), ONE)


def test_colocated_judge_counts_beside_its_engine():
    judge = sections.JudgeConfig(colocate=True, model="/models/judge", engine={"gpu_memory_utilization": 0.2})
    given = dataclasses.replace(config_of(0.3, 0.5), judge=judge)
    with pytest.raises(ValueError, match=r"and judge\.engine\.gpu_memory_utilization=0\.2 must be at most 0\.95"):
        checked(given, ONE)
    checked(dataclasses.replace(config_of(0.25, 0.5), judge=judge), ONE)


def test_launch_local_refuses_one_gpu_for_both_and_a_learner_alone_does_not(monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="learner and actor-0 share device 0"):
        preflight.check_engines(config_of(), ("learner", "actor"), ONE)
    assert preflight.check_engines(config_of(), ("learner",), ONE) == []


def test_learner_reserves_its_share_unless_jaxs_own_variables_say_another():
    assert gpu_memory_variables(config_of(0.4), {}) == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}
    assert gpu_memory_variables(config_of(0.4), {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}) == {}
    assert gpu_memory_variables(config_of(0.4), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}) == {}


def test_colocated_learner_has_all_memory_in_its_turns_and_returns_it():
    shared = colocated("tiny")
    checked(shared, ONE)
    assert gpu_memory_variables(shared, {}) == {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_fraction_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match=r"learner\.gpu_memory_fraction"):
        sections.LearnerConfig(gpu_memory_fraction=value)
