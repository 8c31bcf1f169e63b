"""The installed commands, without installing them."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest

from tests.launch.test_cli import PROJECT

SCRIPTS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]


def call(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What an installer's wrapper does."""
    module, _, function = SCRIPTS[name].partition(":")
    program = f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; sys.exit({function}())"
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=PROJECT, capture_output=True, text=True)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_script_is_named_like_the_module_it_stands_for(name):
    entry = EntryPoint(name, SCRIPTS[name], "console_scripts")
    assert callable(entry.load()) and f"sluice-{entry.attr.replace('_', '-')}" == name
    places = (PROJECT / "launch" / entry.attr, PROJECT / "launch" / "tools" / entry.attr)
    assert any(place.with_suffix(".py").is_file() or (place / "__main__.py").is_file() for place in places)


def test_help_of_a_script_is_the_commands_own():
    said = " ".join(call("sluice-plan", "--help").stdout.split())
    assert [w for w in ("a run in virtual time", "--profile", "--search_alpha", "--config") if w not in said] == []


def test_script_with_a_flag_that_is_not_known_is_one_line_and_exit_code_2():
    done = call("sluice-compile-tpu", "--fast")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("where", ["elsewhere", "in that project"])
def test_script_is_found_beside_a_project_that_has_packages_of_our_names(tmp_path, where):
    for name in ("actor", "bridge", "configs", "launch", "learner"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise RuntimeError('another package of this name')")
    module, _, function = SCRIPTS["sluice-local"].partition(":")
    program = f"import sys; sys.path.append({str(PROJECT)!r}); from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        cwd=tmp_path if where == "elsewhere" else tmp_path / "mine",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "mine")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Presets: " in done.stdout, done.stderr
