import builtins
import importlib.util

import pytest

from configs import sections
from learner.data.readers import load, open_rows
from tests.learner.data.rooms import parquet, rows_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the extra `huggingface` is not installed"
)

CARD = """\
---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
- config_name: other
  data_files:
  - {split: train, path: other/train.parquet}
---
# Sums
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data set as the Hub keeps one: a card and its files. The library's cache is the test's."""
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("main", "other"):
        (tmp_path / "sums" / name).mkdir(parents=True)
    (tmp_path / "sums" / "README.md").write_text(CARD)
    parquet(tmp_path / "sums" / "main", rows_of(30), "train.parquet")
    parquet(tmp_path / "sums" / "main", rows_of(4, start=90), "test.parquet")
    parquet(tmp_path / "sums" / "other", [{"prompt": "o", "answer": 1, "more": [1]}], "train.parquet")
    return tmp_path / "sums"


def source_of(folder, **fields):
    return sections.PromptsConfig(path=f"hf:{folder}", **fields).sources[""]


def all_of(found):
    return [row for batch in found.batches() for row in batch]


@pytest.mark.heavy
def test_load_folder_in_the_hubs_format_gives_the_splits_rows(folder):
    source = source_of(folder)
    found = load(source, ("prompt", "answer"), split="train")
    assert all_of(found) == [found[i] for i in range(30)] == rows_of(30)
    assert all_of(load(source, ("prompt", "answer"), split="test")) == rows_of(4, start=90)


def test_load_subset_is_of_the_name_and_keeps_the_columns_looked_at(folder):
    found = load(source_of(folder, subset="other"), ("prompt", "answer", "rewards"), split="train")
    assert all_of(found) == [{"prompt": "o", "answer": 1}]


@pytest.mark.parametrize(("fields", "split"), [(dict(subset="none"), "train"), ({}, "nosuch")])
def test_load_of_what_is_not_there_is_refused_by_name(folder, fields, split):
    with pytest.raises(ValueError, match=rf"hf:{folder} .*split '{split}'\) cannot be loaded: "):
        load(source_of(folder, **fields), ("prompt", "answer"), split=split)


def test_load_of_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(source_of(tmp_path / "none"), ("prompt", "answer"), split="train")


def test_load_without_the_library_names_the_extra(folder, monkeypatch):
    def no_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'")
        return imported(name, *args, **kwargs)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(ValueError, match=r"needs the library `datasets`.*pip install -e .*\[huggingface\]"):
        load(source_of(folder), ("prompt", "answer"), split="train")


@pytest.fixture
def asked(monkeypatch):
    """What the library, which is offline, was asked for."""
    asked = []

    def load_dataset(name, subset, *, split, revision):
        asked.append((name, subset, split, revision))
        raise OSError("offline")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_load_asks_for_the_revision(asked):
    for revision in ("v1.2", ""):
        source = sections.PromptsConfig(path="hf:owner/sums", revision=revision).sources[""]
        with pytest.raises(ValueError, match="cannot be loaded: offline"):
            load(source, ("prompt",), split="train")
    assert asked == [("owner/sums", None, "train", "v1.2"), ("owner/sums", None, "train", None)]


def test_open_rows_of_another_data_set_is_of_its_default_subset_and_revision(asked):
    source = sections.PromptsConfig(path="hf:owner/sums", subset="main", revision="v1.2").sources[""]
    for path in ("hf:owner/sums", "hf:other/tests"):
        with pytest.raises(ValueError, match="cannot be loaded: offline"):
            open_rows(source, ("prompt",), path=path)
    assert asked == [("owner/sums", "main", "train", "v1.2"), ("other/tests", None, "train", None)]
