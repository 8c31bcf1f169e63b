"""What the quickstart refuses before it sets anything up; the rest is tried by hand, as it installs an environment."""

import pathlib
import shutil
import subprocess

REPO = pathlib.Path(__file__).resolve().parents[2]


def test_model_that_there_is_not_is_refused_before_anything_is_set_up(tmp_path):
    (tmp_path / "launch").mkdir()
    shutil.copy(REPO / "launch" / "quickstart.sh", tmp_path / "launch")
    done = subprocess.run(
        ["bash", str(tmp_path / "launch" / "quickstart.sh"), "--model=gpt9"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: --model=gpt9: give smollm2, or leave it out for a tiny model\n"


def test_flags_of_the_run_are_handed_on_and_the_model_is_not(tmp_path):
    """A stand-in for set-up and Python says what it was asked for."""
    (tmp_path / "launch").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(REPO / "launch" / "quickstart.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text("echo setup\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\necho "$@"\n')
    python.chmod(0o755)

    def lines(*arguments: str) -> list[str]:
        command = ["bash", str(tmp_path / "launch" / "quickstart.sh"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert lines()[:2] == ["setup", "-m launch.local --config=configs/tiny.py"]
    recipe = "--config=configs/recipes/arithmetic_smollm2.py --config.run.name=a b"
    assert lines("--model=smollm2", "--config.run.name=a b")[:4] == [
        "setup",
        "-m launch.get_model smollm2 --out=models/smollm2",
        "-m launch.write_tasks arithmetic --out=data/arithmetic",
        f"-m launch.local {recipe}",
    ]
    assert any(line.startswith("from set-up to here: ") for line in lines("--model=smollm2"))
