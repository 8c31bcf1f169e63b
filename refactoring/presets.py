#!/usr/bin/env python3
"""Presets by name, after apply_moves.py: `--config=NAME[:ARG]`; a path is still a file of the user's own. No aliases."""

import ast
import pathlib
import re
import subprocess
import sys

from texts import wrapped

NAMES = (
    "cgp pipelinerl pipelinerl_ess roll_flash rolloutpipe rollpacker serial tiny tiny_calculator tiny_code tiny_guess "
    "tpu_v5e_16 tpu_v5p_64 tpu_v5p_128 tpu_v6e_256"
).split()
HERE = {
    "pipelinerl": "pipelinerl", "pipelinerl_ess": "pipelinerl", "roll_flash": "roll_flash", "rollpacker": "rollpacker",
} | {n: "rolloutpipe" for n in ("cgp", "rolloutpipe", "serial")} | {n: "tiny" for n in NAMES if n.startswith("tiny")} | {
    n: "tpu" for n in NAMES if n.startswith("tpu")
}  # fmt: skip

TABLE = '''
NAMES: dict[str, Callable[..., Config]] = {
    **PRESETS,
    "tiny": tiny.tiny,
    "tiny_calculator": tiny.tiny_calculator,
    "tiny_code": tiny.tiny_code,
    "tiny_guess": tiny.tiny_guess,
    "tpu_v5e_16": tpu.tpu_v5e_16,
    "tpu_v5p_64": tpu.tpu_v5p_64,
    "tpu_v5p_128": tpu.tpu_v5p_128,
    "tpu_v6e_256": tpu.tpu_v6e_256,
}
"""Every preset by its name, as --config takes it."""
'''
LOAD = '''def load_preset(preset: str) -> Config:
    """Returns the config of a preset or recipe by its name, or of a file of the user's own.

    `NAME:ARGUMENT` hands the preset an argument: a size, a model, a schedule. So does `FILE.py:ARGUMENT`, whose
    `get_config()` is run. `FILE.json` is read as `to_json` writes it.

    Raises:
      ValueError: no such preset or file, or it has no `get_config` (the presets that exist are named); it fails by
        itself (the line is named); or it returns something else.
    """
    name, _, argument = preset.partition(":")
    if (shipped := _shipped(name)) is not None:
        try:
            return shipped(*([argument] if argument else []))
        except (ValueError, TypeError) as e:  # an argument that it doesn't take
            raise ValueError(f"{preset}: {e}") from e
    file = pathlib.Path(name).expanduser()
    if not file.is_file():
        raise ValueError(f"no preset or config file {name!r}; {_presets()}")
    if file.suffix == ".json":
        return _load_json(file)
    with custom_functions.importable(file.resolve().parent):
        try:
            module = _import_file(file)
        except (Exception, SystemExit) as e:  # it is the user's code
            raise ValueError(_failure(file, e)) from e
        if not callable(getattr(module, "get_config", None)):
            raise ValueError(f"{name} is no preset: it has no function get_config(); {_presets()}")
        try:
            config = module.get_config(*([argument] if argument else []))
        except (ValueError, TypeError) as e:  # an argument that it doesn't take, a value that is refused
            raise ValueError(f"{preset}: {e}") from e
        except (Exception, SystemExit) as e:
            raise ValueError(_failure(file, e)) from e
    if not isinstance(config, Config):
        raise ValueError(f"{preset}: get_config() must return a configs.schema.Config, got {type(config)}")
    return config


def recipe_names() -> list[str]:
    """Names of the recipes, each a module of `configs.recipes`."""
    folder = pathlib.Path(__file__).parent / "recipes"
    return sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")


def preset_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(importlib.import_module("configs.presets").NAMES)


def _shipped(name: str) -> Callable[..., Config] | None:
    """Returns the function of a preset or recipe; None if none has the name."""
    if name in recipe_names():
        return importlib.import_module(f"configs.recipes.{name}").get_config
    return importlib.import_module("configs.presets").NAMES.get(name)

'''
PRESETS = '''def _presets() -> str:
    return f"presets are {', '.join([*preset_names(), *recipe_names()])}"

'''
HELP = '''def _preset_entries() -> Iterator[str]:
    """Presets, each with the first sentence of its docstring."""
    presets = importlib.import_module("configs.presets").NAMES
    for name in sorted(presets):
        yield _entry(name, _first_sentence(inspect.getdoc(presets[name]) or ""))

'''


def replace_function(file: str, name: str, text: str) -> None:
    path = pathlib.Path(file)
    source = path.read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == name)
    lines = source.splitlines(keepends=True)
    path.write_text("".join(lines[: node.lineno - 1]) + text.rstrip("\n") + "\n" + "".join(lines[node.end_lineno :]))


