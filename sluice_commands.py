"""The installed command: `sluice NAME` is `python -m launch NAME`, whatever else PYTHONPATH has.

Our packages have everyday names (`configs`, `launch`, ...). This module has one that no project's package has, so it is
found; it puts our folder before all others, so that a package of the user's does not take the place of one of ours.
"""

import pathlib
import sys

_ROOT = str(pathlib.Path(__file__).resolve().parent)


def main() -> None:
    """Runs the command that the first argument names."""
    sys.path[:] = [_ROOT, *(folder for folder in sys.path if folder != _ROOT)]
    from launch.__main__ import main as run_command

    run_command()
