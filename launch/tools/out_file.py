"""Output files of flags such as --out: checked before the work, and saved elsewhere if the final write fails."""

import pathlib
import tempfile

from bridge.files import replace_file, try_replace_file
from launch.cli import one_line


def check_out_file(given: str, *, flag: str = "--out", suffixes: tuple[str, ...] = ()) -> pathlib.Path:
    """Returns the file named by a flag, after a test write; raises ValueError if it is not writable."""
    out = pathlib.Path(given).expanduser()
    if suffixes and out.suffix.lower() not in suffixes:
        raise ValueError(f"{flag}={given}: expected a file that ends in {', '.join(suffixes)}")
    if out.is_dir() or not out.name or given.endswith("/"):
        raise ValueError(f"{flag}={given} is a folder; name a file in it")
    if out.exists() and not out.is_file():
        raise ValueError(f"{flag}={given}: expected a regular file or a new name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{flag}={given}: folder {out.parent} does not exist; create it, or set another {flag}")
    try:
        try_replace_file(out)
    except OSError as e:
        raise ValueError(f"{flag}={given}: {out.parent} is not writable ({e.strerror})") from e
    return out


def write_out_file(out: pathlib.Path, text: str) -> None:
    """Writes a file atomically; if that fails, raises OSError that names a temporary file with the text."""
    try:
        replace_file(out, text.encode())
    except OSError as e:
        with tempfile.NamedTemporaryFile("wb", prefix=f"{out.stem}-", suffix=out.suffix, delete=False) as kept:
            kept.write(text.encode())
        raise OSError(f"{out} cannot be written ({one_line(e)}); the content is in {kept.name}") from e
