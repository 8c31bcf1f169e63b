"""Packages that programs may import, of an environment that is made up, and numpy's."""

import pathlib
import sys

import pytest

from actor.sandbox import bwrap, languages, packages
from actor.sandbox.bwrap import HostView
from actor.sandbox.pool import Sandbox
from actor.sandbox.program import Case, SandboxUnavailableError
from actor.sandbox.self_test import check_isolation

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def install(folder: pathlib.Path, name: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    """Writes a package as an installer leaves it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    needed = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{p},,\n" for p in (*files, f"{info.name}/METADATA", "../../bin/tool")))


@pytest.fixture
def environment(tmp_path, monkeypatch):
    big_sum = {
        "bigsum/__init__.py": "from small import one\ndef two(): return one() + 1\n",
        "bigsum.libs/x.so": "",
        "tests/__init__.py": "",
    }
    needed = ("small>=1", "missing-here; sys_platform == 'win32'", "never; extra == 'test'")
    install(tmp_path, "Big-Sum", big_sum, needed)
    install(tmp_path, "small", {"small.py": "def one(): return 1\n"}, ("big-sum",))
    install(tmp_path, "never", {"never.py": ""})
    install(tmp_path, "backport", {"dataclasses.py": ""})
    install(tmp_path, "broken", {"broken.py": "import nothing_of_that_name\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    packages.files_of.cache_clear()
    bwrap._mount_table.cache_clear()
    yield tmp_path
    packages.files_of.cache_clear()
    bwrap._mount_table.cache_clear()


def test_package_brings_its_libraries_and_what_it_requires_and_nothing_else(environment):
    found = packages.files_of(("big.sum",))
    assert set(found) == {"bigsum", "bigsum.libs", "tests", "small.py"}
    assert found["small.py"] == str(environment / "small.py")
    assert packages.modules_of(("big.sum",)) == ["bigsum"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("nowhere-at-all", "'nowhere-at-all' is not installed in "), ("backport", "the standard library's dataclasses")],
)
def test_package_that_can_not_be_had_is_refused_in_one_line_before_a_sandbox_starts(environment, name, said):
    with pytest.raises(ValueError, match=said):
        packages.files_of((name,))


@pytest.mark.integration
@pytest.mark.parametrize(("name", "said"), [("nowhere-at-all", "not installed"), ("broken", "nothing_of_that_name")])
def test_package_that_programs_could_not_import_is_found_before_a_run(isolated, environment, name, said):
    with pytest.raises(SandboxUnavailableError, match=said) as e:
        check_isolation(view=HostView(packages=(name,)))
    assert "rewards.packages" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.integration
def test_programs_import_what_was_named_and_can_not_change_it(isolated, environment):
    source = (
        "import bigsum, os\nprint(bigsum.two(), sorted(os.listdir('/packages')))\n"
        "for name in ('never', 'msgspec', 'actor'):\n    try: __import__(name)\n    except ImportError: print('none')\n"
        "try: open('/packages/small.py', 'a')\nexcept OSError: print('read-only')\n"
    )
    with Sandbox(num_warm=1, view=HostView(packages=("big-sum",))) as one:
        (outcome,) = one.run(languages.program("python", source), [Case(timeout_s=60.0)])
    shown = ["bigsum", "bigsum.libs", "small.py", "tests"]
    assert outcome.stdout.decode() == f"2 {shown}\nnone\nnone\nnone\nread-only\n", outcome


@pytest.mark.integration
def test_numpy_computes_in_the_sandbox(isolated):
    source = (
        "import sys, numpy as np\nprint(int((np.arange(4.0).reshape(2, 2) @ np.ones(2)).sum()), *sys.version_info[:2])"
    )
    with Sandbox(num_warm=1, view=HostView(packages=("numpy",))) as one:
        (outcome,) = one.run(languages.program("python", source), [Case(timeout_s=60.0)])
    assert outcome.stdout.decode().split() == ["6", *VERSION.split(".")], outcome


def test_files_that_programs_can_read_are_known(environment):
    view = HostView(packages=("small",))
    _, prefix = bwrap.interpreter(view)
    shown = ["/usr/share/rows.jsonl", f"{prefix}/rows.jsonl", str(environment / "small.py")]
    assert all(bwrap.folder_shown(view, path) for path in shown)
    assert not any(bwrap.folder_shown(view, path) for path in ("/srv/rows.jsonl", str(environment / "rows.jsonl")))
