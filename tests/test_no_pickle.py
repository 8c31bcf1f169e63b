"""No pickle anywhere: loading one runs whatever code its sender put in."""

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("learner", "actor", "bridge", "configs", "launch")
FORBIDDEN_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Functions that unpickle, by full name.
FORBIDDEN_NAMES = {"torch.load", "torch.serialization.load", "pandas.read_pickle"}


def dotted_name(node: ast.expr) -> str | None:
    """The dotted text of a name or attribute chain, or None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return None


def import_aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported local name stands for: `import torch as t` gives {"t": "torch"}."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
    return aliases


def forbidden_use(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Says what is forbidden about this one node, if anything is."""
    if isinstance(node, ast.Import):
        modules = [name.name for name in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        modules = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    elif isinstance(node, ast.Call) and dotted_name(node.func) in {
        "__import__",
        "import_module",
        "importlib.import_module",
    }:
        modules = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    else:
        modules = []
    for module in modules:
        if FORBIDDEN_MODULES & set(module.split(".")):
            return f"imports {module}"
        if module in FORBIDDEN_NAMES:
            return f"uses {module}"
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            never = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "allow_pickle" and not never:
                return "passes allow_pickle"
    if isinstance(node, ast.Name | ast.Attribute) and (name := dotted_name(node)):
        head, _, rest = name.partition(".")
        full = f"{aliases.get(head, head)}.{rest}".rstrip(".")
        # A module reached through another one (`torch.serialization.pickle`) or a function that unpickles.
        if head in aliases and (full in FORBIDDEN_NAMES or FORBIDDEN_MODULES & set(full.split("."))):
            return f"uses {full}"
    return None


def pickle_uses(root: Path) -> list[str]:
    """Every import or use of pickle in the packages under root, as `path:line: what`."""
    found = set()
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        aliases = import_aliases(tree)
        for node in ast.walk(tree):
            if what := forbidden_use(node, aliases):
                found.add(f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}: {what}")
    return sorted(found)


@pytest.mark.heavy
def test_source_has_no_pickle():
    assert pickle_uses(REPO) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\n",
        "import os, pickle as p\n",
        "from pickle import loads\n",
        "from multiprocessing.reduction import pickle\n",
        "def f():\n    import cloudpickle.cloudpickle\n",
        "import dill\n",
        "import shelve\n",
        "import marshal\n",
        "import joblib\n",
        "import importlib\nimportlib.import_module('pickle')\n",
        "__import__('marshal')\n",
        "import torch\ntorch.load('x', weights_only=True)\n",
        "import torch as t\nload = t.load\n",
        "from torch import load\n",
        "import torch\ntorch.serialization.pickle.loads(b'')\n",
        "import numpy as np\nnp.load('x', allow_pickle=True)\n",
        "import numpy as np\nnp.load('x', allow_pickle=flag)\n",
    ],
)
def test_pickle_uses_in_a_bad_file_is_found(tmp_path, text):
    (tmp_path / "bridge" / "deep").mkdir(parents=True)
    (tmp_path / "bridge" / "deep" / "bad.py").write_text(text)
    found = pickle_uses(tmp_path)
    assert found and all(line.startswith("bridge/deep/bad.py:") for line in found)


def test_pickle_uses_in_a_good_file_finds_nothing(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "good.py").write_text(
        '"""Never uses pickle."""\n'
        "import json\nimport numpy as np\nimport torch\nfrom safetensors.torch import load_file\n"
        "np.load('x', allow_pickle=False)\njson.load(open('x'))\ntorch.zeros(1)\npickle_free = True\n"
    )
    assert pickle_uses(tmp_path) == []
