"""A model's folder is there whole or not at all, whatever interrupts its making."""

import json
import pathlib
import threading

import pytest

from bridge import files
from launch.tools import model_sources
from launch.tools.model_sources import RECORD, ModelSource
from tests.learner.model_folder import make_model_folder


class Folder:
    """A source that makes a small model, and may be interrupted."""

    def __init__(self, revision: int = 0, *, is_interrupted: bool = False) -> None:
        self.is_interrupted = is_interrupted
        self.found: list[str] = []
        """What an earlier try had left."""
        self.source = ModelSource(
            short_name="small", description="a test", identity={"revision": revision}, fill=self.fill, licence="none"
        )

    def fill(self, folder: pathlib.Path) -> None:
        self.found = sorted(p.name for p in folder.iterdir())
        (folder / "first").write_text("half")
        if self.is_interrupted:
            raise KeyboardInterrupt
        (folder / "first").unlink()
        make_model_folder(folder)


def get(out: pathlib.Path, folder: Folder) -> bool:
    return model_sources.get(out, folder.source)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_folder_is_made_once_and_says_what_made_it(tmp_path):
    assert get(tmp_path / "models" / "small", Folder())
    assert json.loads((tmp_path / "models" / "small" / RECORD).read_text()) == {"revision": 0}
    assert not get(tmp_path / "models" / "small", Folder())
    assert names(tmp_path / "models") == ["small"]


def test_interrupted_making_leaves_nothing_in_the_place_and_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path / "small", Folder(is_interrupted=True))
    assert not (tmp_path / "small").exists()
    again = Folder()
    assert get(tmp_path / "small", again) and again.found == ["first"]
    assert names(tmp_path) == ["small"] and not (tmp_path / "small" / "first").exists()


def test_what_another_source_left_half_made_is_not_gone_on_with(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path / "small", Folder(is_interrupted=True))
    other = Folder(revision=1)
    assert get(tmp_path / "small", other) and other.found == []


def test_folder_that_is_no_model_does_not_get_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.launch.tools.test_model_sources.make_model_folder", lambda folder: None)
    with pytest.raises(ValueError, match="config.json"):
        get(tmp_path / "small", Folder())
    assert not (tmp_path / "small").exists()


def test_place_that_holds_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "theirs").write_text("x")
    with pytest.raises(ValueError, match="not empty, and holds something else than a test"):
        get(tmp_path / "small", Folder())
    assert names(tmp_path / "small") == ["theirs"]
    get(tmp_path / "one", Folder())
    with pytest.raises(ValueError, match="not empty"):
        get(tmp_path / "one", Folder(revision=1))


def test_model_that_lost_its_weights_since_is_refused(tmp_path):
    get(tmp_path / "small", Folder())
    (tmp_path / "small" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        get(tmp_path / "small", Folder())


def test_folder_whose_record_says_more_is_there_already(tmp_path):
    """As one of an earlier version does, which had hashes in it."""
    get(tmp_path / "small", Folder())
    (tmp_path / "small" / RECORD).write_text(json.dumps({"revision": 0, "tensors_blake3": "b6fc"}))
    assert not get(tmp_path / "small", Folder())


def test_place_that_is_a_file_or_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give another --out"):
        get(tmp_path / "file", Folder())
    with pytest.raises(ValueError, match="nothing can be written in .*give another --out"):
        get(tmp_path / "file" / "small", Folder())


def test_place_that_has_no_name_of_its_own_is_the_folder_that_it_stands_for(tmp_path, monkeypatch):
    (tmp_path / "small" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "small" / "inner")
    with pytest.raises(ValueError, match="inner is the folder that this runs in, .*give a folder below it"):
        get(pathlib.Path("."), Folder())
    with pytest.raises(ValueError, match="small is not empty, and holds something else"):
        get(pathlib.Path(".."), Folder())
    with pytest.raises(ValueError, match="^/ can't be a model's folder; give another --out"):
        get(pathlib.Path("/"), Folder())
    assert names(tmp_path / "small") == ["inner"] and names(tmp_path / "small" / "inner") == []
    assert get(pathlib.Path("../other"), Folder()) and (tmp_path / "small" / "other" / RECORD).is_file()
    monkeypatch.chdir(tmp_path / "small" / "other")
    assert not get(pathlib.Path("."), Folder())  # there already


def test_second_one_waits_for_the_first_and_finds_it_there(tmp_path):
    order: list[str] = []
    waiting = threading.Thread(target=lambda: order.append(f"second made it: {get(tmp_path / 'small', Folder())}"))

    class First(Folder):
        def fill(self, folder: pathlib.Path) -> None:
            waiting.start()
            super().fill(folder)
            order.append("first")

    get(tmp_path / "small", First())
    waiting.join(timeout=60)
    assert order == ["first", "second made it: False"]


def test_record_is_written_last(tmp_path, monkeypatch):
    """A folder without it was not made whole."""
    at_record: list[bool] = []
    write = files.replace_file

    def spy(path: pathlib.Path, data: bytes, **more: bool) -> None:
        at_record.append((path.parent / "model.safetensors").is_file())
        write(path, data, **more)

    monkeypatch.setattr(model_sources, "replace_file", spy)
    get(tmp_path / "small", Folder())
    assert at_record == [True]
