"""A model's folder of this machine: copies of its files, or links to them."""

import dataclasses
import pathlib
import shutil
from typing import Any

from launch.get_model.trainable import licence_of, model_files


@dataclasses.dataclass(frozen=True)
class FromFolder:
    """A Hugging Face folder."""

    folder: pathlib.Path
    is_linked: bool

    @property
    def short_name(self) -> str:
        """The folder's own."""
        return self.folder.resolve().name

    @property
    def description(self) -> str:
        """For the terminal."""
        return f"{self.folder}{' (links)' if self.is_linked else ''}"

    @property
    def identity(self) -> dict[str, Any]:
        """The folder, and its files by their sizes and times: other ones are another model."""
        found = {str(p.relative_to(self.folder)): p.stat() for p in model_files(self.folder)}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}
        return {"folder": str(self.folder.resolve()), "is_linked": self.is_linked, "files": files}

    def find_config(self, folder: pathlib.Path) -> pathlib.Path:
        """It is there."""
        return self.folder

    def fill(self, folder: pathlib.Path) -> None:
        """Copies or links the files that belong to a model.

        Raises:
          ValueError: a file can't be read, or there is no room.
        """
        for path in model_files(self.folder):
            target = folder / path.relative_to(self.folder)
            target.parent.mkdir(exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                if self.is_linked:
                    target.symlink_to(path.resolve())
                else:
                    shutil.copyfile(path, target)
            except OSError as e:
                raise ValueError(f"{path}: {e.strerror}") from e

    def check(self, folder: pathlib.Path) -> None:
        """Nothing more: that it can be trained is checked of all."""

    def licence(self, folder: pathlib.Path) -> str:
        """As its own files say."""
        return licence_of(folder)
