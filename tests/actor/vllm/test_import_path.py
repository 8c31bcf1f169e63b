"""Where an engine's libraries are imported from, if their path can't be handed to a loader or a compiler."""

import pathlib
import subprocess
import sys

import pytest

from actor.vllm.engine_setup import import_through_link

PROJECT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from actor.vllm.engine_setup import import_through_link
import_through_link(sys.path)
import torch
print(torch.__file__)
"""


@pytest.fixture
def packages(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "a clone" / "site-packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    return folder


@pytest.mark.heavy
def test_libraries_below_a_path_with_a_space_are_imported_through_a_link_that_ends_with_the_process(packages):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{packages}:{PROJECT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    file = pathlib.Path(done.stdout.strip())
    assert " " not in str(file) and file.parts[-2:] == ("torch", "__init__.py")
    assert not file.parents[2].exists() and (packages / "torch" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["clone", "clone-1.0_x", "klön"])
def test_path_that_can_be_handed_on_stays(packages, name):
    packages.parent.rename(packages.parent.parent / name)
    path = ["", str(packages.parent.parent / name / "site-packages")]
    import_through_link(given := [*path])
    assert given == path


def test_entries_without_pytorch_stay_and_the_order_too(packages):
    path = [str(packages.parent), str(packages), "/last"]
    import_through_link(path)
    assert (path[0], path[2]) == (str(packages.parent), "/last")
    assert pathlib.Path(path[1]).resolve() == packages


def test_temporary_folder_with_a_space_is_no_help_and_changes_nothing(packages, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(packages))
    path = [str(packages)]
    import_through_link(path)
    assert path == [str(packages)]
