"""What no rule covers: exact replacements in the moved tree, and the docstrings of new rooms."""

import pathlib

ROOMS = {
    "configs/presets/__init__.py": "",
    "launch/startup/__init__.py": '"""Everything between the command line and the first process, or the first ticket."""\n',
    "launch/services/__init__.py": '"""Server processes beside a run."""\n',
    "launch/console/__init__.py": '"""Output of a run for people: progress, summary, what follows a run."""\n',
    "launch/tools/__init__.py": '"""Commands that a run does not need."""\n',
    "launch/tools/plan/sim/__init__.py": '"""The simulation of a run in virtual time."""\n',
}

PATCHES: list[tuple[str, str, str]] = [
    ("launch/services/snapshot_server.py", """Serves a run's snapshots to other machines: `python -m launch.services.snapshot_server --folder=FOLDER""", """Serves a run's snapshots: `python -m launch.services.snapshot_server --folder=FOLDER"""),
    ("launch/supervision/kubernetes_probe.py", "A cluster's look at a learner or an actor: `python", "A look at a learner or an actor: `python"),
    ("launch/tools/write_code_tasks.py", "Writes a file of small functions to write, for verifier=code: `", "Writes rows for verifier=code: `"),
    ("learner/objective/check_custom.py", "Tries a user's own loss and advantage on a few tokens: `python", "Tries a user's own loss and advantage: `python"),
    ("launch/tools/store_server.py", "A PostgreSQL store for a trial: `python -m", "A trial store: `python -m"),
    ("launch/tools/check_config.py", "Tries a config's flags: `python", "Tries flags: `python"),
    ("learner/update/diagnostics.py", "The numbers of an update by their names in `learner/metrics/metric_names.py`, and `real_tokens` for the loop's use.", "The numbers of an update by their names in `metrics/metric_names.py`, and `real_tokens` for the loop."),
    ("bridge/weight_types.py", "By host. That they are all there and none overlaps is checked by who reads them (`", "By host. Readers check that they are all there and none overlaps (`"),
    ("launch/tools/plan/control_plane/loads.py", "token, logprob and version of 4 bytes each, loss mask (`bridge/rollout_types.py:Rollout`)", "token, logprob and version of 4 bytes each, loss mask (`Rollout`)"),
    ("learner/data/prompt_stream.py", "Epochs, rows set aside, and of a mixture each source's share and mean reward (`learner/metrics/metric_names.py`).", "Epochs, rows set aside, and of a mixture each source's share and mean reward (`metric_names.py`)."),
    ("tests/bench/learner/shapes.py", "The update's micro-batches, as `learner.schedule.rollout_stream` makes", "The update's micro-batches, as `rollout_stream` makes"),
    ("launch/supervision/kubernetes_probe.py", "--pulse=FILE [bounds]`; 0: it lives, 3: it hangs", "--pulse=FILE`; 0: alive, 3: hangs"),
    ("actor/rewards/registry.py", '"code": "actor.rewards.verifiers.code"', '"code": "actor.rewards.verifiers.code:score"'),
    ("actor/rewards/registry.py", '"exact": "actor.rewards.verifiers.text_match"', '"exact": "actor.rewards.verifiers.text_match:score_exact"'),
    ("actor/rewards/registry.py", '"format": "actor.rewards.verifiers.text_match"', '"format": "actor.rewards.verifiers.text_match:score_format"'),
    ("actor/rewards/registry.py", '"math": "actor.rewards.verifiers.math"', '"math": "actor.rewards.verifiers.math:score"'),
    ("actor/rewards/registry.py", '"reasoning_gym": "actor.rewards.verifiers.reasoning_gym"', '"reasoning_gym": "actor.rewards.verifiers.reasoning_gym:score"'),
    ("actor/rewards/registry.py", "Each has a function `score` that takes a response", "Each is a function that takes a response"),
    ("actor/rewards/registry.py", "    return _scored(importlib.import_module(MODULES[name]).score)", '    module, function = MODULES[name].split(":")\n    return _scored(getattr(importlib.import_module(module), function))'),
    ("actor/rewards/registry.py", "importlib.import_module(MODULES[name]).prepare(settings)", 'importlib.import_module(MODULES[name].partition(":")[0]).prepare(settings)'),
    ("actor/sandbox/bwrap.py", '("runner", "case", "clock", "files", "watch", "frames", "harness")', '("runner", "case", "workspace", "frames", "harness")'),
    ("launch/startup/build_actor.py", "def verifier_cores(config: Config) -> Sequence[int]:\n", 'def verifier_cores(config: Config) -> Sequence[int]:\n    """The cores that verifiers\' workers are bound to; none: they are not bound."""\n'),
    ("launch/startup/build_actor.py", "def elastic_share(config: Config, size: EngineSize, file: LimitsFile) -> ElasticShare:\n", 'def elastic_share(config: Config, size: EngineSize, file: LimitsFile) -> ElasticShare:\n    """The rule by which an engine gives devices up or takes them back."""\n'),
    ("launch/services/tracker_service.py", '"tracker %s: %d rows are not there (%s); python -m launch.services.track --run_dir=%s --tracker=%s sends them",', '"tracker %s: %d rows are not there (%s); "\n                "python -m launch.services.track --run_dir=%s --tracker=%s sends them",'),
    ("launch/tools/deploy/deploy_settings.py", '(launch/tools/deploy/sandbox_seccomp.json on the nodes) or --sandbox_runtime=RUNTIME_CLASS (docs/deploy.md)"', '(launch/tools/deploy/sandbox_seccomp.json on the nodes) or --sandbox_runtime=RUNTIME_CLASS "\n            "(docs/deploy.md)"'),
    ("launch/tools/compile_tpu/compile_worker.py", "`python -m launch.tools.compile_tpu.compile_worker ANSWER < JOB`, both JSON. The job holds `config`, `model` (a config.json) and\n`topology`; the", "`python -m launch.tools.compile_tpu.compile_worker ANSWER < JOB`, both JSON. The job holds `config`, `model` (a\nconfig.json) and `topology`; the"),
    ("launch/tools/profile_machine/cli.py", "reads the result; edit it to plan for other numbers of engines and chips or other\nlengths. With", "reads the result; edit it to plan for other numbers of engines and chips\nor other lengths. With"),
    ("launch/tools/deploy/cli.py", "--target=kubernetes --out=FOLDER [--learner=v5p ...]", "--target=kubernetes --out=FOLDER [--learner=v5p]"),
    ("tests/bench/cluster/__main__.py", "From that alone the planner predicted \"", "From that the planner predicted \""),
    ("tests/bench/presets/cases.py", '"""Every preset that comes in sizes: the modules of `configs` whose `get_config` takes one."""', '"""Every preset that comes in sizes."""'),
    ("tests/bench/presets/cases.py", """    names = sorted(path.stem for path in pathlib.Path(configs.__path__[0]).glob("*.py"))
    modules = {name: importlib.import_module(f"configs.{name}") for name in names if name != "__init__"}
    return [
        name
        for name, module in modules.items()
        if hasattr(module, "get_config") and "size" in inspect.signature(module.get_config).parameters
    ]
""", """    return sorted(configs.presets.PRESETS)
"""),
    ("tests/bench/presets/cases.py", "import configs\n", "import configs.presets\n"),
    ("tests/bench/planner/rolloutpipe.py", '{"serial": rolloutpipe, "cgp": rolloutpipe, "cgp_fgd": rolloutpipe}[name].get_config("paper")', '{"serial": rolloutpipe.serial, "cgp": rolloutpipe.cgp, "cgp_fgd": rolloutpipe.rolloutpipe}[name]("paper")'),
    ("bridge/store/postgres/tables_and_roles.py", 'have an administrator run what `python -m bridge.store.postgres.tables_and_roles` "', 'have an administrator run what "\n                    f"`python -m bridge.store.postgres.tables_and_roles` "'),
    ("launch/tools/deploy/deploy_settings.py", "launch/tools/deploy/sandbox_seccomp.json on the nodes, a path below the kubelet's seccomp.", "launch/tools/deploy/sandbox_seccomp.json on the nodes, a path below seccomp/."),
    ("tests/bench/math_forms.py", '{num_wrong} of them wrong, judged by hand",\n        f"before', '{num_wrong} wrong, judged by hand",\n        f"before'),
    ("launch/scripts.py", '"samples.command"', '"tools.samples"'),
    ("launch/scripts.py", '"report.__main__"', '"tools.report.__main__"'),
    ("launch/scripts.py", '_command("runs")', '_command("tools.runs")'),
    ("launch/scripts.py", '"evaluate.command"', '"tools.evaluate.cli"'),
    ("launch/scripts.py", '"plan.command"', '"tools.plan.cli"'),
    ("launch/scripts.py", '"profile_machine.command"', '"tools.profile_machine.cli"'),
    ("launch/scripts.py", '"compile_tpu.command"', '"tools.compile_tpu.cli"'),
    ("launch/scripts.py", '"deploy.command"', '"tools.deploy.cli"'),
    ("launch/scripts.py", '"ray.command"', '"ray.cli"'),
    ("launch/scripts.py", '"store_server.command"', '"tools.store_server"'),
    ("launch/scripts.py", '"make_certificates"', '"tools.make_certificates"'),
    ("launch/scripts.py", '"get_model.command"', '"tools.get_model"'),
    ("launch/scripts.py", '_command("write_tasks"', '_command("tools.write_tasks"'),
    ("docs/site/commands.py", """    modules = (f.stem for f in _LAUNCH.glob("*.py") if 'if __name__ == "__main__"' in f.read_text())
    rooms = (f.parent.name for f in _LAUNCH.glob("*/__main__.py"))
    return sorted({*modules, *rooms} - _NOT_FOR_HANDS)
""", """    folders = (_LAUNCH, *(_LAUNCH / room for room in ("services", "supervision", "tools")))
    files = [f for folder in folders for f in folder.glob("*.py") if 'if __name__ == "__main__"' in f.read_text()]
    rooms = [f.parent for folder in (_LAUNCH, _LAUNCH / "tools") for f in folder.glob("*/__main__.py")]
    found = {str(f.relative_to(_LAUNCH).with_suffix("")).replace("/", ".") for f in [*files, *rooms]}
    return sorted(n for n in found if n.rpartition(".")[2] not in _NOT_FOR_HANDS)
"""),
    ("docs/site/commands.py", '_NOT_FOR_HANDS = {"judge_server"', '_NOT_FOR_HANDS = {"gguf", "judge_server"'),
    ("docs/site/reference.py", '("learner.objective.advantages", "learner.objective.advantages")', '("learner.objective.advantages",)'),
    ("docs/site/reference.py", '("learner.objective.losses", "learner.objective.losses", "learner', '("learner.objective.losses", "learner'),
    ("tests/test_import_rules.py", '("bridge/store/bad.py"', '("bridge/store/sql/bad.py"'),
    ("tests/test_import_rules.py", '"actor/rewards/__init__.py").unlink', '"actor/rewards/verifiers/__init__.py").unlink'),
    ("tests/test_import_rules.py", '== ["actor/rewards"]', '== ["actor/rewards/verifiers"]'),
    ("tests/test_docs.py", "learner/metrics/metric_names.py: MetricsWriter has no wrote", "learner/metrics/metrics_writer.py: MetricsWriter has no wrote"),
    ("tests/test_import_rules.py", '"launch/tools",', '"launch/tools/store_server",'),
    ("tests/test_import_rules.py", '"from actor import duties', '"from actor import background'),
    ("pyproject.toml", 'include = ["learner", "actor", "bridge", "configs", "launch", "tests"]', 'include = ["learner", "actor", "bridge", "configs", "launch", "docs/site", "tests"]'),
    ("mkdocs.yml", "use_directory_urls: false", "exclude_docs: site/\nuse_directory_urls: false"),
    ("pyproject.toml", 'known-first-party = ["learner", "actor", "bridge", "configs", "launch", "tests"]', 'known-first-party = ["learner", "actor", "bridge", "configs", "launch", "docs", "tests"]'),
]
"""Of a new file: text, and what takes its place. Text that is not there is reported."""
found: set[str] = set()


def on(file: str, text: str) -> str:
    """The text of a Python file with its patches."""
    for of, old, new in PATCHES:
        if of == file and old in text:
            found.add(f"{of}: {old}")
            text = text.replace(old, new)
    return text


def apply(plan) -> list[str]:
    """Patches of files that are no Python; returns what was not found."""
    for file, old, _ in PATCHES:
        path = pathlib.Path(file)
        if not file.endswith(".py") and path.is_file() and old in path.read_text():
            path.write_text(on(file, path.read_text()))
    return [f"BY HAND {f}: no {old.splitlines()[0][:60]!r} to replace" for f, old, _ in PATCHES if f"{f}: {old}" not in found]
