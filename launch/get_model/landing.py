"""A folder that is there whole or not at all, and that says where it came from."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Protocol

from bridge.files import replace_file
from launch.get_model.trainable import check_computed, check_trainable

RECORD = "sluice_source.json"
"""In a folder that this command made: what made it. Written last of all that is in it."""


class Source(Protocol):
    """Where a model comes from."""

    @property
    def short_name(self) -> str:
        """For a folder."""
        ...

    @property
    def description(self) -> str:
        """For the terminal."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this model and no other; JSON."""
        ...

    def find_config(self, folder: pathlib.Path) -> pathlib.Path | None:
        """A folder with the model's config.json, fetched into `folder` without the rest; None if it is known already.

        Raises:
          ValueError: it can't be had; one line that says what to do.
        """
        ...

    def fill(self, folder: pathlib.Path) -> None:
        """Makes all of it in a folder, which may hold what an earlier try left.

        Raises:
          ValueError: it can't be had; one line that says what to do.
        """
        ...

    def check(self, folder: pathlib.Path) -> None:
        """What is to be proved of this source's folder beside that it can be trained.

        Raises:
          ValueError: it is not what it should be.
        """
        ...

    def licence(self, folder: pathlib.Path) -> str:
        """Under which licence it is, as far as is known."""
        ...


class Landing:
    """The way of one folder into its place."""

    def __init__(self, out: pathlib.Path) -> None:
        """`out` is the place.

        Raises:
          ValueError: it can't be any model's: it is the root.
        """
        self._out = pathlib.Path(os.path.abspath(out))  # of `.` and `..` too the name is known then
        if not self._out.name:
            raise ValueError(f"{out} can't be a model's folder; give another --out")
        self._part = self._out.with_name(f".{self._out.name}.part")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Held by the one process that makes it; another one waits, and then finds it there.

        Raises:
          ValueError: the place can't be written in, or is taken by a file.
        """
        if self._out.exists() and not self._out.is_dir():
            raise ValueError(f"{self._out} is a file; give another --out")
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._out.with_name(f".{self._out.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise ValueError(f"nothing can be written in {self._out.parent}: {e.strerror}; give another --out") from e
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def fill(self, source: Source) -> None:
        """Fills a folder beside the place, checks it, and moves it there in one step.

        The model's config comes first: weights that can't be trained are not fetched.

        Raises:
          ValueError: there is something else already, this runs in it, it can't be had, or it is not what it should be.
        """
        if self._out.is_dir() and any(self._out.iterdir()):
            raise ValueError(
                f"{self._out} is not empty, and holds something else than {source.description}; remove it, or give "
                "another --out"
            )
        if self._out.is_dir() and pathlib.Path.cwd().is_relative_to(self._out.resolve()):
            raise ValueError(
                f"{self._out} is the folder that this runs in, in whose place the model's would come; give a folder "
                "below it, as in --out=model"
            )
        started = self._part / "started.json"
        if not (started.is_file() and started.read_text() == _text(source)):
            shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(exist_ok=True)
        started.write_text(_text(source))  # an interrupted download of the same goes on
        model = self._part / "model"
        model.mkdir(exist_ok=True)
        config = source.find_config(model)
        if config is not None:
            check_computed(config)
        source.fill(model)
        check_trainable(model)
        source.check(model)
        replace_file(model / RECORD, _text(source).encode(), is_durable=True)
        os.replace(model, self._out)
        shutil.rmtree(self._part, ignore_errors=True)


def landed(out: pathlib.Path, source: Source) -> bool:
    """Whether the place holds this source's model, whole.

    Raises:
      ValueError: it did, and its files are not what they were.
    """
    record = out / RECORD
    if not record.is_file() or record.read_text() != _text(source):
        return False
    check_trainable(out)
    source.check(out)
    return True


def _text(source: Source) -> str:
    return json.dumps(source.identity, indent=1, sort_keys=True) + "\n"
