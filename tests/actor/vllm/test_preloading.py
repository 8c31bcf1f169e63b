"""LD_PRELOAD of an engine whose environment lies below a path that it can't hold."""

import pathlib
import sys

import pytest

from actor.vllm.preloading import preload_through_links


def packages(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    """Packages torch and vllm, with a library each, before the installed ones."""
    for name, library in (("torch", "lib/libgomp.so.1"), ("vllm", "libs/libtcmalloc_minimal.so.4")):
        (folder / name / library).parent.mkdir(parents=True)
        (folder / name / library).write_text(name)
        (folder / name / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("torch", "vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_libraries_below_a_path_with_a_space_are_preloaded_through_links(tmp_path, monkeypatch):
    packages(monkeypatch, tmp_path / "a clone")
    environment = {"LD_PRELOAD": "/lib/other.so"}
    preload_through_links(environment)
    other, *links = environment["LD_PRELOAD"].split(":")
    assert other == "/lib/other.so" and [pathlib.Path(link).read_text() for link in links] == ["torch", "vllm"]
    assert not any(" " in link for link in links)
    assert [pathlib.Path(link).name for link in links] == ["libgomp.so.1", "libtcmalloc_minimal.so.4"]


def test_library_that_is_preloaded_already_stays(tmp_path, monkeypatch):
    packages(monkeypatch, tmp_path / "a clone")
    environment = {"LD_PRELOAD": "/opt/libgomp.so.1"}
    preload_through_links(environment)
    assert environment["LD_PRELOAD"].startswith("/opt/libgomp.so.1:") and environment["LD_PRELOAD"].count("gomp") == 1


def test_path_that_can_be_held_is_left_to_vllm(tmp_path, monkeypatch):
    packages(monkeypatch, tmp_path / "clone")
    environment: dict[str, str] = {}
    preload_through_links(environment)
    assert environment == {}
