"""A model's folder is there whole or not at all, whatever interrupts its making; what the command refuses."""

import fnmatch
import json
import pathlib
import shutil
import threading

import huggingface_hub
import pytest

from bridge import files
from launch.tools import model_download
from launch.tools.model_download import PATTERNS, RECORD, from_hub, is_hub_name, licence_of
from tests.launch.commands import Done, call_each
from tests.learner.model_folder import make_model_folder


def call(*lines: list[str], cwd: pathlib.Path) -> list[Done]:
    return call_each("launch.tools.get_model", lines, max_arguments=1, cwd=cwd)


@pytest.mark.heavy
def test_folder_of_this_machine_is_named_as_what_a_run_takes(tmp_path):
    (tmp_path / "theirs").mkdir()
    (done,) = call(["theirs", "--out=mine"], cwd=tmp_path)
    (line,) = done.err.splitlines()
    assert done.code == 2 and "--config.model.path=theirs" in line and not (tmp_path / "mine").exists()


BAD = {
    (): "expected a model, as in python -m launch.tools.get_model smollm2",
    ("",): "expected a model",
    ("nosuch",): "no model 'nosuch'; expected smollm2, or a name of the Hub",
    ("smollm2", "more"): "unexpected argument 'more'",
    ("smollm2", "--revision=main"): "--revision has no effect on smollm2",
    ("smollm2", "--outt=x"): "Unknown command line flag 'outt'",
}


@pytest.mark.heavy
def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    for done, said in zip(call(*map(list, BAD), cwd=tmp_path), BAD.values(), strict=True):
        (line,) = done.err.splitlines()
        assert done.code == 2 and line.startswith("error: ") and said in line
    assert not any(tmp_path.iterdir())


def test_licence_is_what_the_folders_own_files_say(tmp_path):
    assert "license not stated" in licence_of(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert licence_of(tmp_path) == "license mit (model card)"


class Folder:
    """A source that makes a small model, and may be interrupted."""

    def __init__(self, revision: int = 0, *, is_interrupted: bool = False) -> None:
        self.is_interrupted = is_interrupted
        self.found: list[str] = []
        """What an earlier try had left."""
        self.identity = {"revision": str(revision)}

    def fill(self, folder: pathlib.Path) -> None:
        self.found = sorted(p.name for p in folder.iterdir())
        (folder / "first").write_text("half")
        if self.is_interrupted:
            raise KeyboardInterrupt
        (folder / "first").unlink()
        make_model_folder(folder)


def get(out: pathlib.Path, folder: Folder) -> bool:
    return model_download.get(out, folder.identity, folder.fill)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_folder_is_made_once_and_says_what_made_it(tmp_path):
    assert get(tmp_path / "models" / "small", Folder())
    assert json.loads((tmp_path / "models" / "small" / RECORD).read_text()) == {"revision": "0"}
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
    monkeypatch.setattr("tests.launch.tools.test_get_model.make_model_folder", lambda folder: None)
    with pytest.raises(FileNotFoundError, match="config.json"):
        get(tmp_path / "small", Folder())
    assert not (tmp_path / "small").exists()


def test_place_that_holds_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "theirs").write_text("x")
    with pytest.raises(ValueError, match="expected an empty folder or this model"):
        get(tmp_path / "small", Folder())
    assert names(tmp_path / "small") == ["theirs"]
    get(tmp_path / "one", Folder())
    with pytest.raises(ValueError, match="expected an empty folder"):
        get(tmp_path / "one", Folder(revision=1))


def test_model_that_lost_its_weights_since_is_refused(tmp_path):
    get(tmp_path / "small", Folder())
    (tmp_path / "small" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing weights"):
        get(tmp_path / "small", Folder())


def test_folder_whose_record_says_more_is_there_already(tmp_path):
    """As one of an earlier version does, which had hashes in it."""
    get(tmp_path / "small", Folder())
    (tmp_path / "small" / RECORD).write_text(json.dumps({"revision": "0", "tensors_blake3": "b6fc"}))
    assert not get(tmp_path / "small", Folder())


def test_place_that_is_a_file_or_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder, got a file; set another --out"):
        get(tmp_path / "file", Folder())
    with pytest.raises(ValueError, match="is not writable.*set another --out"):
        get(tmp_path / "file" / "small", Folder())


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

    monkeypatch.setattr(model_download, "replace_file", spy)
    get(tmp_path / "small", Folder())
    assert at_record == [True]


@pytest.mark.parametrize(
    ("name", "is_one"), [("Qwen/Qwen3-1.7B", True), ("Qwen", False), ("../up", False), ("a/b/c", False), ("a/", False)]
)
def test_name_of_the_hub_is_an_owner_and_a_model(name, is_one):
    assert is_hub_name(name) == is_one


def test_model_is_downloaded_without_other_formats_of_its_weights(tmp_path, monkeypatch):
    model = make_model_folder(tmp_path / "theirs")
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, *, revision: str | None, local_dir: pathlib.Path, allow_patterns: list[str]) -> None:
        asked.append((name, revision, allow_patterns))
        shutil.copytree(model, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir(exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "out").mkdir()
    from_hub("owner/small", "v1", tmp_path / "out")
    assert asked == [("owner/small", "v1", ["config.json"]), ("owner/small", "v1", list(PATTERNS))]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in model.iterdir())
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
    with pytest.raises((ValueError, FileNotFoundError), match="gpt2" if what == "family" else "config.json"):
        model_download.get(tmp_path / "out", {}, lambda part: from_hub("owner/large", "", part))
    assert asked == [["config.json"] if what == "family" else []] and not (tmp_path / "out").exists()


def test_model_that_the_learner_computes_is_fetched_after_its_config(tmp_path, asked):
    names = sorted(p.name for p in make_model_folder(tmp_path / "theirs").iterdir())
    model_download.get(tmp_path / "out", {"hub": "owner/small"}, lambda part: from_hub("owner/small", "", part))
    assert asked == [["config.json"], names] and {*names} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_hub_out_of_reach_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    def download(*names: str, **more: object) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ValueError, match=r"owner/other cannot be downloaded from .*\(OSError: no route to host\); .* smollm2"
    ):
        from_hub("owner/other", "", tmp_path)
