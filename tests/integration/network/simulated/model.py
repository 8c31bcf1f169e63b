"""A model whose weights are the number of their version: what is made of two versions is seen at once.

Every element of every tensor is `(incarnation + 1) * 10000 + step`, exact in float32 and never 0, as memory is that
nothing was written to; and a token is what an element said.
"""

import json
import pathlib
import struct
from collections.abc import Mapping

import numpy as np
import tokenizers
from tokenizers.models import WordLevel

from bridge.rollout_types import Group, Version
from bridge.snapshots.snapshot_format import TensorTable

_STEPS = 10_000
DTYPE = "float32"


def table(*, num_tensors: int, num_bytes: int) -> TensorTable:
    """Tensors of `num_bytes` together."""
    return {f"model.layers.{i}.weight": (DTYPE, (num_bytes // 4 // num_tensors,)) for i in range(num_tensors)}


def number(version: Version) -> int:
    """What every element of a version is."""
    if version.step >= _STEPS or version.incarnation >= 1600:
        raise ValueError(f"{version} is not exact in float32 here")
    return (version.incarnation + 1) * _STEPS + version.step


def weights(version: Version, tensors: TensorTable) -> dict[str, np.ndarray]:
    """A version's tensors."""
    return {name: np.full(shape, number(version), np.float32) for name, (_, shape) in tensors.items()}


def numbers(tensors: Mapping[str, np.ndarray], *, every: bool) -> set[int]:
    """The numbers that are in these tensors: of all elements, or of each tensor's first, middle and last."""
    found: set[int] = set()
    for tensor in tensors.values():
        part = tensor if every else tensor[[0, tensor.size // 2, -1]]
        found |= {int(part.min()), int(part.max())}
    return found


def check_tokens(group: Group) -> str | None:
    """What is wrong with a group's tokens: each must be the number of the version that it is stamped with."""
    for rollout in group.rollouts:
        steps, incarnations = rollout.tokens % _STEPS, rollout.tokens // _STEPS - 1
        if not np.array_equal(steps, rollout.token_versions):
            return f"{group.ticket_id}: tokens of steps {steps.tolist()} stamped {rollout.token_versions.tolist()}"
        if incarnations.min() < 0 or incarnations.max() > group.incarnation:
            return (
                f"{group.ticket_id}: tokens of incarnations {incarnations.tolist()}, the group says {group.incarnation}"
            )
    return None


def write_folder(folder: pathlib.Path, tensors: TensorTable) -> None:
    """A model folder as Hugging Face would have it, of these tensors: config, tokenizer, empty safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False, "vocab_size": 16}))
    words = {str(i): i for i in range(16)}
    tokenizers.Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    entries, end = {}, 0
    for name, (_, shape) in tensors.items():
        size = 4 * int(np.prod(shape))
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(8 + len(header) + end)
