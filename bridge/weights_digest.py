"""What a model folder's weights hash to, so that two machines, or two starts, can tell that they have the same."""

import json
import pathlib

from blake3 import blake3

BASE_FILE = "lora_base.json"
"""In a run's card: the digest of the weights that published adapters belong to."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_digest(folder: pathlib.Path) -> str:
    """BLAKE3, in hex, of the names and contents of the folder's safetensors files; reads all of them.

    Raises:
      ValueError: a file is missing.
    """
    digest = blake3()
    for path in weight_files(folder):
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{folder} has no weights: {path.name} is missing")
        digest.update(f"{path.name} {blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()}\n".encode())
    return digest.hexdigest()


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folder's safetensors files, one or those that its index names; they need not be there."""
    index = folder / _INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_SINGLE]
    return [folder / name for name in names]
