"""A hash of tensors: the same however they are spread over files, another for anything that is theirs."""

import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.get_model.tensor_hash import tensor_hash

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}


def hash_of(folder: pathlib.Path, *files: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
    return tensor_hash(folder)


def test_hash_is_the_same_for_one_file_and_several(tmp_path):
    one = hash_of(tmp_path / "one", TENSORS)
    assert one == hash_of(tmp_path / "two", {"b": TENSORS["b"]}, {"a": TENSORS["a"]})


@pytest.mark.parametrize(
    "other",
    [
        {"a": TENSORS["a"], "c": TENSORS["b"]},
        {"a": TENSORS["a"].reshape(3, 2), "b": TENSORS["b"]},
        {"a": TENSORS["a"].astype(np.float16), "b": TENSORS["b"]},
        {"a": TENSORS["a"], "b": np.asarray([1, 1, 1, np.nextafter(np.float32(1), np.float32(2))], np.float32)},
        {"a": TENSORS["a"]},
    ],
)
def test_hash_is_another_for_another_name_shape_type_value_or_number(tmp_path, other):
    assert hash_of(tmp_path / "one", TENSORS) != hash_of(tmp_path / "other", other)
