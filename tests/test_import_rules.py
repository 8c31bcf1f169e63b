"""The import rules, checked twice: by import-linter's contracts and by what imports really load.

The contracts read source, so they see an import inside a function but not what a third-party package
pulls in. The subprocess sees exactly what a process of that role would hold in memory.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("learner", "actor", "bridge", "configs", "launch")
APART = "actor.environments.builtin.verifiers_library"
"""Runs in a virtual environment of its own: its library does not go together with the engine's."""
TOOLS = (
    "launch/tools/plan",
    "launch/tools/compile_tpu",
    "launch/tools/profile_machine",
    "launch/tools/store_server",
    "launch/tools/deploy",
    "launch/ray",
    "launch/tools/evaluate",
)

# Run in a fresh interpreter: argv is a JSON object, the answer is the last line of stdout.
IMPORT_AND_REPORT = """
import fnmatch, importlib, json, pkgutil, sys, traceback
job = json.loads(sys.argv[1])
sys.path.insert(0, job["root"])

def walk(name):
    yield name
    module = sys.modules.get(name)
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        yield from walk(f"{name}.{info.name}")

problems = []
for name in walk(job["package"]):
    if (name.endswith("__main__") and name != job["package"]) or any(fnmatch.fnmatch(name, p) for p in job["skip"]):
        continue
    try:
        importlib.import_module(name)
    except Exception:
        problems.append(f"{name} does not import: {traceback.format_exc().strip().splitlines()[-1]}")
    for bad in job["forbidden"]:
        if sys.modules.get(bad) is not None:
            problems.append(f"{name} loads {bad}")
            job["forbidden"] = [f for f in job["forbidden"] if f != bad]  # blame the first module only
print(json.dumps(problems))
"""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the packages under root, with the contracts of root's pyproject.toml."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def loaded_by(root: Path, package: str, forbidden: tuple[str, ...], *, skip: tuple[str, ...] = ()) -> list[str]:
    """Imports every module of package under root in a fresh interpreter; returns the broken rules."""
    job = {"root": str(root), "package": package, "forbidden": list(forbidden), "skip": list(skip)}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_REPORT, json.dumps(job)],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def contracts() -> list[dict[str, Any]]:
    """The repository's import contracts."""
    return tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def layers() -> list[str]:
    """The folders of the modules that contracts of layers name: import-linter wants each to be there."""
    of_layers = [c for c in contracts() if c["type"] == "layers"]
    return [
        f"{container}/{name.strip(' ()')}".replace(".", "/")
        for contract in of_layers
        for container in contract["containers"]
        for layer in contract["layers"]
        for name in re.split("[|:]", layer)
    ]


def make_tree(root: Path, files: dict[str, str]) -> None:
    """Writes packages with empty rooms and the repository's own contracts, then files over them."""
    (root / "pyproject.toml").write_text((REPO / "pyproject.toml").read_text())
    for folder in (*PACKAGES, *TOOLS, *layers()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "__init__.py").touch()
    for path, text in files.items():
        (root / path.removesuffix(".py") / "__init__.py").unlink(missing_ok=True)  # a module takes its room's place
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        if "/" in path:
            (root / path).parent.joinpath("__init__.py").touch()


def folders_without_init(root: Path) -> list[str]:
    """Folders of Python files that are no package: import-linter would pass over them in silence."""
    folders = {path.parent for package in PACKAGES for path in (root / package).rglob("*.py")}
    return sorted(str(f.relative_to(root)) for f in folders if not (f / "__init__.py").exists())


def test_every_source_folder_is_a_package():
    assert folders_without_init(REPO) == []


def test_import_contracts_on_this_repository_are_kept():
    done = lint_imports(REPO)
    assert done.returncode == 0, done.stdout + done.stderr


