"""Actor parts shared by training, evaluation and checks: verifiers, judge, environments, and the sandbox check."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Collection, Generator, Sequence

from actor.engine_protocol import Engine
from actor.environments.chat_render import read_rendering
from actor.environments.environment_pool import EnvironmentPool
from actor.environments.episode import Episodes
from actor.rewards.adaptive_timeout import AdaptiveTimeouts
from actor.rewards.scorer import RewardScorer
from actor.rewards.verifier_pool import VerifierPool
from actor.rewards.verifiers import code
from actor.rewards.verifiers.judge import Judge
from actor.rewards.verifiers.judge_text import read_template
from actor.sandbox import bwrap
from actor.sandbox.bwrap import HostView
from actor.sandbox.languages import LANGUAGES, program
from actor.sandbox.program import SandboxUnavailableError
from actor.sandbox.self_test import check_isolation
from configs.schema import Config
from launch.services.judge_server import JudgeService
from launch.supervision.placement import core_ids


def verifier_cores(config: Config) -> Sequence[int]:
    """Returns the cores that verifiers are bound to; empty means any."""
    return core_ids(config.rewards.cpu_cores) if config.rewards.cpu_cores else ()


def build_scorer(
    config: Config, judge: Judge | None, *, own: Collection[str] | None = None, anchors: AdaptiveTimeouts | None = None
) -> RewardScorer:
    """Returns a scorer of responses that uses the verifier pool and the judge."""
    pool = VerifierPool.of_config(config, own=own, cores=verifier_cores(config))
    return RewardScorer(pool, truncated=config.prompts.truncated_responses, anchors=anchors, judge=judge)


@contextlib.contextmanager
def open_judge(config: Config, log: pathlib.Path, *, beats: Callable[[], None] = lambda: None) -> Generator[Judge]:
    """Yields the judge, and starts its server first if it is colocated with the engine.

    The judge must start before the engine, because both measure the free GPU memory. `log` is the server's log file;
    `beats` is called several times per second while it starts. Raises ValueError if the judge does not start, or its
    key or template file is invalid.
    """
    if not config.judge.colocate:
        yield Judge(config.judge)
        return
    read_template(config.judge)  # validate it first: the server takes minutes to start
    log.parent.mkdir(parents=True, exist_ok=True)
    service = JudgeService(
        config.judge,
        log,
        stopped_s=config.supervision.heartbeat_timeout_s,
        start_timeout_s=config.supervision.start_timeout_s,
        max_restarts=config.actor.max_restarts,
        beats=beats,
    )
    with contextlib.closing(service):
        yield Judge(service.config, failure=lambda: service.failure)


def build_episodes(config: Config, engine: Engine, model: pathlib.Path) -> Episodes | None:
    """Returns the runner of the environments in the run's prompts; None if there are none."""
    if not config.environments_played:
        return None
    return Episodes(
        engine,
        EnvironmentPool(config.environments, own=config.custom_environments, names=config.environments_played),
        read_rendering(
            model,
            config.prompts.chat_template,
            config.prompts.template_settings,
            thinking_marks=config.model.thinking_marks,
        ),
        config.environments,
        max_context_tokens=config.model.max_tokens,
    )


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
