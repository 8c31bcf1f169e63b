"""Wheels of PyPI by pip, without what they depend on, each with the hash that is wanted."""

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Collection, Sequence

_TIMEOUT_S = 1800


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One version of a package, and the file that it is."""

    requirement: str
    """As in name==version."""
    sha256: str


def fetch(wanted: Sequence[Wheel], folder: pathlib.Path) -> list[pathlib.Path]:
    """Downloads them into a new folder from wherever pip is told to look; their files, in the order asked for.

    Raises:
      ValueError: pip has them not, or another file than is known.
    """
    found: list[pathlib.Path] = []
    for wheel in wanted:
        place = folder / wheel.sha256
        _download(wheel, place)
        files = [*place.glob("*.whl")]
        if len(files) != 1:
            raise ValueError(f"pip gave {len(files)} wheels for {wheel.requirement}, wanted one")
        with open(files[0], "rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != wheel.sha256:
            raise ValueError(
                f"{files[0].name} from pip's sources is not the known one (SHA-256 {got}, wanted {wheel.sha256}): look "
                "where pip takes it from (pip config list)"
            )
        found.append(files[0])
    return found


def _download(wheel: Wheel, folder: pathlib.Path) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", wheel.requirement]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as e:
        raise ValueError(f"pip did not get {wheel.requirement} within {_TIMEOUT_S} s") from e
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise ValueError(
            f"pip can't get {wheel.requirement}: {said[-1] if said else f'exit code {done.returncode}'}; without a "
            "network put its wheel into a folder and set PIP_FIND_LINKS to that"
        )


def unpack(wheel: pathlib.Path, folder: pathlib.Path, *, only: Collection[str] | None = None) -> None:
    """Unpacks a wheel, or some files of it, without running anything of it.

    Raises:
      ValueError: it lacks one of the files.
    """
    with zipfile.ZipFile(wheel) as archive:
        if only is not None and (missing := set(only) - set(archive.namelist())):
            raise ValueError(f"{wheel.name} has no {', '.join(sorted(missing))}")
        archive.extractall(folder, only)
