"""Who gets which of a machine's devices and cores."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from configs.presets.rolloutpipe import cgp
from configs.presets.rolloutpipe import colocated as colocated_preset
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    HelpersConfig,
    LearnerConfig,
    LossConfig,
    MeshConfig,
    PackingConfig,
    RoundsConfig,
)
from launch.supervision import backend, placement
from launch.supervision.placement import EnginePlace, Machine, Placement, of_one_engine, place

MESH = MeshConfig()


def machine(num_gpus: int, num_cores: int = 4) -> Machine:
    return Machine(gpus=tuple(map(str, range(num_gpus))), cores=tuple(range(num_cores)))


def placed(num_gpus: int, *, mesh: MeshConfig = MESH, num_cores: int = 4, **actor):
    """The learner's devices, and each engine's devices and cores."""
    config = Config(preset="test", actor=ActorConfig(**actor), mesh=mesh)
    found = place(config, machine(num_gpus, num_cores))
    return ",".join(found.learner), [",".join(e.devices) for e in found.engines], [e.cpu_cores for e in found.engines]


@pytest.mark.parametrize(
    ("num_gpus", "given", "learner", "engines"),
    [
        # One of each on one GPU: both see it, as without a supervisor.
        (1, {}, "", [""]),
        (2, {}, "0", ["1"]),
        (8, dict(mesh=MeshConfig(fsdp=4), num_engines=4), "0,1,2,3", ["4", "5", "6", "7"]),
        (8, dict(mesh=MeshConfig(fsdp=4), num_engines=2, tensor_parallel_size=2), "0,1,2,3", ["4,5", "6,7"]),
        # What an engine can't use stays free, but an elastic one may come to.
        (8, dict(mesh=MeshConfig(fsdp=4), num_engines=2), "0,1,2,3", ["4", "5"]),
        (
            8,
            dict(mesh=MeshConfig(fsdp=4), num_engines=2, elastic=True, max_tensor_parallel_size=8),
            "0,1,2,3",
            ["4,5", "6,7"],
        ),
        # An elastic engine's sizes double.
        (
            8,
            dict(
                mesh=MeshConfig(fsdp=2), num_engines=2, tensor_parallel_size=1, elastic=True, max_tensor_parallel_size=4
            ),
            "0,1",
            ["2,3", "4,5"],
        ),
        (8, dict(mesh=MeshConfig(devices="6,7", fsdp=2), num_engines=3), "6,7", ["0", "1", "2"]),
        # What is said is done, and the learner gets the first of the others.
        (8, dict(devices="2;3;4,5", num_engines=3, elastic=True, max_tensor_parallel_size=2), "0", ["2", "3", "4,5"]),
        (4, dict(devices="2;3", num_engines=2), "0", ["2", "3"]),
        (4, dict(mesh=MeshConfig(fsdp=2), devices="0;2", num_engines=2), "1,3", ["0", "2"]),
        (2, dict(mesh=MeshConfig(devices="0"), devices="0;1", num_engines=2), "0", ["0", "1"]),
        (0, dict(devices="GPU-a1;GPU-b2", num_engines=2), "", ["GPU-a1", "GPU-b2"]),
        # A machine's one GPU is of all.
        (1, dict(devices="0"), "0", ["0"]),
        (1, dict(devices="0;0", num_engines=2, gpu_memory_utilization=0.3), "0", ["0", "0"]),
        # One engine that nothing is left for sees all; the learner no more than its mesh has.
        (2, dict(mesh=MeshConfig(fsdp=2)), "", [""]),
        (3, dict(mesh=MeshConfig(fsdp=2), tensor_parallel_size=2), "0,1", [""]),
    ],
)
def test_place_gives_learner_and_engines_devices_of_their_own(num_gpus, given, learner, engines):
    assert placed(num_gpus, **given) == (learner, engines, [""] * len(engines))


def colocated(num_gpus: int, **actor):
    config = colocated_preset("tiny")
    actor = dataclasses.replace(config.actor, **actor)
    found = place(dataclasses.replace(config, actor=actor, mesh=MeshConfig(fsdp=4), packing=ROWS), machine(num_gpus))
    return ",".join(found.learner), [",".join(e.devices) for e in found.engines]


ROWS = PackingConfig(rows=4, row_tokens=32)
ONE_UPDATE: dict[str, Any] = {"rounds": RoundsConfig(groups_per_round=16, groups_per_update=16)}


def test_colocated_engines_split_the_learners_devices():
    assert colocated(8, num_engines=4) == ("0,1,2,3", ["0", "1", "2", "3"])
    assert colocated(8, num_engines=2, tensor_parallel_size=2) == ("0,1,2,3", ["0,1", "2,3"])
    with pytest.raises(ValueError, match="3 engines .*tensor_parallel_size=2 must use all 4 devices"):
        colocated(8, num_engines=3, tensor_parallel_size=2)


def test_engines_of_a_helper_have_devices_of_their_own():
    """Beside engines that share the learner's devices, and beside engines that do not."""
    of_helper = HelpersConfig(num_engines=2)
    config = dataclasses.replace(
        colocated_preset("tiny"), helpers=of_helper, mesh=MeshConfig(fsdp=4), packing=ROWS, **ONE_UPDATE
    )
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, num_engines=4, tensor_parallel_size=2))
    found = place(config, machine(8))
    assert [(e.devices, e.shares_with) for e in found.engines] == [
        (("0", "1"), "learner"),
        (("2", "3"), "learner"),
        (("4", "5"), "helper"),
        (("6", "7"), "helper"),
    ]
    assert found.helper.devices == ("4", "5", "6", "7") and found.learner == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match="helpers.num_engines=2: expected 4 devices .*learner's 4, got 7"):
        place(config, machine(7))
    apart = dataclasses.replace(config, actor=dataclasses.replace(config.actor, colocated=False))
    found = place(apart, machine(12))
    assert [e.shares_with for e in found.engines] == ["", "", "helper", "helper"]
    assert found.helper.devices == ("8", "9", "10", "11")
    on_cpu = place(apart, machine(0, num_cores=8))
    assert (on_cpu.helper.devices, on_cpu.helper.cpu_cores) == ((), "4,5,6,7")