def replace(file: str, *pairs: tuple[str, str]) -> list[str]:
    path = pathlib.Path(file)
    text = path.read_text() if path.is_file() else ""
    missing = [old for old, _ in pairs if old not in text]
    for old, new in pairs:
        text = text.replace(old, new)
    if path.is_file():
        path.write_text(text)
    return [f"BY HAND {file}: no {old.splitlines()[0][:70]!r}" for old in missing]


def texts(recipes: list[str]) -> None:
    """Every command and text that names a preset by its path."""
    names = "|".join([*NAMES, *recipes])
    any_name = rf"(?:{names})|\{{[\w.\[\]]+\}}|NAME|PRESET"
    rules = [
        (rf"configs/({'|'.join(NAMES)})\.py:get_config", lambda m: f"configs/presets/{HERE[m[1]]}.py:{m[1]}"),
        (rf'str\(\w+ / "configs" / (f?)"({any_name})\.py', r'str(\1"\2'),
        (rf"(?<!\]\()(?<![\w./-])(?:\{{(?:REPO|PROJECT|ROOT)\}}/|(?:\$\w+/))?configs/(?:recipes/)?({any_name})\.py(?![\w])", r"\1"),
        (rf'str\((?:REPO|PROJECT|ROOT|job\.PROJECT)? ?/? ?(f?"(?:{any_name})(?::\w+)?")\)', r"\1"),
        (r"str\((?:REPO|PROJECT|job\.PROJECT|FOLDER\.parents\[1\]) / ((?:\w+(?:\(\w+\))?\.)?(?:config_path|config_file|PRESET|RECIPE|config))\)", r"\1"),
        (r"\{PROJECT / RECIPE\}", "{RECIPE}"),
    ]
    for file in subprocess.check_output(["git", "ls-files"], text=True).split("\n"):
        path = pathlib.Path(file)
        if not file or not path.is_file() or file.startswith("tests/bench/results") or path.suffix in (".png", ".svg"):
            continue
        try:
            text = new = path.read_text()
        except UnicodeDecodeError:
            continue
        for pattern, to in rules:
            new = re.sub(pattern, to, new)
        if file == "tests/configs/test_recipes.py":
            new = new.replace('{FOLDER}/{recipe}.py', '{recipe}').replace("{FOLDER}/arithmetic_smollm2.py", "arithmetic_smollm2")
            new = new.replace('f"{FOLDER}/deepscaler_qwen3_4b.py"', '"deepscaler_qwen3_4b"')
        if file in ("tests/configs/test_presets.py", "tests/configs/test_overrides.py"):
            new = new.replace('load_preset(f"{FOLDER}/{name}")', "load_preset(name)")
            new = re.sub(rf'((?:{any_name}|tiny_\{{\w+\}}))\.py(?=["{{:])', r"\1", new)
            new = new.replace('preset("schema.py")', 'overrides.load_preset(f"{FOLDER}/schema.py")')
        if new != text:
            path.write_text(wrapped(new, is_markdown=file.endswith(".md")) if path.suffix in (".py", ".md") else new)


def main() -> None:
    recipes = [p.stem for p in pathlib.Path("configs/recipes").glob("*.py") if p.stem != "__init__"]
    texts(recipes)
    notes = []
    overrides = "configs/overrides.py"
    replace_function(overrides, "load_preset", LOAD)
    replace_function(overrides, "_presets", PRESETS)
    notes += replace(overrides, ("from collections.abc import Mapping", "from collections.abc import Callable, Mapping"), ("import importlib.util\n", "import importlib\nimport importlib.util\n"))
    init = "configs/presets/__init__.py"
    notes += replace(
        init,
        ("import dataclasses\n", "import dataclasses\nfrom collections.abc import Callable\n"),
        ("import pipelinerl, roll_flash, rolloutpipe, rollpacker\n", "import pipelinerl, roll_flash, rolloutpipe, rollpacker, tiny, tpu\n"),
        ("    \"roll_flash\": roll_flash.roll_flash,\n}\n", "    \"roll_flash\": roll_flash.roll_flash,\n}\n" + TABLE),
    )
    help_file = "launch/cli_help.py"
    notes += replace(
        help_file,
        ("or NAME:tiny where it has sizes\", _configs(_CONFIGS))", "or NAME:tiny where it has sizes\", _preset_entries())"),
        ("def _configs(", HELP + "\n\ndef _configs("),
        ("import ast\n", "import ast\nimport importlib\n"),
    )
    notes += replace(
        "configs/presets/tpu.py",
        ('f"{self.preset}" if self.is_recipe else', "self.preset if self.is_recipe else"),
    )
    subprocess.run([".venv/bin/ruff", "check", "-q", "--fix", "--select", "I,F401,F541", "."], check=False)
    subprocess.run([".venv/bin/ruff", "check", "-q", "--fix", "."], check=False)
    subprocess.run([".venv/bin/ruff", "format", "-q", "."], check=True)
    subprocess.run(["git", "add", "-A"], check=True)
    print("\n".join(notes))


if __name__ == "__main__":
    sys.exit(main())
