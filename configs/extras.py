"""The command that installs one of the project's optional dependencies."""

import pathlib
import shlex
import sys

PROJECT = pathlib.Path(__file__).resolve().parent.parent
"""Folder of the clone."""


def install_command(extra: str, *, project: pathlib.Path = PROJECT) -> str:
    """Returns the shell command that adds an extra of pyproject.toml to this Python's environment.

    It names the clone: the package indexes have another project called sluice.

    Args:
      extra: as pyproject.toml names it.
      project: folder of the clone; where it has no pyproject.toml, the command says FOLDER_OF_THE_CLONE.
    """
    folder = str(project) if (project / "pyproject.toml").is_file() else "FOLDER_OF_THE_CLONE"
    python = shlex.quote(sys.executable or "python")
    return f"{python} -m pip install -e {shlex.quote(f'{folder}[{extra}]')}"
