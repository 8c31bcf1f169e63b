"""One hash of all tensors of a folder: of their names, types, shapes and bytes, however they are spread over files."""

import contextlib
import json
import os
import pathlib

from blake3 import blake3

from learner.model.hf.safetensors_file import StoredTensor, open_tensors


def tensor_hash(folder: pathlib.Path) -> str:
    """BLAKE3 of the tensors in the order of their names, in hexadecimal.

    Raises:
      ValueError: a file is no safetensors file.
      OSError: a file can't be read.
    """
    digest = blake3(max_threads=blake3.AUTO)
    with contextlib.ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            tensors |= open_tensors(path, descriptor)
        for name, tensor in sorted(tensors.items()):
            about = [name, str(tensor.spec.dtype), list(tensor.spec.shape)]
            digest.update(json.dumps(about).encode() + b"\n")
            digest.update(tensor.read([slice(None)] * len(tensor.spec.shape)).tobytes())
    return digest.hexdigest()
