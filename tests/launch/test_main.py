"""`sluice NAME`, without installing it, and `python -m launch NAME`."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from launch.__main__ import COMMANDS
from tests.integration.support.processes import python
from tests.launch.test_cli import PROJECT
from tests.launch.test_cli_help import commands

SCRIPTS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What an installer's wrapper does."""
    module, _, function = SCRIPTS["sluice"].partition(":")
    program = f"import sys; from {module} import {function}; sys.argv[0] = 'sluice'; sys.exit({function}())"
    return python("-c", program, *arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_named_like_the_module_it_runs(name):
    module, meaning = COMMANDS[name]
    assert module.rpartition(".")[2].replace("_", "-") == name and meaning
    assert find_spec(module) is not None


def test_every_command_has_a_name_but_what_processes_start():
    called = {f"launch.{name}" for name in commands()}
    assert called - {module for module, _ in COMMANDS.values()} == {
        "launch.gradient_helper",
        "launch.services.snapshot_server",
        "launch.services.track",
        "launch.supervision.kubernetes_probe",
    }


@pytest.mark.heavy
def test_help_lists_the_commands_and_that_of_a_command_is_its_own():
    assert [name for name in COMMANDS if name not in call().stdout] == []
    said = " ".join(call("plan", "--help").stdout.split())
    assert [w for w in ("a run in virtual time", "--profile", "--search_alpha", "--config") if w not in said] == []


@pytest.mark.heavy
@pytest.mark.parametrize("given", [["compile-tpu", "--fast"], ["reprt"], ["--fast"]], ids=" ".join)
def test_what_is_not_known_is_one_line_and_exit_code_2(given):
    done = call(*given)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and ("report" in line) == (given == ["reprt"])


@pytest.mark.heavy
@pytest.mark.parametrize("where", ["elsewhere", "in that project"])
def test_command_is_found_beside_a_project_that_has_packages_of_our_names(tmp_path, where):
    for name in ("actor", "bridge", "configs", "launch", "learner"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise RuntimeError('another package of this name')")
    module, _, function = SCRIPTS["sluice"].partition(":")
    program = f"import sys; sys.path.append({str(PROJECT)!r}); from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", program, "local", "--help"],
        cwd=tmp_path if where == "elsewhere" else tmp_path / "mine",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "mine")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Presets: " in done.stdout, done.stderr
