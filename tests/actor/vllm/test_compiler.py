"""The compiler of an engine on a CPU: what is found missing, and what is set then."""

import pathlib
import stat

import pytest

from actor.vllm import compiler
from actor.vllm.compiler import check_library, do_without_compiler, missing_compiler
from actor.vllm.engine_setup import set_environment
from configs.schema import Config
from launch.startup import preflight
from launch.supervision.placement import Machine


@pytest.fixture
def include(tmp_path: pathlib.Path) -> str:
    folder = tmp_path / "headers of Python"
    folder.mkdir()
    (folder / "Python.h").touch()
    return str(folder)


def stand_in(folder: pathlib.Path, name: str, program: str) -> dict[str, str]:
    """An environment whose PATH has one program of ours before the system's."""
    folder.mkdir()
    file = folder / name
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/bin"}


def test_compiler_that_is_not_there_is_named(tmp_path, include):
    assert missing_compiler({"PATH": str(tmp_path)}, include=include) == "a C++ compiler (g++)"
    assert missing_compiler({"PATH": str(tmp_path), "CXX": "ccache none++"}, include=include).endswith("(ccache)")


def test_headers_that_are_not_there_are_named(tmp_path):
    there = stand_in(tmp_path / "bin", "g++", "exit 0")
    assert missing_compiler(there, include=str(tmp_path)) == f"Python's headers ({tmp_path}/Python.h)"


def test_compiler_that_fails_is_missing_with_what_it_says(tmp_path, include):
    fails = stand_in(tmp_path / "bin", "g++", 'echo "fatal error: vector: No such file or directory" >&2; exit 1')
    said = missing_compiler(fails, include=include)
    assert "that works (g++: fatal error: vector: No such file" in said and "\n" not in said


def test_compiler_that_works_is_asked_for_pythons_headers_below_any_path(tmp_path, include):
    there = stand_in(tmp_path / "bin", "c", f'[ "$5" = "{include}" ]')
    assert missing_compiler({**there, "CXX": "c -O1"}, include=include) == ""


@pytest.fixture
def without(monkeypatch, tmp_path) -> dict[str, str]:
    """An environment of an engine on a CPU, without a compiler."""
    monkeypatch.setattr(compiler, "engine_is_for_cpus", lambda: True)
    return {"PATH": str(tmp_path)}


def test_engine_without_a_compiler_runs_uncompiled_and_it_is_said_once(without):
    line = do_without_compiler(without)
    assert without[compiler.SWITCH] == "1" and compiler.INSTALL in line and "\n" not in line
    assert do_without_compiler(without) == ""


def test_engine_with_a_compiler_and_one_on_gpus_are_left_alone(without, monkeypatch):
    monkeypatch.setattr(compiler, "missing_compiler", lambda environment: "")
    assert do_without_compiler(without) == ""
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "engine_is_for_cpus", lambda: False)
    assert do_without_compiler(without) == "" and compiler.SWITCH not in without


def test_library_that_no_engine_starts_without_is_refused_in_one_line_where_one_on_a_cpu_is_to_run(monkeypatch):
    for is_for_cpus in (False, True):
        monkeypatch.setattr(compiler, "engine_is_for_cpus", lambda answer=is_for_cpus: answer)
        check_library("libc.so.6")
        if not is_for_cpus:
            check_library("libnone.so.1")
    with pytest.raises(ValueError, match="needs libnone.so.1.* apt-get install libnuma1") as e:
        check_library("libnone.so.1")
    assert "\n" not in str(e.value)


def test_users_own_setting_stays(without):
    without[compiler.SWITCH] = "0"
    assert do_without_compiler(without) == "" and without[compiler.SWITCH] == "0"


def test_preflight_of_an_actor_warns_in_one_line_and_that_of_a_learner_does_not(without, monkeypatch):
    monkeypatch.setattr(preflight.os, "environ", without)
    no_gpu = Machine(gpus=(), cores=(0, 1))
    assert not [note for note in preflight.check_engines(Config(preset="test"), ("learner",), no_gpu) if "C++" in note]
    (note,) = [note for note in preflight.check_engines(Config(preset="test"), ("actor",), no_gpu) if "C++" in note]
    assert note.startswith("warning: a C++ compiler (g++) is missing") and "\n" not in note


def test_engine_of_an_actor_that_joins_from_elsewhere_is_uncompiled_too(without, monkeypatch):
    monkeypatch.setattr(preflight.os, "environ", without)
    set_environment(Config(preset="test"))
    assert without[compiler.SWITCH] == "1"