BAD = {
    "bridge": {
        ("bridge/param_names.py", "import jax\n"): "bridge.param_names -> jax",
        ("bridge/param_names.py", "def f():\n    import configs\n"): "bridge.param_names -> configs",
    },
    "bridge-layers": {
        ("bridge/rollout_types.py", "import bridge.codec\n"): "bridge.rollout_types -> bridge.codec",
        ("bridge/store/sql/bad.py", "def f():\n    from bridge.snapshots import snapshot_writer\n"): (
            "bridge.store.sql.bad -> bridge.snapshots.snapshot_writer"
        ),
        ("bridge/of_no_layer.py", ""): "bridge.of_no_layer",
    },
    "snapshots-layers": {
        ("bridge/snapshots/shard_map/bad.py", "import bridge.snapshots.delta\n"): (
            "bridge.snapshots.shard_map.bad -> bridge.snapshots.delta"
        ),
        ("bridge/snapshots/of_no_layer.py", ""): "bridge.snapshots.of_no_layer",
    },
    "store-layers": {
        ("bridge/store/sql/worse.py", "import bridge.store.open\n"): "bridge.store.sql.worse -> bridge.store.open",
        ("bridge/store/of_no_layer.py", ""): "bridge.store.of_no_layer",
    },
    "learner": {
        ("learner/model/__init__.py", "import torch.nn\n"): "learner.model -> torch",
        ("learner/run.py", "from transformers import AutoConfig\n"): "learner.run -> transformers",
        ("learner/run.py", "from actor import loop\n"): "learner.run -> actor.loop",
    },
    "learner-layers": {
        ("learner/data/bad.py", "import learner.model\n"): "learner.data.bad -> learner.model",
        (
            "learner/objective/bad.py",
            "import learner.distributed.sharding\n",
        ): "learner.objective.bad -> learner.distributed.sharding",
        ("learner/model/bad.py", "def f():\n    from learner.update import train_step\n"): (
            "learner.model.bad -> learner.update.train_step"
        ),
        ("learner/new_room/bad.py", ""): "learner.new_room",
    },
    "actor": {
        ("actor/serving.py", "import optax\n"): "actor.serving -> optax",
        ("actor/vllm/engine.py", "import learner\n"): "actor.vllm.engine -> learner",
    },
    "vllm-room": {
        ("actor/serving.py", "import torch\n"): "actor.serving -> torch",
        ("actor/rewards/bad.py", "from vllm import SamplingParams\n"): "actor.rewards.bad -> vllm",
    },
    "actor-layers": {
        ("actor/loop.py", "from actor import background\n"): "actor.loop -> actor.background",
        (
            "actor/sandbox/bad.py",
            "def f():\n    from actor.vllm import engine\n",
        ): "actor.sandbox.bad -> actor.vllm.engine",
        ("actor/weights/bad.py", "import actor.rewards\n"): "actor.weights.bad -> actor.rewards",
        ("actor/of_no_layer.py", ""): "actor.of_no_layer",
    },
    "configs": {
        ("configs/bad.py", "import learner\n"): "configs.bad -> learner",
        ("configs/bad.py", "import jax\n"): "configs.bad -> jax",
    },
    "tools": {
        (
            "launch/tools/plan/bad.py",
            "from launch.tools.profile_machine import measure_engine\n",
        ): "launch.tools.plan.bad -> launch.tools.profile_machine",
        (
            "launch/tools/compile_tpu/bad.py",
            "def f():\n    import launch.tools.plan\n",
        ): "launch.tools.compile_tpu.bad -> launch.tools.plan",
    },
    "launch-layers": {
        ("launch/terminal/bad.py", "import launch.local\n"): "launch.terminal.bad -> launch.local",
        ("launch/of_no_layer.py", ""): "launch.of_no_layer",
    },
    "tools-apart": {
        ("launch/supervision/bad.py", "def f():\n    import launch.tools.plan\n"): (
            "launch.supervision.bad -> launch.tools.plan"
        ),
    },
}
"""Per contract, text of a file (file, text) that breaks that contract alone, and what import-linter says of it."""


def test_import_contracts_on_bad_files_are_broken_by_each_of_them_and_by_nothing_else(tmp_path):
    files: dict[str, str] = dict.fromkeys(
        ("bridge/codec.py", "bridge/snapshots/snapshot_writer.py", "learner/distributed/sharding.py"), ""
    )
    files |= dict.fromkeys(("learner/model/decoder.py", "learner/update/train_step.py"), "")
    for path, text in (bad for of_contract in BAD.values() for bad in of_contract):
        files[path] = files.get(path, "") + text
    make_tree(tmp_path, files)
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = " ".join(done.stdout.split()).split("Broken contracts")[1]
    starts = {c["id"]: report.index(f"{c['name']} --") for c in contracts()}
    for contract, start in starts.items():
        section = report[start : min((s for s in starts.values() if s > start), default=len(report))]
        said = re.findall(r"- +(\S+ -> \S+) \(l", section)
        said += re.findall(r"not listed as layers: - (\S+)", section)
        assert sorted(said) == sorted(BAD[contract].values()), section


@pytest.mark.heavy
def test_bridge_modules_load_no_framework():
    forbidden = ("jax", "flax", "grain", "optax", "orbax", "torch", "vllm", "transformers")
    assert loaded_by(REPO, "bridge", (*forbidden, "learner", "actor", "configs", "launch")) == []


@pytest.mark.heavy
def test_planning_loads_no_framework():
    # The learner's schedule runs there in virtual time: its policies are pure.
    forbidden = ("jax", "flax", "grain", "optax", "orbax", "torch", "vllm", "transformers")
    assert loaded_by(REPO, "launch.tools.plan", forbidden) == []


@pytest.mark.heavy
def test_evaluation_loads_neither_jax_nor_the_engine_before_it_starts_one():
    frameworks = ("jax", "flax", "grain", "optax", "orbax", "torch", "vllm", "transformers")
    for package in ("launch.tools.evaluate", "launch.tools.evaluate.__main__"):
        assert loaded_by(REPO, package, frameworks) == []
    assert loaded_by(REPO, "learner.evaluation", frameworks, skip=("learner.evaluation.evaluator",)) == []


def test_configs_modules_load_no_framework():
    forbidden = ("jax", "flax", "grain", "optax", "orbax", "torch", "vllm", "transformers")
    assert loaded_by(REPO, "configs", (*forbidden, "learner", "actor", "launch")) == []


@pytest.mark.heavy
def test_learner_modules_load_no_torch():
    assert loaded_by(REPO, "learner", ("torch", "vllm", "transformers", "actor", "launch")) == []


@pytest.mark.heavy
def test_actor_modules_load_neither_jax_nor_torch():
    jax_side = ("jax", "flax", "grain", "optax", "orbax", "learner", "launch")
    assert loaded_by(REPO, "actor", (*jax_side, "torch", "vllm"), skip=("actor.vllm.*", APART)) == []


@pytest.mark.integration
def test_actor_vllm_modules_load_no_jax():
    jax_side = ("jax", "flax", "grain", "optax", "orbax", "learner", "launch")
    assert loaded_by(REPO, "actor", jax_side, skip=(APART,)) == []


def test_loaded_by_indirect_and_nested_import_is_blamed_on_its_module(tmp_path):
    make_tree(
        tmp_path,
        {
            "torch.py": "",
            "third_party.py": "import torch\n",
            "learner/good.py": "",
            "learner/model/__init__.py": "",
            "learner/model/bad.py": "import third_party\n",
        },
    )
    assert loaded_by(tmp_path, "learner", ("torch", "vllm")) == ["learner.model.bad loads torch"]
