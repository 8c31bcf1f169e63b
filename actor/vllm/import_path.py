"""A path without spaces for an engine's libraries, where the environment's own path has some.

On a CPU vLLM hands the path of PyTorch's OpenMP to LD_PRELOAD, which ends a path at a space or a colon, and
TorchInductor hands PyTorch's folders to the compiler without quotes.
"""

import atexit
import importlib
import pathlib
import re
import shutil
import tempfile

_UNSAFE = re.compile(r"[^\w@%+=,./-]")
"""Characters that a shell, LD_PRELOAD or both read as something else than a part of a path."""


def import_through_link(path: list[str]) -> None:
    """Replaces the entry that has PyTorch by a link to it, where its path has an unsafe character.

    Call it before PyTorch is imported. Processes that multiprocessing spawns have the same import path. The link is
    removed when this process ends.

    Args:
      path: `sys.path`, changed in place.
    """
    for index, entry in enumerate(path):
        if not _UNSAFE.search(entry) or not (pathlib.Path(entry) / "torch").is_dir():
            continue
        folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        link = folder / "packages"
        link.symlink_to(pathlib.Path(entry).absolute())
        if not _UNSAFE.search(str(link)):
            path[index] = str(link)
            importlib.invalidate_caches()
