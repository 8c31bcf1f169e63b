"""The installed commands: `sluice-NAME` is `launch.scripts:NAME`, whatever else PYTHONPATH has.

Our packages have everyday names (`configs`, `launch`, ...). This module has one that no project's package has, so it is
found; it puts our folder before all others, so that a package of the user's does not take the place of one of ours.
"""

import importlib
import pathlib
import sys
from typing import Any

_ROOT = str(pathlib.Path(__file__).resolve().parent)
sys.path[:] = [_ROOT, *(folder for folder in sys.path if folder != _ROOT)]


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("launch.scripts"), name)
