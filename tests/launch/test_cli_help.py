"""Every command there is: its help, and what it says of a flag that it doesn't know. A new one is found by itself."""

import ast
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from actor.rewards.registry import MODULES as VERIFIERS
from configs import overrides
from configs.field_docs import field_docs
from launch import cli_help
from learner.objective.advantages import ADVANTAGES
from learner.objective.losses import LOSSES
from tests.integration.support.processes import REPO

LAUNCH = pathlib.Path(REPO) / "launch"
NO_FLAGS = {
    *("services.judge_server", "startup.tiny_model", "supervision.snapshot_cleanup", "tools.smollm2"),
    *("uv_settings", "__main__"),
}
"""What takes another program's arguments, and shows that one's help; what a script starts; what names the others."""


def commands() -> list[str]:
    """What `python -m launch.NAME` starts."""
    folders = [LAUNCH, *(LAUNCH / room for room in ("services", "startup", "supervision", "tools"))]
    files = [f for folder in folders for f in folder.glob("*.py") if 'if __name__ == "__main__"' in f.read_text()]
    rooms = [f.parent for f in LAUNCH.rglob("*/__main__.py")]
    found = {".".join(f.relative_to(LAUNCH).with_suffix("").parts) for f in [*files, *rooms]}
    return sorted(found - NO_FLAGS)


FORKED = """
import json, os, runpy, sys, tempfile, traceback
import configs.field_docs, launch.cli, launch.cli_help  # once for all commands, most of which import no more

for name, flag in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (pid := os.fork()):
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv[:] = ["", flag]
            code = 0
            try:
                runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)
            except SystemExit as e:
                code = e.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err)]
    print(json.dumps([code, *texts]), flush=True)
"""
"""Runs each command of stdin as `python -m` does, in a child of its own; prints its code, stdout and stderr."""


@functools.cache
def said() -> dict[tuple[str, str], subprocess.CompletedProcess[str]]:
    """Every command with --help, and with a flag that none has."""
    lines = [(name, flag) for name in commands() for flag in ("--help", "--no_such_flag=1")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKED],
        env=os.environ | {"PYTHONPATH": str(REPO), "COLUMNS": "80"},
        cwd="/",
        input=json.dumps(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = map(json.loads, done.stdout.splitlines())
    return {line: subprocess.CompletedProcess(line, *answer) for line, answer in zip(lines, answers, strict=True)}


def takes_config(name: str) -> bool:
    return "--config=VALUE" in said()[name, "--help"].stdout


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["local", "tools.samples", "tools.evaluate"])
def test_help_is_the_same_where_python_drops_docstrings(name):
    texts = []
    for level in ("0", "2"):
        environment = os.environ | {"PYTHONPATH": str(REPO), "PYTHONOPTIMIZE": level}
        call = [sys.executable, "-P", "-m", f"launch.{name}", "--help"]
        texts.append(subprocess.run(call, env=environment, cwd="/", capture_output=True, text=True, check=True).stdout)
    assert texts[0] == texts[1] and len(texts[0].splitlines()) > 5


@pytest.mark.heavy
@pytest.mark.parametrize("name", commands())
def test_help_fits_eighty_columns_and_says_what_the_command_does(name):
    done = said()[name, "--help"]
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    place = LAUNCH.joinpath(*name.split("."))
    place = place if place.is_dir() else place.with_suffix(".py")
    file = next(file for file in (place / "cli.py", place / "__main__.py", place) if file.is_file())
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert " ".join(done.stdout.split()).startswith(" ".join(docstring.split("\n\n")[0].split()))
    defined = re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', file.read_text())
    assert [name for name in defined if f"--{name}" not in done.stdout] == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", commands())
def test_flag_that_is_not_known_is_one_line_and_exit_code_two(name):
    done = said()[name, "--no_such_flag=1"]
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.heavy
def test_commands_that_start_runs_show_presets_recipes_and_common_fields():
    assert {"local", "learner", "ray", "tools.deploy", "tools.plan"} <= {
        name for name in commands() if takes_config(name)
    }
    for name in filter(takes_config, commands()):
        shown = {
            line.split()[0].partition("=")[0] for line in said()[name, "--help"].stdout.splitlines() if line.strip()
        }
        assert {*overrides.preset_names(), *overrides.recipe_names(), *cli_help.COMMON} - shown == set()


@pytest.mark.heavy
def test_commands_without_a_run_know_no_config():
    tools = ("runs", "make_certificates", "store_server", "write_tasks")
    for name in (*(f"tools.{tool}" for tool in tools), "supervision.kubernetes_probe"):
        assert not takes_config(name) and "rounds.groups_per_round" not in said()[name, "--help"].stdout


