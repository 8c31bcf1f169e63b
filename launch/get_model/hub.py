"""A model of the Hugging Face Hub, where a network reaches it."""

import dataclasses
import pathlib
import re
import shutil
from typing import Any

from launch.get_model.trainable import PATTERNS, licence_of

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(name: str) -> bool:
    """Whether it is written like one: owner/model."""
    return _NAME.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class FromHub:
    """A model by its name there."""

    name: str
    revision: str = ""

    @property
    def short_name(self) -> str:
        """Without its owner."""
        return self.name.partition("/")[2]

    @property
    def description(self) -> str:
        """For the terminal."""
        return f"{self.name}{f' at {self.revision}' if self.revision else ''} of the Hugging Face Hub"

    @property
    def identity(self) -> dict[str, Any]:
        """Name and revision."""
        return {"hub": self.name, "revision": self.revision}

    def find_config(self, folder: pathlib.Path) -> pathlib.Path:
        """Downloads config.json alone.

        Raises:
          ValueError: the Hub is out of reach, has no such model, or wants a token.
        """
        self._download(folder, ["config.json"])
        return folder

    def fill(self, folder: pathlib.Path) -> None:
        """Downloads the files that belong to a model; what is there of an earlier try is not fetched again.

        Raises:
          ValueError: as of the config.
        """
        self._download(folder, list(PATTERNS))
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes of the download

    def _download(self, folder: pathlib.Path, patterns: list[str]) -> None:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        try:
            huggingface_hub.snapshot_download(
                self.name, revision=self.revision or None, local_dir=folder, allow_patterns=patterns
            )
        except (
            HfHubHTTPError,
            OSError,
            ValueError,
            RuntimeError,
        ) as e:  # of what the library and its HTTP client raise
            said = " ".join(str(e).split())[:300]
            raise ValueError(
                f"{self.name} can't be had from the Hugging Face Hub ({type(e).__name__}: {said}); without a network "
                "give a folder, or smollm2"
            ) from e

    def check(self, folder: pathlib.Path) -> None:
        """Nothing more: the library compares each file with the Hub's hash of it."""

    def licence(self, folder: pathlib.Path) -> str:
        """As its card says."""
        return licence_of(folder)
