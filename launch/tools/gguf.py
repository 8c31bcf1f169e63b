"""A GGUF file as a Hugging Face folder: weights in float32, config, tokenizer and chat template.

`python -m launch.tools.gguf FILE FOLDER` does it in a process of its own, which `convert` starts: with
the libraries that it needs on its path, and the memory of two copies of the model gone when it ends.
"""

import os
import pathlib
import subprocess
import sys
from typing import Any

from configs import custom_functions
from launch.supervision import process_tree

_TIMEOUT_S = 1800


def convert(gguf: pathlib.Path, folder: pathlib.Path, *, tools: pathlib.Path) -> None:
    """Writes the folder; `tools` is where gguf and accelerate are to be imported from.

    Raises:
      ValueError: it failed; with the last thing that was said.
    """
    path = os.pathsep.join([custom_functions.python_path(), str(tools.absolute())])
    command = [sys.executable, "-P", "-m", "launch.tools.gguf", str(gguf.absolute()), str(folder.absolute())]
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        raise ValueError(f"{gguf.name} was not converted within {_TIMEOUT_S} s") from e
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise ValueError(f"{gguf.name} could not be converted: {said[-1] if said else f'exit code {done.returncode}'}")


def main(argv: list[str]) -> None:
    """Reads the file named first and writes the folder named second."""
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