def test_helper_leaves_an_engine():
    config = dataclasses.replace(cgp("tiny"), helpers=HelpersConfig(num_engines=1), **ONE_UPDATE)
    with pytest.raises(ValueError, match="must be below actor.num_engines"):
        place(config, machine(4))


def test_place_too_few_devices_are_refused_in_one_line():
    with pytest.raises(ValueError, match="num_engines=3: expected 6 devices .*learner's 2, got 4") as e:
        placed(4, mesh=MeshConfig(fsdp=2), num_engines=3, tensor_parallel_size=2)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("num_gpus", "mesh", "actor", "said"),
    [
        (4, MeshConfig(tensor=8), {}, "expected 1 devices .*learner's 4, got 4"),
        (4, MeshConfig(fsdp=4, devices="0,1"), {}, "need 4 devices, found 2"),
        (4, MeshConfig(devices="0,1"), {}, "need 1 devices, found 2"),
        (2, MeshConfig(), dict(tensor_parallel_size=4), "expected 4 devices"),
    ],
)
def test_mesh_or_engine_that_the_devices_do_not_fit_is_refused(num_gpus, mesh, actor, said):
    with pytest.raises(ValueError, match=said):
        placed(num_gpus, mesh=mesh, **actor)


@pytest.mark.parametrize(
    ("num_gpus", "mesh", "devices", "said"),
    [
        (2, MeshConfig(), "0;1", "expected to leave 1 of this machine's 2 devices .* got 0"),
        (4, MeshConfig(fsdp=2), "1;2,3", "expected to leave 2 of this machine's 4 devices .* got 1"),
        (1, MeshConfig(fsdp=2), "0;0", "expected to leave 2 of this machine's 1 devices .* got 0"),
        (4, MeshConfig(), "GPU-a1;GPU-b2", "\\(0, 1, 2, 3\\), got GPU-a1, GPU-b2"),
    ],
)
def test_place_engines_that_leave_the_learner_too_few_are_refused_in_one_line(num_gpus, mesh, devices, said):
    engines: Any = dict(num_engines=2, max_tensor_parallel_size=2, elastic=True, gpu_memory_utilization=0.3)
    with pytest.raises(ValueError, match=said) as e:
        placed(num_gpus, mesh=mesh, devices=devices, **engines)
    assert "mesh.devices" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("num_gpus", "actor", "each"),
    [
        (4, dict(devices="2;3", num_engines=2), ["0", "1"]),
        (4, dict(num_engines=2), ["0", "1"]),
        (6, dict(devices="0,1", tensor_parallel_size=2), ["2", "3"]),
        (2, {}, ["0", "1"]),  # the engine has them too
    ],
)
def test_learner_of_two_processes_gives_each_its_part_of_the_devices(tmp_path, monkeypatch, num_gpus, actor, each):
    shown = {}
    config = Config(
        preset="test", actor=ActorConfig(**actor), mesh=MeshConfig(fsdp=2), learner=LearnerConfig(num_processes=2)
    )
    monkeypatch.setattr(backend, "run_tag", lambda folder: "a run's:")
    monkeypatch.setattr(backend, "Child", lambda role, *_, devices, **__: shown.setdefault(role, devices))
    backend.LocalBackend(config, tmp_path, machine(num_gpus))
    assert [devices for role, devices in sorted(shown.items()) if role.startswith("learner")] == each


@pytest.mark.parametrize(
    ("num_cores", "given", "cores"),
    [
        (4, {}, [""]),
        (2, dict(num_engines=2), ["0", "1"]),
        (4, dict(num_engines=2), ["0,1", "2,3"]),
        (8, dict(num_engines=3), ["0,1", "2,3,4", "5,6,7"]),
        (4, dict(num_engines=2, tensor_parallel_size=2), ["0|1", "2|3"]),
        (2, dict(tensor_parallel_size=2), ["0|1"]),
        (2, dict(num_engines=3), ["0", "1", "0"]),
        (8, dict(num_engines=2, cpu_cores="0-1;6,7"), ["0-1", "6,7"]),
    ],
)
def test_place_without_gpus_gives_each_of_several_engines_its_own_cores(num_cores, given, cores):
    learner, devices, got = placed(0, num_cores=num_cores, **given)
    assert (learner, devices, got) == ("", [""] * len(cores), cores)


