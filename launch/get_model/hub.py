"""A model of the Hugging Face Hub, where a network reaches it."""

import functools
import pathlib
import re
import shutil

from launch.get_model.landing import Source
from launch.get_model.trainable import PATTERNS, check_computed

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(name: str) -> bool:
    """Whether it is written like one: owner/model."""
    return _NAME.fullmatch(name) is not None


def from_hub(name: str, *, revision: str = "") -> Source:
    """Returns the model of that name; an empty revision is the newest."""
    return Source(
        short_name=name.partition("/")[2],
        description=f"{name}{f' at {revision}' if revision else ''} of the Hugging Face Hub",
        identity={"hub": name, "revision": revision},
        fill=functools.partial(_fill, name, revision),
    )


def _fill(name: str, revision: str, folder: pathlib.Path) -> None:
    """Downloads the files that belong to a model; the library continues its own download and checks hashes.

    The config comes first: weights that can't be trained are not fetched.
    """
    _download(name, revision, folder, ["config.json"])
    check_computed(folder)
    _download(name, revision, folder, list(PATTERNS))
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes of the download


def _download(name: str, revision: str, folder: pathlib.Path, patterns: list[str]) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.snapshot_download(name, revision=revision or None, local_dir=folder, allow_patterns=patterns)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as e:  # of what the library and its HTTP client raise
        said = " ".join(str(e).split())[:300]
        raise ValueError(
            f"{name} can't be had from the Hugging Face Hub ({type(e).__name__}: {said}); without a network take "
            "smollm2, or give a folder of this machine as model.path"
        ) from e
