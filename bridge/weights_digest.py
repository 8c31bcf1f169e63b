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
    index = folder / _INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_SINGLE]
    digest = blake3()
    for name in names:
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{folder} has no weights: {name} is missing")
        digest.update(f"{name} {blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()}\n".encode())
    return digest.hexdigest()
