"""Provenance that a run's start records."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from launch.startup import provenance
from launch.startup.provenance import record_start, source_commit


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text("1\n")
    git(folder, "add", "a.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_commit_is_that_of_the_source_and_modified_only_by_tracked_files(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked").write_text("")
    assert source_commit(checkout) == (head, False)
    (checkout / "a.py").write_text("2\n")
    assert source_commit(checkout) == (head, True)


def test_commit_is_empty_without_a_checkout_of_its_own(checkout, monkeypatch):
    (checkout / "installed").mkdir()
    assert source_commit(checkout / "installed") == ("", False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert source_commit(checkout) == ("", False)


def test_commit_is_that_of_the_image_without_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_COMMIT", "0123abc")
    assert source_commit(tmp_path) == ("0123abc", False)


def test_record_has_command_machine_and_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "-m", "launch.local", "--config.run.name=a b"])
    record_start(tmp_path / "p.jsonl")
    (found,) = lines(tmp_path / "p.jsonl")
    assert found["command"] == "python -m launch.local '--config.run.name=a b'"
    assert found["working_directory"] == os.getcwd() and found["host"] == os.uname().nodename
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["python"].split(".")[:2] == [str(n) for n in sys.version_info[:2]]
    assert found["num_cores"] >= 1 and found["memory_gib"] > 0


def test_start_of_another_command_on_equal_code_and_machine_adds_no_line(tmp_path, monkeypatch):
    file = tmp_path / "p.jsonl"
    record_start(file)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "launch.learner", "--run_dir=r"])
    record_start(file)
    assert len(lines(file)) == 1
    monkeypatch.setattr(provenance, "source_commit", lambda folder: ("f" * 40, False))
    record_start(file)
    record_start(file)
    assert [one["commit"] == "f" * 40 for one in lines(file)] == [False, True]


@pytest.mark.parametrize("before", ["", "[]\n", '{"commit": "a'])
def test_start_after_other_lines_adds_a_complete_line(tmp_path, before):
    file = tmp_path / "p.jsonl"
    file.write_text(before)
    record_start(file)
    text = file.read_text()
    assert text.startswith(before) and json.loads(text.splitlines()[-1])["command"] and text.endswith("\n")
