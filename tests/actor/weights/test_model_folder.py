"""A model's folder: its tensors, and one made of a run's card, what is refused and what is made again."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from blake3 import blake3
from safetensors.numpy import save_file

from actor.weights.model_folder import check_versions, make_model_folder, tensor_table
from bridge import weight_types
from bridge.weight_types import CardFile, RunCard, TensorEntry


def tokenizer_json() -> bytes:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return tokenizer.to_str().encode()


FILES = {"config.json": json.dumps({"model_type": "qwen3"}).encode(), "tokenizer.json": tokenizer_json()}


def make_run_card(files=FILES, files_=None, **fields) -> RunCard:
    entries = files_ or tuple(
        CardFile(name=n, num_bytes=len(data), blake3=blake3(data).hexdigest()) for n, data in sorted(files.items())
    )
    defaults = {
        "run": "abc123",
        "name": "trial",
        "config": "{}",
        "files": entries,
        "tensors": (TensorEntry(name="w", dtype="bfloat16", shape=(2, 3), offset_bytes=0, num_bytes=12),),
        "sluice": weight_types.SLUICE,
        "vllm": weight_types.VLLM,
    }
    return RunCard(**(defaults | fields))  # pyright: ignore[reportArgumentType]


class Blobs:
    """A store's files; counts what is asked for."""

    def __init__(self, files=FILES):
        self.by_hash = {blake3(d).hexdigest(): d for d in files.values()}
        self.asked: list[str] = []

    def __call__(self, digest: str) -> bytes:
        self.asked.append(digest)
        return self.by_hash[digest]


def test_model_folder_holds_the_cards_files_and_its_tensors(tmp_path):
    model = make_model_folder(make_run_card(), Blobs(), tmp_path)
    assert {f.name: f.read_bytes() for f in model.path.iterdir()} == FILES
    assert model.tensors == {"w": ("bfloat16", (2, 3))}
    assert model.tokenizer_hash == blake3(FILES["tokenizer.json"]).hexdigest()


def test_model_folder_made_before_is_used_and_a_changed_file_is_fetched_again(tmp_path):
    blobs = Blobs()
    folder = make_model_folder(make_run_card(), blobs, tmp_path).path
    assert len(blobs.asked) == 2
    make_model_folder(make_run_card(), blobs, tmp_path)
    assert len(blobs.asked) == 2
    tampered = bytearray(FILES["config.json"])
    tampered[-2] ^= 1
    (folder / "config.json").write_bytes(tampered)
    make_model_folder(make_run_card(), blobs, tmp_path)
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    assert len(blobs.asked) == 3


def test_models_of_other_files_lie_in_other_folders(tmp_path):
    other = FILES | {"config.json": b"{}"}
    first = make_model_folder(make_run_card(), Blobs(), tmp_path).path
    second = make_model_folder(make_run_card(other), Blobs(other), tmp_path).path
    assert first != second and (first / "config.json").read_bytes() == FILES["config.json"]


def test_file_that_is_not_the_one_named_is_refused_and_not_kept(tmp_path):
    blobs = Blobs()
    digest = blake3(FILES["config.json"]).hexdigest()
    blobs.by_hash[digest] = b'{"model_type": "other"}'
    with pytest.raises(ValueError, match="config.json of the run descriptor: expected"):
        make_model_folder(make_run_card(), blobs, tmp_path)
    assert list(tmp_path.rglob("config.json")) == []


def test_file_that_the_store_has_lost_is_named(tmp_path):
    blobs = Blobs({"config.json": FILES["config.json"]})
    with pytest.raises(ValueError, match="lacks tokenizer.json"):
        make_model_folder(make_run_card(), blobs, tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        CardFile(name="modeling.py", num_bytes=1, blake3="0"),
        CardFile(name="model.safetensors", num_bytes=1, blake3="0"),
        CardFile(name="config.json", num_bytes=64 * 2**20 + 1, blake3="0"),
    ],
    ids=lambda f: f.name,
)
def test_file_that_must_not_be_written_is_not_even_asked_for(tmp_path, file):
    blobs = Blobs()
    with pytest.raises(ValueError, match="run descriptor: expected"):
        make_model_folder(make_run_card(files_=(file,)), blobs, tmp_path)
    assert blobs.asked == [] and list(tmp_path.iterdir()) == []


def test_versions_that_agree_pass_also_where_the_engine_says_how_it_was_built():
    check_versions(make_run_card(), vllm=f"{weight_types.VLLM}+cpu")
    check_versions(make_run_card(vllm=""), vllm="0.1")


@pytest.mark.parametrize(
    ("fields", "vllm", "said"),
    [
        ({"sluice": "9.9.9"}, weight_types.VLLM, f"requires Sluice 9.9.9, got {weight_types.SLUICE}"),
        ({}, "0.1.2", f"requires vLLM {weight_types.VLLM}, got 0.1.2"),
    ],
)
def test_another_version_is_refused_with_both_named(fields, vllm, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        check_versions(dataclasses.replace(make_run_card(), **fields), vllm=vllm)


@pytest.mark.parametrize(
    "config,has_head",
    [
        ({"model_type": "qwen3", "tie_word_embeddings": True}, False),
        ({"model_type": "qwen3", "tie_word_embeddings": False}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "gemma3_text"}, False),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, True),
    ],
)
def test_tensor_table_leaves_out_a_tied_models_copied_head(tmp_path, config, has_head):
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = np.zeros((3, 2), np.float32)
    save_file({"model.embed_tokens.weight": table, "lm_head.weight": table}, tmp_path / "model.safetensors")
    found = tensor_table(tmp_path, dtype="bfloat16")
    assert found["model.embed_tokens.weight"] == ("bfloat16", (3, 2))
    assert ("lm_head.weight" in found) == has_head


@pytest.mark.parametrize("index", ["[]", '{"weight_map": ["a"]}', '{"weight_map": {"x": 3}}', "{}", "torn"])
def test_tensor_table_refuses_an_index_of_another_form(tmp_path, index):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="the index of its safetensors cannot be read"):
        tensor_table(tmp_path, dtype="bfloat16")


def test_tensor_table_says_which_file_the_disk_does_not_give(tmp_path):
    (tmp_path / "config.json").symlink_to("/proc/self/mem")  # a regular file whose reading fails
    with pytest.raises(ValueError, match="config.json cannot be read"):
        tensor_table(tmp_path, dtype="bfloat16")