def test_common_fields_are_fields_and_each_has_a_meaning():
    docs = field_docs()
    assert set(docs) == set(overrides.field_paths())
    assert [path for path in cli_help.COMMON if not docs[path].meaning] == []


@pytest.mark.parametrize(
    ("path", "names"),
    [("prompts.verifier", {*VERIFIERS, "judge"}), ("loss.name", LOSSES), ("loss.advantage", {*ADVANTAGES, "gae"})],
)
def test_field_whose_choices_are_a_constants_names_them(path, names):
    short = " ".join(cli_help._field(field_docs()[path], False).split())
    assert f"one of {', '.join(sorted(names))}" in short


def test_common_field_is_said_in_its_first_sentence_alone():
    short = " ".join(cli_help._field(field_docs()["loss.name"], False).split())
    assert short.endswith("or `module:function` for a custom loss with any of the constants as keywords")
    assert "gspo requires normalization=sequence" in " ".join(cli_help._field(field_docs()["loss.name"], True).split())


def test_no_common_field_names_a_constant_of_python():
    docs = field_docs()
    assert [path for path in cli_help.COMMON if re.search(r"`[A-Z_]{3,}`", cli_help._field(docs[path], False))] == []


@pytest.mark.heavy
def test_flags_help_says_what_it_is_to_its_command_and_nothing_of_the_library_that_reads_it():
    helps = {name: " ".join(said()[name, "--help"].stdout.split()) for name in commands()}
    assert [name for name, text in helps.items() if "repeat this option" in text or ".;" in text] == []
    assert "May be given several times to compare runs" in helps["tools.report"]
    assert [
        name for name, text in helps.items() if name != "tools.report" and "launch.tools.report takes" in text
    ] == []
    assert "--sort=step|reward|lag|length" in helps["tools.samples"] and "<step|" not in helps["tools.samples"]
    assert "may import on this machine. May be given several times." in helps["actor"]


def test_configs_of_a_folder_are_those_files_that_give_one_with_their_first_sentence(tmp_path):
    (tmp_path / "sums.py").write_text('"""Learns sums (2.5 minutes). More of it.\n"""\n\ndef get_config():\n    pass\n')
    (tmp_path / "shared.py").write_text('"""What recipes share."""\n\ndef schedule():\n    pass\n')
    assert [" ".join(line.split()) for line in cli_help._configs(tmp_path)] == ["sums Learns sums (2.5 minutes)"]


def test_meaning_is_the_text_below_the_field():
    assert (
        field_docs()["run.num_updates"].meaning
        == "Number of updates to train. Each update is rounds.epochs optimizer steps."
    )
    assert (field_docs()["actor.num_engines"].default, field_docs()["actor.num_engines"].kind) == (1, "int")
    assert set(field_docs()["publish.when"].kind.split("|")) == {"every", "round_end"}


def test_long_words_and_command_lines_are_broken_where_they_can_be():
    prose = cli_help._prose(f"Does it: `{'x' * 70}`.\n\n    python -m launch.x {'--flag=value ' * 9}\n\n{'word ' * 40}")
    assert max(map(len, prose.splitlines())) <= 80
    assert prose.splitlines()[4].startswith("        --flag")


WORKERS = {
    "startup.tiny_model": ("launch.local", "FOLDER"),
    "supervision.snapshot_cleanup": ("launch.local", "RUN_DIR SNAPSHOTS"),
    "tools.smollm2": ("launch.tools.get_model", "FILE FOLDER"),
    "tools.compile_tpu.compile_worker": ("launch.tools.compile_tpu", "ANSWER"),
    "tools.evaluate.export": ("launch.tools.evaluate", "RUN_DIR STEP TARGET"),
    "tools.profile_machine.profile_worker": (
        "launch.tools.profile_machine",
        "learner|engine RUN_FOLDER TENSOR_PARALLEL_SIZE",
    ),
    "tools.profile_machine.store_client": ("launch.tools.profile_machine", "URL RUN NAME"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("arguments", [["--no_such_flag=1"], [], ["learner", "folder"], ["a", "b", "c"], ["one"]])
def test_process_that_a_command_starts_refuses_in_one_line_to_be_started_by_hand(name, arguments):
    command, wanted = WORKERS[name]
    if len(arguments) == len(wanted.split()) and name.endswith(("tiny_model", "snapshot_cleanup", "smollm2")):
        pytest.skip("these could be its arguments")
    environment = os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"}
    call = [sys.executable, "-P", "-m", f"launch.{name}", *arguments]
    done = subprocess.run(call, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: internal process: ")
