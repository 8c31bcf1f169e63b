"""Models of the Hub, with the library's download as a fake: what is asked for, and what its errors become."""

import pathlib
import shutil

import huggingface_hub
import pytest

from launch.get_model import hub
from launch.get_model.trainable import PATTERNS
from tests.learner.model_folder import make_model_folder


@pytest.mark.parametrize(
    ("name", "is_one"), [("Qwen/Qwen3-1.7B", True), ("Qwen", False), ("../up", False), ("a/b/c", False), ("a/", False)]
)
def test_name_of_the_hub_is_an_owner_and_a_model(name, is_one):
    assert hub.is_name(name) == is_one


def test_model_is_downloaded_without_other_formats_of_its_weights(tmp_path, monkeypatch):
    model = make_model_folder(tmp_path / "theirs")

    def download(name: str, *, revision: str | None, local_dir: pathlib.Path, allow_patterns: list[str]) -> None:
        assert (name, revision, allow_patterns) == ("owner/small", "v1", list(PATTERNS))
        shutil.copytree(model, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = hub.FromHub("owner/small", revision="v1")
    (tmp_path / "out").mkdir()
    source.fill(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in model.iterdir())
    assert source.short_name == "small" and source.identity == {"hub": "owner/small", "revision": "v1"}
    assert not {"*.bin", "*.gguf", "*.safetensors"} & set(PATTERNS)


def test_hub_out_of_reach_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    def download(*names: str, **more: object) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"owner/other can't be had from .*\(OSError: no route to host\); .* smollm2"):
        hub.FromHub("owner/other").fill(tmp_path)
