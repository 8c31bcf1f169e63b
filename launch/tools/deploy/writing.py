"""What was rendered, as files."""

import os
import pathlib


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    """Writes them; scripts may be run. What else lies there is left alone.

    Raises:
      OSError: they can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        os.chmod(folder / name, 0o755 if name.endswith(".sh") else 0o644)
