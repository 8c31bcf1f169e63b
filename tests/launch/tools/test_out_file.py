"""Files of --out: refused before there is anything to write, kept elsewhere where they can't be written at the end."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from launch.tools.out_file import check_out_file, write_out_file
from tests.integration.support.processes import REPO


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("HERE", "is a folder"),
        ("HERE/", "is a folder"),
        ("HERE/new/", "is a folder"),
        ("HERE/none/x.json", "folder HERE/none does not exist"),
        ("HERE/file/x.json", "folder HERE/file does not exist"),
        ("/proc/x.json", "/proc is not writable"),
        ("/dev/null", "expected a regular file"),
        ("HERE/pipe", "expected a regular file"),
        ("HERE/" + "x" * 255, "HERE is not writable"),
        ("", "is a folder"),
    ],
)
def test_file_that_can_not_be_written_is_refused_by_the_flags_name(tmp_path, given, why):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    here = str(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"--out={given.replace('HERE', here)}")) as e:
        check_out_file(given.replace("HERE", here))
    assert why.replace("HERE", here) in str(e.value)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "pipe"]


def test_file_that_is_there_stays_until_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.json").write_text("old")
    out = check_out_file("~/x.json")
    assert out.read_text() == "old"
    write_out_file(out, "new")
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("x.json", "new")]


def test_what_can_not_be_written_any_more_is_kept_elsewhere(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    out = check_out_file(str(folder / "x.json"))
    shutil.rmtree(folder)
    with pytest.raises(OSError, match="cannot be written .*; the content is in ") as e:
        write_out_file(out, '{"found": 1}')
    kept = pathlib.Path(str(e.value).rsplit("is in ", 1)[1])
    assert json.loads(kept.read_text()) == {"found": 1}
    kept.unlink()


def test_figure_of_a_format_that_nothing_draws_is_refused():
    with pytest.raises(ValueError, match=r"--plot=x.txt: expected a file that ends in .png"):
        check_out_file("x.txt", flag="--plot", suffixes=(".png",))


COMMANDS = {
    "tools.evaluate": ["--model=nowhere", "--prompts=nothing.jsonl", "--out=/proc/x"],
    "tools.report": ["--run_dir=nowhere", "--out=/proc/x"],
    "tools.profile_machine": ["--config=tiny", "--out=/proc/x"],
    "tools.compile_tpu": ["--all", "--out=/proc/x"],
    "tools.plan": ["--config=tiny", "--profile=nothing.json", "--search", "--plot=/proc/x.png"],
}
"""Commands that write a file when they have worked for long."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", COMMANDS)
def test_command_tries_its_file_before_all_else(name):
    call = [sys.executable, "-P", "-m", f"launch.{name}", *COMMANDS[name]]
    done = subprocess.run(
        call, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and "/proc is not writable" in done.stderr, done.stderr
