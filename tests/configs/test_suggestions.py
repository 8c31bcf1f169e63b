"""The command that messages name for an extra that is not installed."""

import shlex
import sys

from configs.suggestions import PROJECT, install_command


def test_command_for_an_extra_installs_it_from_the_clone_below_any_path(tmp_path):
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    assert shlex.split(install_command("wandb", project=clone)) == [
        *(sys.executable, "-m", "pip", "install", "-e"),
        f"{clone}[wandb]",
    ]


def test_command_for_an_extra_without_a_clone_names_none(tmp_path):
    assert install_command("ray", project=tmp_path).endswith(" -e 'FOLDER_OF_THE_CLONE[ray]'")


def test_command_for_an_extra_names_this_clone():
    assert f"{PROJECT}[ray]" in shlex.split(install_command("ray")) and (PROJECT / "launch" / "setup.sh").is_file()
