"""A folder that is there whole or not at all, and that says where it came from."""

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from bridge.files import replace_file
from launch.get_model.trainable import check_trainable

RECORD = "sluice_source.json"
"""In a folder that this command made: what made it. Written last of all that is in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from."""

    short_name: str
    """For a folder."""
    description: str
    """For the terminal."""
    identity: dict[str, Any]
    """What makes it this model and no other; JSON."""
    fill: Callable[[pathlib.Path], None]
    """Makes the model in a folder, which may hold what an earlier try left; raises ValueError if it can't be had."""
    licence: str = ""
    """Empty: as the folder's own files say."""


def get(out: pathlib.Path, source: Source) -> bool:
    """Makes a source's folder unless it is there; returns True if it was made now.

    It is filled beside its place, checked, and moved there in one step. A second process waits for the first.

    Raises:
      ValueError: the place can't be written in or holds something else, this runs in it, or the model can't be had or
        can't be trained.
    """
    place = pathlib.Path(os.path.abspath(out))  # of `.` and `..` too the name is known then
    if not place.name:
        raise ValueError(f"{out} can't be a model's folder; give another --out")
    with _alone(place):
        if _is_landed(place, source):
            return False
        if place.is_dir() and any(place.iterdir()):
            raise ValueError(
                f"{place} is not empty, and holds something else than {source.description}; remove it, or give "
                "another --out"
            )
        if place.is_dir() and pathlib.Path.cwd().is_relative_to(place.resolve()):
            raise ValueError(
                f"{place} is the folder that this runs in, in whose place the model's would come; give a folder "
                "below it, as in --out=model"
            )
        print(f"{out}: from {source.description}", flush=True)
        record = json.dumps(source.identity, indent=1, sort_keys=True).encode() + b"\n"
        # An interrupted download of the same source continues in it.
        part = place.with_name(f".{place.name}.{hashlib.sha256(record).hexdigest()[:12]}.part")
        part.mkdir(exist_ok=True)
        source.fill(part)
        check_trainable(part)
        replace_file(part / RECORD, record, is_durable=True)
        os.replace(part, place)
        for left in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 12}.part"):
            shutil.rmtree(left, ignore_errors=True)
        return True


@contextlib.contextmanager
def _alone(place: pathlib.Path) -> Iterator[None]:
    """Held by the one process that makes a folder."""
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file; give another --out")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise ValueError(f"nothing can be written in {place.parent}: {e.strerror}; give another --out") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_landed(place: pathlib.Path, source: Source) -> bool:
    """Returns True if the place holds this source's model; raises ValueError if files of it are missing."""
    record = place / RECORD
    # A folder of an earlier version has more in its record.
    if not record.is_file() or not source.identity.items() <= json.loads(record.read_text()).items():
        return False
    check_trainable(place)
    return True
