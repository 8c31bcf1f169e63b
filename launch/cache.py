"""Where this machine keeps what can be made again: the tiny model, the models of runs elsewhere."""

import errno
import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Returns $SLUICE_CACHE, or sluice in the user's cache folder; makes it where it isn't there.

    Raises:
      ValueError: there is neither, or nothing can be written in it.
    """
    try:
        folder = pathlib.Path(os.environ.get("SLUICE_CACHE") or _users()).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except RuntimeError as e:  # no home
        raise ValueError(f"there is no cache folder ({e}); set SLUICE_CACHE to a folder") from e
    except OSError as e:
        raise ValueError(
            f"the cache folder can't be written ({e.filename}: {e.strerror}); set SLUICE_CACHE to one that can"
        ) from e
    return folder


def _users() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "sluice"
