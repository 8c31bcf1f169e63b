"""Every command of every page is one that there is, with flags and fields that it has."""

import functools
import importlib.util
import re
import subprocess
import sys

import pytest

from configs import overrides
from tests.docs.markdown import REPO, Command, commands, fenced
from tests.test_docs import named, pages

OURS = ("launch.", "tests.", "bridge.", "learner.")
OTHERS = {"mkdocs", "pip", "pytest", "venv"}
_FLAG = re.compile(r"--([a-z][\w.]*)")
_EXAMPLE = re.compile(r"[A-Z]{2,}|\.\.\.|^mine\.toml$")
"""Configs of the reader's."""
_PLACEHOLDER = re.compile(r"[A-Z]{2,}|\.\.\.|\*")


def found(page) -> list[Command]:
    return list(dict.fromkeys(commands(page.read_text())))


def lines() -> list[tuple[str, Command]]:
    return [(named(page), command) for page in pages() for command in found(page)]


@functools.cache
def flags_of(module: str) -> str:
    """What a command says of its flags."""
    return subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout


def given(command: Command) -> list[str]:
    """The names of its flags."""
    return [m[1] for argument in command.arguments if (m := _FLAG.match(argument))]


def test_pages_have_commands_and_they_are_read_over_line_ends():
    text = "x\n\n    a=1 .venv/bin/python -m launch.x --a=1 \\\n        --b='c d' && python -m launch.y &  # e\n"
    text += "\n`python -m z --d`"
    assert [str(c) for c in commands(text)] == ["launch.x --a=1 --b=c d", "launch.y", "z --d"]
    assert len(lines()) > 100


@pytest.mark.parametrize("module", sorted({c.module for _, c in lines() if not _PLACEHOLDER.search(c.module)}))
def test_command_of_a_page_is_there(module):
    assert module in OTHERS or (f"{module}.".startswith(OURS) and importlib.util.find_spec(module)), module


def test_fields_that_commands_set_are_fields_and_presets_are_there():
    wrong = []
    known = set(overrides.field_paths())
    presets = {*overrides.preset_names(), *overrides.recipe_names()}
    for page, command in lines():
        for argument in command.arguments:
            name, _, value = argument.removeprefix("--").partition("=")
            if _PLACEHOLDER.search(name):
                continue
            path = name.removeprefix("config.")
            of_dict = path.startswith(
                (
                    "prompts.mixture.",
                    "evaluation.sets.",
                    "prompts.task_args.",
                    "prompts.environment_args.",
                    "judge.engine.",
                )
            )
            if name.startswith("config.") and not of_dict and path not in known:
                wrong.append(f"{page}: {argument}")
            if name == "config" and not _EXAMPLE.search(value) and value.partition(":")[0] not in presets:
                wrong.append(f"{page}: {argument}")
    assert wrong == []


def test_configs_of_pages_are_valid(tmp_path):
    blocks = [(named(page), block) for page in pages() for block in fenced(page, "toml") if "preset =" in block]
    assert "README.md" in [page for page, _ in blocks]
    for page, block in blocks:
        (tmp_path / "mine.toml").write_text(block)
        assert overrides.load_preset(str(tmp_path / "mine.toml")), page


def test_command_to_be_typed_names_an_interpreter_that_has_the_project():
    bare = re.compile(r"^ {4,}(?:\w+=\S+ )*python (?:-m (?:launch|tests|learner|actor|bridge)\b|\w+\.py)", re.MULTILINE)
    of_pages = {named(page): page.read_text() for page in pages() if page.parent.name != "results"}
    blocks = [
        (p, block) for p, text in of_pages.items() for block in re.findall(r"(?:^ {4,}.*\n+)+", text, re.MULTILINE)
    ]
    assert [(p, block) for p, block in blocks if "bin/activate" not in block and bare.search(block)] == []


@pytest.mark.heavy
@pytest.mark.parametrize("module", sorted({c.module for _, c in lines() if c.module.startswith("launch.")}))
def test_flags_of_a_page_are_flags_of_the_command(module):
    if _PLACEHOLDER.search(module):
        pytest.skip("stands for any command")
    helped = flags_of(module)
    wrong = [
        f"{page}: {command}"
        for page, command in lines()
        if command.module == module
        for flag in given(command)
        if not flag.startswith("config.")
        and flag not in ("help", "helpfull", "flagfile")
        and f"--{flag}" not in helped
        and f"--[no]{flag}" not in helped
    ]
    assert wrong == []
