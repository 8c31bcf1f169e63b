"""Where this machine keeps what can be made again: the tiny model, the models of runs elsewhere."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """$SLUICE_CACHE, or sluice in the user's cache folder.

    Raises:
      ValueError: there is neither.
    """
    if "SLUICE_CACHE" in os.environ:
        return pathlib.Path(os.environ["SLUICE_CACHE"])
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "sluice"
    except RuntimeError as e:  # no home
        raise ValueError(f"there is no cache folder ({e}); set SLUICE_CACHE") from e
