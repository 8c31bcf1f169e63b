"""Models of the Hub, with the library's download as a fake: what is asked for, and what its errors become."""

import fnmatch
import json
import pathlib
import shutil

import huggingface_hub
import pytest

from launch.tools import model_sources
from launch.tools.model_sources import PATTERNS, get
from tests.learner.model_folder import make_model_folder


@pytest.mark.parametrize(
    ("name", "is_one"), [("Qwen/Qwen3-1.7B", True), ("Qwen", False), ("../up", False), ("a/b/c", False), ("a/", False)]
)
def test_name_of_the_hub_is_an_owner_and_a_model(name, is_one):
    assert model_sources.is_name(name) == is_one


def test_model_is_downloaded_without_other_formats_of_its_weights(tmp_path, monkeypatch):
    model = make_model_folder(tmp_path / "theirs")
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, *, revision: str | None, local_dir: pathlib.Path, allow_patterns: list[str]) -> None:
        asked.append((name, revision, allow_patterns))
        shutil.copytree(model, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir(exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = model_sources.from_hub("owner/small", revision="v1")
    (tmp_path / "out").mkdir()
    source.fill(tmp_path / "out")
    assert asked == [("owner/small", "v1", ["config.json"]), ("owner/small", "v1", list(PATTERNS))]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in model.iterdir())
    assert source.short_name == "small" and source.identity == {"hub": "owner/small", "revision": "v1"}
    assert not {"*.bin", "*.gguf", "*.safetensors"} & set(PATTERNS)


@pytest.fixture
def asked(tmp_path, monkeypatch) -> list[list[str]]:
    """What is downloaded of the model in `theirs`, download by download."""
    made: list[list[str]] = []

    def download(name: str, *, revision: str | None, local_dir: pathlib.Path, allow_patterns: list[str]) -> None:
        there = [p.name for p in (tmp_path / "theirs").iterdir()]
        made.append(sorted(n for n in there if any(fnmatch.fnmatch(n, pattern) for pattern in allow_patterns)))
        for one in made[-1]:
            shutil.copyfile(tmp_path / "theirs" / one, local_dir / one)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return made


@pytest.mark.parametrize("what", ["family", "no config"])
def test_model_that_the_learner_does_not_compute_is_refused_before_its_weights_are_fetched(tmp_path, asked, what):
    config = make_model_folder(tmp_path / "theirs") / "config.json"
    if what == "family":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    else:
        config.unlink()
    with pytest.raises(ValueError, match="gpt2" if what == "family" else "config.json"):
        get(tmp_path / "out", model_sources.from_hub("owner/large"))
    assert asked == [["config.json"] if what == "family" else []] and not (tmp_path / "out").exists()


def test_model_that_the_learner_computes_is_fetched_after_its_config(tmp_path, asked):
    names = sorted(p.name for p in make_model_folder(tmp_path / "theirs").iterdir())
    get(tmp_path / "out", model_sources.from_hub("owner/small"))
    assert asked == [["config.json"], names] and {*names} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_hub_out_of_reach_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    def download(*names: str, **more: object) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"owner/other can't be had from .*\(OSError: no route to host\); .* smollm2"):
        model_sources.from_hub("owner/other").fill(tmp_path)
