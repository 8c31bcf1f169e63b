"""What the quickstart refuses before it sets anything up; the rest is tried by hand, as it installs an environment."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path) -> pathlib.Path:
    """The quickstart with a set-up that says so, and an environment whose Python says what it was asked for."""
    (tmp_path / "launch").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(REPO / "launch" / "quickstart.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text("echo setup\n")
    return tmp_path


def python(place: pathlib.Path, program: str) -> None:
    file = place / ".venv" / "bin" / "python"
    file.write_text(f"#!/usr/bin/env bash\n{program}\n")
    file.chmod(0o755)


def quickstart(place: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(place / "launch" / "quickstart.sh"), *arguments], capture_output=True, text=True)


def test_model_that_there_is_not_is_refused_before_anything_is_set_up(place):
    done = quickstart(place, "--model=gpt9")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: --model: expected smollm2, or no flag for a tiny model, got gpt9\n"


def test_flags_of_the_run_are_handed_on_and_the_model_is_not(place):
    """A stand-in for set-up and Python says what it was asked for."""
    python(place, 'echo "$@"')

    def lines(*arguments: str) -> list[str]:
        done = quickstart(place, *arguments)
        assert done.returncode == 0
        return done.stdout.splitlines()

    assert lines()[:2] == ["setup", "-m launch.local --config=tiny"]
    recipe = "--config=arithmetic_smollm2 --config.run.name=a b"
    assert lines("--model=smollm2", "--config.run.name=a b")[:5] == [
        "setup",
        "-m launch.tools.get_model smollm2 --out=models/smollm2",
        "-m launch.tools.write_tasks arithmetic --out=data/arithmetic",
        "-m launch.sft --config=arithmetic_smollm2:sft",
        f"-m launch.local {recipe}",
    ]
    assert any(line.startswith("total time with set-up: ") for line in lines("--model=smollm2"))


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_shown_at_once_on_eighty_columns(place, flag):
    done = quickstart(place, "--model=smollm2", flag)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "" and "setup" not in lines
    assert lines[0].startswith("Sets up, then trains") and max(map(len, lines)) <= 80
    assert "--model=smollm2" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modle=smollm2"], "unexpected argument '--modle=smollm2'; "),
        (["--model", "smollm2"], "--model requires a value: --model=VALUE"),
        (["--config.run.seed", "3"], "--config.run.seed requires a value: --config.run.seed=VALUE"),
        (["smollm2"], "unexpected argument 'smollm2'; "),
        (["--follow"], "unexpected argument '--follow'; "),
    ],
)
def test_flag_that_is_none_is_one_line_before_anything_is_set_up(place, arguments, said):
    done = quickstart(place, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {said}")


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["--model=tiny", "--model=smollm2"])
def test_override_that_can_not_be_is_refused_before_anything_is_set_up_where_an_environment_is_there(place, model):
    python(place, f'cd {REPO} && exec {sys.executable} "$@"')
    done = quickstart(place, model, "--config.rounds.groups_per_ruond=3")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: config has no field 'rounds.groups_per_ruond'; did you mean 'rounds.groups_per_round'"
    )


def test_override_is_refused_before_the_download_by_the_environment_that_set_up_made(place):
    python(place, 'case "$*" in *check_config*) echo "error: no" >&2; exit 2 ;; *) echo "$@" ;; esac')
    (place / ".venv" / "bin" / "python").rename(place / "python")
    (place / "launch" / "setup.sh").write_text("echo setup\nmv python .venv/bin/python\n")
    done = quickstart(place, "--model=smollm2", "--config.run.seed=x")
    assert (done.returncode, done.stdout, done.stderr) == (2, "setup\n", "error: no\n")


def test_environment_that_is_broken_keeps_nobody_from_the_set_up_that_mends_it(place):
    python(place, 'case "$*" in *check_config*) exit 1 ;; *) echo "$@" ;; esac')
    assert quickstart(place).stdout.startswith("setup\n-m launch.local --config=tiny\n")


@pytest.mark.parametrize("has_home", [True, False])
def test_files_of_libraries_are_kept_in_the_home_folder_or_where_it_is_none_in_the_clone(place, has_home, tmp_path):
    python(place, 'echo "cache=${XDG_CACHE_HOME:-}"')
    home = tmp_path / "home"
    home.mkdir() if has_home else home.touch()  # below a file nothing can be made, as root either
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    command = ["bash", str(place / "launch" / "quickstart.sh")]
    done = subprocess.run(command, env=environment | {"HOME": str(home)}, capture_output=True, text=True, check=True)
    assert f"cache={'' if has_home else place / '.cache'}" in done.stdout.splitlines()
