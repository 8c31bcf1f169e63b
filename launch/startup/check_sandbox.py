"""Sandbox check: tests before a run starts if this machine can isolate programs."""

import os

from actor.rewards.verifiers import code
from actor.sandbox import bwrap
from actor.sandbox.bwrap import HostView
from actor.sandbox.languages import LANGUAGES, program
from actor.sandbox.program import SandboxUnavailableError
from actor.sandbox.self_test import check_isolation
from configs.schema import Config
from launch.supervision.placement import core_ids


def check_sandbox(config: Config) -> list[str]:
    """Returns notes on the sandboxes that the config's rewards need. Raises ValueError if they are unavailable."""
    if "code" not in config.parts:
        return []
    view = code.view_of(config.rewards)
    try:
        found = check_isolation(view=view)
    except SandboxUnavailableError as e:
        raise ValueError(f"code rewards cannot run: {e}") from e
    _check_hidden(config, view)
    there = [name for name in LANGUAGES if found.tools.issuperset(program(name, "").tools)]
    importable = f"; packages {', '.join(view.packages)}" if view.packages else ""
    notes = [f"code rewards run in sandboxes: Python {found.python_version}{importable}; languages {', '.join(there)}"]
    return notes + _crowded(config)


def _check_hidden(config: Config, view: HostView) -> None:
    """Raises ValueError if sandboxed programs could read files of the run, which contain the expected test outputs."""
    paths = {"run.dir": config.run.dir}
    for where, source in config.asked_sources.items():
        paths |= {f"{where}.path": source.path, f"{where}.eval_path": source.eval_path}
    for field, path in paths.items():
        if path and (folder := bwrap.folder_shown(view, os.path.expanduser(path))):
            raise ValueError(f"{field}={path}: sandboxed programs can read {folder}; move the file to another folder")


def _crowded(config: Config) -> list[str]:
    num_workers = config.actor.verifier_workers * config.actor.num_engines
    cores = config.rewards.cpu_cores
    num_cores = len(core_ids(cores)) if cores else len(os.sched_getaffinity(0))
    if num_workers <= num_cores:
        return []
    where = f"in rewards.cpu_cores={cores}" if cores else "on this machine"
    return [
        f"note: actor.verifier_workers={config.actor.verifier_workers}: {num_workers} workers exceed the cores {where} "
        f"({num_cores}); rewards arrive later, verdicts do not change (time limits count CPU seconds)"
    ]
