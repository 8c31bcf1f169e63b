"""Parts of an actor that training, evaluation and checks build alike: verifiers, judge, environments."""

import contextlib
import pathlib
from collections.abc import Callable, Collection, Generator, Sequence

from actor.engine_protocol import Engine
from actor.environments.chat_render import read_rendering
from actor.environments.environment_pool import EnvironmentPool
from actor.environments.episode import Episodes
from actor.rewards.adaptive_timeout import AdaptiveTimeouts
from actor.rewards.scorer import RewardScorer
from actor.rewards.verifier_pool import VerifierPool
from actor.rewards.verifiers.judge import Judge
from actor.rewards.verifiers.judge_text import read_template
from configs.schema import Config
from launch.services.judge_server import JudgeService
from launch.supervision.placement import core_ids


def verifier_cores(config: Config) -> Sequence[int]:
    """Returns the cores that verifiers are bound to; empty: any."""
    return core_ids(config.rewards.cpu_cores) if config.rewards.cpu_cores else ()


def build_scorer(
    config: Config, judge: Judge | None, *, own: Collection[str] | None = None, anchors: AdaptiveTimeouts | None = None
) -> RewardScorer:
    """Returns what scores responses, by verifiers on their cores and by the judge."""
    pool = VerifierPool.of_config(config, own=own, cores=verifier_cores(config))
    return RewardScorer(pool, truncated=config.prompts.truncated_responses, anchors=anchors, judge=judge)


@contextlib.contextmanager
def open_judge(config: Config, log: pathlib.Path, *, beats: Callable[[], None] = lambda: None) -> Generator[Judge]:
    """The judge; one beside the engine is started before the engine, since both measure the memory left.

    Args:
      config: the run's; its judge is on.
      log: file for a server that is started.
      beats: called while it starts, some times a second.

    Raises:
      ValueError: it does not start, or the file of its key or its template can't be used.
    """
    if not config.judge.colocate:
        yield Judge(config.judge)
        return
    read_template(config.judge)  # before anything takes minutes to start
    log.parent.mkdir(parents=True, exist_ok=True)
    service = JudgeService(config.judge, log, stopped_s=config.supervision.heartbeat_timeout_s, beats=beats)
    with contextlib.closing(service):
        yield Judge(service.config, failure=lambda: service.failure)


def build_episodes(config: Config, engine: Engine, model: pathlib.Path) -> Episodes | None:
    """Returns what plays the environments of the run's prompts with the model of a folder; None where it has none."""
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
