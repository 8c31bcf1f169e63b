"""The command: folders of this machine, names of what there is, and what it refuses."""

import json
import os
import pathlib

import pytest

from launch.get_model import published
from launch.get_model.trainable import licence_of
from tests.launch.commands import Done, call_each
from tests.learner.model_folder import make_model_folder


@pytest.fixture
def model(tmp_path) -> pathlib.Path:
    folder = make_model_folder(tmp_path / "theirs")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "LICENSE").write_text("Apache License")
    return folder


def get(*lines: list[str], cwd: pathlib.Path) -> list[Done]:
    return call_each("launch.get_model.command", lines, max_arguments=1, cwd=cwd)


def test_folder_is_copied_once_without_what_is_no_part_of_it(model, tmp_path):
    line = [str(model), "--out=models/mine"]
    first, second = get(line, line, cwd=tmp_path)
    assert (first.code, second.code) == (0, 0)
    assert "models/mine: ready; licence in models/mine/LICENSE" in first.out and "there already" in second.out
    out = tmp_path / "models" / "mine"
    assert not (out / "pytorch_model.bin").exists() and not (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_folder_is_linked_where_asked_and_one_that_changed_is_another(model, tmp_path):
    line = [str(model), "--out=mine", "--link"]
    assert get(line, cwd=tmp_path)[0].code == 0
    assert (tmp_path / "mine" / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    os.utime(model / "config.json", ns=(1, 1))
    (again,) = get(line, cwd=tmp_path)
    assert again.code == 2 and "mine is not empty, and holds something else" in again.err


def test_folder_of_a_family_that_is_not_known_is_refused_and_leaves_nothing(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    (done,) = get([str(model), "--out=mine"], cwd=tmp_path)
    (line,) = done.err.splitlines()
    assert done.code == 2 and "gpt2" in line and not (tmp_path / "mine").exists()
    assert not [*tmp_path.glob(".mine.part/model/*")]  # nothing was copied either


BAD = {
    (): "give a model, as in python -m launch.get_model smollm2",
    ("",): "give a model",
    ("nosuch",): "no model 'nosuch': give smollm2, a Hugging Face folder, or a name of the Hub",
    ("smollm2", "more"): "unexpected argument 'more'",
    ("smollm2", "--link"): "--link has no effect on smollm2",
    ("smollm2", "--revision=main"): "--revision has no effect on smollm2",
    ("smollm2", "--outt=x"): "Unknown command line flag 'outt'",
}


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    for done, said in zip(get(*map(list, BAD), cwd=tmp_path), BAD.values(), strict=True):
        (line,) = done.err.splitlines()
        assert done.code == 2 and line.startswith("error: ") and said in line
    assert not any(tmp_path.iterdir())


def test_known_models_name_their_licence_and_hashes():
    for model in published.MODELS.values():
        assert model.licence and len(model.wheel.sha256) == len(model.tensors) == len(model.vocabulary) == 64


def test_licence_is_what_the_folders_own_files_say(tmp_path):
    assert "no licence is named" in licence_of(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert licence_of(tmp_path) == "licence mit by its card"