def test_warnings_name_devices_that_two_engines_share():
    actor = ActorConfig(devices="0;0;1", num_engines=3, gpu_memory_utilization=0.4)
    config = Config(preset="test", actor=actor, mesh=MeshConfig(devices="1"))
    first, second = place(config, machine(2)).warnings(machine(2))
    assert "learner and actor-2 share device 1" in first
    assert second == "warning: actor-0 and actor-1 share device 0"


@pytest.mark.parametrize(("engine", "learner"), [("0", ""), ("", ""), ("", "0")])
def test_warnings_name_the_one_device_of_a_machine_that_all_have(engine, learner):
    mesh = dataclasses.replace(MESH, devices=learner)
    config = Config(preset="test", actor=ActorConfig(devices=engine), mesh=mesh)
    (said,) = place(config, machine(1)).warnings(machine(1))
    assert "learner and actor-0 share device 0" in said


@pytest.mark.parametrize(
    ("given", "gpus"),
    [({}, "0,1,2"), ({"CUDA_VISIBLE_DEVICES": "2,0"}, "2,0"), ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, "1")],
)
@pytest.mark.parametrize("is_hidden", [False, True])
def test_machine_here_sees_what_the_environment_leaves(monkeypatch, given, gpus, is_hidden):
    monkeypatch.setattr(placement.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"])
    monkeypatch.setattr(placement, "engine_is_for_cpus", lambda: False)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if is_hidden else given
    here = Machine.here(hidden)
    assert ",".join(here.gpus) == ("" if is_hidden else gpus)
    assert set(here.cores) == os.sched_getaffinity(0)


def test_machine_here_without_gpus_has_none_whatever_the_environment_says(monkeypatch):
    monkeypatch.setattr(placement.glob, "glob", lambda pattern: [])
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "0,1"}).gpus == ()


def test_machine_here_has_no_gpus_for_an_installation_for_cpus(monkeypatch):
    monkeypatch.setattr(placement.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    for is_for_cpus, gpus in ((True, ()), (False, ("0",))):
        monkeypatch.setattr(placement, "engine_is_for_cpus", lambda answer=is_for_cpus: answer)
        assert Machine.here({}).gpus == gpus


def test_of_one_engine_keeps_nothing_of_the_others_and_fits_cores_to_its_size():
    actor = ActorConfig(num_engines=2, devices="0,1;2,3", cpu_cores="0-3;4-7", elastic=True, max_tensor_parallel_size=2)
    config = Config(preset="test", actor=actor)
    own = of_one_engine(config, "4-7").actor
    assert own == dataclasses.replace(actor, num_engines=1, devices="", cpu_cores="4-7")
    assert of_one_engine(config, None).actor.cpu_cores == ""  # nobody said which of the groups is its own
    alone = Config(preset="test", actor=ActorConfig(cpu_cores="0|2", tensor_parallel_size=2))
    assert of_one_engine(alone, None) == alone


@pytest.mark.parametrize(
    ("cores", "size", "spread"), [("0-3", 1, "0-3"), ("0-3", 2, "0,1|2,3"), ("0|1", 1, "0,1"), ("5", 2, "5|5")]
)
def test_spread_cores_gives_each_process_its_own(cores, size, spread):
    assert placement.spread_cores(cores, size) == spread


def test_core_ids_of_nonsense_are_refused_in_one_line():
    assert placement.core_ids("0-2|7,4") == [0, 1, 2, 4, 7]
    with pytest.raises(ValueError, match="cores: expected a list"):
        placement.core_ids("a-2")


def test_process_is_bound_with_threads_that_it_has_already():
    code = (
        "import os, threading; from launch.supervision.placement import bind_to_cores; ended = threading.Event();"
        "thread = threading.Thread(target=ended.wait); thread.start(); core = min(os.sched_getaffinity(0));"
        "bind_to_cores([core]); print([os.sched_getaffinity(i) == {core} for i in (0, thread.native_id)]); ended.set()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True]\n"


@pytest.mark.parametrize(("num_gpus", "devices", "learner"), [(0, "", ()), (4, "", ("0", "1")), (4, "2,3", ("2", "3"))])
def test_supervised_run_has_a_learner_on_its_meshs_devices_and_no_engine(num_gpus, devices, learner):
    mesh = MeshConfig(fsdp=2, devices=devices)
    config = Config(preset="test", loss=LossConfig(name="sft"), mesh=mesh, actor=ActorConfig(num_engines=2))
    found = place(config, machine(num_gpus))
    assert found == Placement(learner=learner, engines=()) and found.helper == EnginePlace()
