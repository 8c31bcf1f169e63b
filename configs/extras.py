"""Install command of an optional dependency of the project."""

import pathlib
import shlex
import sys

PROJECT = pathlib.Path(__file__).resolve().parent.parent
"""Folder of the clone."""


def install_command(extra: str, *, project: pathlib.Path = PROJECT) -> str:
    """Returns the shell command that installs an extra of pyproject.toml into this Python environment.

    The command names the clone, because package indexes have another project called sluice. If `project` has no
    pyproject.toml, it names FOLDER_OF_THE_CLONE.
    """
    folder = str(project) if (project / "pyproject.toml").is_file() else "FOLDER_OF_THE_CLONE"
    python = shlex.quote(sys.executable or "python")
    return f"{python} -m pip install -e {shlex.quote(f'{folder}[{extra}]')}"
