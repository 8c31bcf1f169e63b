import dataclasses
import os
import pathlib

import pytest

from configs.overrides import load_preset
from configs.sections import PromptsConfig
from configs.sections.prompts import PromptSource
from launch.startup import tiny_model
from launch.startup.tiny_model import cache_folder, cached_tiny_model


def test_cache_folder_is_the_named_one_and_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b" and (tmp_path / "a" / "b").is_dir()


def test_cache_folder_without_a_name_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sluice"


@pytest.mark.parametrize("where", ["/sys/.cache", "/proc/x/y", "FILE/x"])
def test_cache_folder_that_can_not_be_made_names_the_way_out(tmp_path, monkeypatch, where):
    (tmp_path / "file").touch()
    monkeypatch.delenv("SLUICE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", where.replace("FILE", str(tmp_path / "file")))
    with pytest.raises(ValueError, match="the cache folder is not writable .*; set SLUICE_CACHE to a writable folder"):
        cache_folder()


def test_cache_folder_that_can_not_be_written_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda folder, how: pathlib.Path(folder) != tmp_path)  # root may write anywhere
    with pytest.raises(ValueError, match="Permission denied.*set SLUICE_CACHE"):
        cache_folder()


def test_cache_folder_without_a_home_names_the_way_out(monkeypatch):
    monkeypatch.delenv("SLUICE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", no_home)
    with pytest.raises(ValueError, match="set SLUICE_CACHE"):
        cache_folder()


def test_tiny_models_of_other_prompts_are_other_models(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny_model, "_make_unless_there", lambda *_: None)
    (tmp_path / "rows.jsonl").write_text("{}")
    tiny, path = load_preset("tiny"), str(tmp_path / "rows.jsonl")
    prompts = [
        tiny.prompts,
        dataclasses.replace(tiny.prompts, mixture={"one": PromptSource(task="chain_sum", verifier="exact")}),
        PromptsConfig(path=path),
        PromptsConfig(path=path, answer_field="fixed"),
        PromptsConfig(path=path, rewards={"exact": 2.0}),
    ]
    folders = {cached_tiny_model(dataclasses.replace(tiny, prompts=one)) for one in prompts}
    assert len(folders) == len(prompts)
    assert cached_tiny_model(tiny) in folders
