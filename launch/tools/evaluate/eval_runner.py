"""Evaluation run: engine, problems, and scoring through `actor.serving`."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from actor.engine_protocol import Sample
from actor.environments.protocol import EpisodeError
from actor.responses import ResponseReader
from actor.rewards.scorer import RewardScorer
from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierError
from actor.rewards.verifiers.judge import Judge
from actor.sampling import Sampler
from actor.serving import MAX_ATTEMPTS, Member, build_group
from actor.weights.model_folder import tensor_table
from bridge.rollout_types import Group, Ticket, Version
from bridge.timeline import Timeline
from configs.run_folder import RunFolder
from configs.schema import Config
from launch.startup.build_actor import build_episodes, build_scorer
from launch.supervision.placement import bind_to_cores, core_ids
from launch.terminal import make_console
from launch.tools.evaluate import settings
from learner.data.open_sources import held_out_of, open_sources
from learner.data.problem import Problem
from learner.data.row_filter import read_gold_failures
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.evaluation.eval_sets import ProblemSet, all_sets, open_own_sets
from learner.evaluation.pinned_requests import pinned_tickets

if TYPE_CHECKING:
    from actor.vllm.engine import VllmEngine


@dataclasses.dataclass(frozen=True)
class EvalProblems:
    """Problem sets to evaluate, and the model's tokenizer."""

    sets: list[ProblemSet]
    tokenizer: Tokenizer


def open_problems(config: Config, model: pathlib.Path, run: RunFolder | None = None) -> EvalProblems:
    """Opens all sets of the config; prints the number of problems and of quarantined rows per set.

    Rows of `run` with a wrong reference answer are no held-out problems. Raises ValueError if a source or the tokenizer
    is invalid, or a set is empty.
    """
    vocab_size = settings.model_number(model, "vocab_size")
    tokenizer = load_tokenizer(model, vocab_size=vocab_size, template=config.prompts.template_settings)
    own = open_own_sets(config, tokenizer)
    for looked_at in [found for one in own.values() for found in one.looked_at]:
        looked_at.check_num_bad(config.prompts.max_bad_share)
    held_out: list[Problem] = []
    if any(not how.has_source for how in config.evaluation_sets.values()):
        failures = None if run is None else read_gold_failures(run.gold_failures)
        sources = open_sources(config, tokenizer, gold_failures=failures)
        held_out = held_out_of(sources)
    sets = all_sets(config, own, held_out)
    for one in sets:
        if not one.problems:
            raise ValueError(f"evaluation set {one.name} has no problems")
        how = one.config
        print(
            f"{one.name}: {len(one.problems)} problems, {how.k} samples each, temperature {how.temperature:g}, at most "
            f"{how.max_tokens} tokens",
            flush=True,
        )
        if one.bad:
            first = one.bad[0]
            print(
                f"warning: {len(one.bad)} rows of {one.name} quarantined; row {first.row}: {first.reason}", flush=True
            )
    return EvalProblems(sets, tokenizer)


LINE_S = 15.0
"""Interval between progress lines without a terminal, in seconds."""


class Progress:
    """Progress over all sets, in samples; `totals` are the samples per set."""

    def __init__(
        self, totals: Mapping[str, int], *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._totals, self._clock = dict(totals), clock
        self._console = console or make_console()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}  {task.fields[rate]} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._name, self._num_done, self._rewards = "", 0, np.zeros(2)
        self._started_s = self._said_s = clock()
        self.num_tokens = 0
        """Cumulative sampled tokens of finished groups."""
        self.seconds = 0.0
        """Seconds from the first request to the end."""

    def __enter__(self) -> "Progress":
        self._started_s = self._said_s = self._clock()
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = round(self._clock() - self._started_s, 3)
        self._bars.stop()

    def say(self, line: str) -> None:
        """Prints a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, name: str) -> None:
        """Begins a set."""
        self._name, self._num_done, self._rewards = name, 0, np.zeros(2)
        self._task = self._bars.add_task(name, total=self._totals[name], reward="-", rate="-")

    def done(self, ticket: Ticket, group: Group | None) -> None:
        """Records a problem with its group, or None if it was not scored."""
        self._num_done += ticket.num_samples
        if group is not None:
            self.num_tokens += sum(int(np.count_nonzero(r.loss_mask)) for r in group.rollouts)
            self._rewards += [sum(r.reward for r in group.rollouts), len(group.rollouts)]
        reward = f"{self._rewards[0] / self._rewards[1]:.3f}" if self._rewards[1] else "-"
        rate = f"{self.num_tokens / max(self._clock() - self._started_s, 1e-9):,.0f}"
        if self._task is not None:
            self._bars.update(self._task, completed=self._num_done, reward=reward, rate=rate)
        is_last = self._num_done == self._totals[self._name]
        if not self._console.is_terminal and (is_last or self._clock() - self._said_s >= LINE_S):
            self._said_s = self._clock()
            total = self._totals[self._name]
            self.say(f"{self._name}: {self._num_done}/{total} samples, reward {reward}, {rate} tokens/s")


ACTOR = "evaluation"


class Runner:
    """Runner of tickets with a bounded number of concurrent samples.

    A ticket whose responses cannot be scored is tried `max_attempts` times.
    """

    def __init__(
        self,
        sampler: Sampler,
        rewards: RewardScorer,
        *,
        read: Callable[[Ticket, Sample], Response],
        places: int,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self._sampler, self._rewards, self._read = sampler, rewards, read
        self._places = asyncio.Semaphore(places)
        self._num_at_once = places + 1
        """Maximum concurrent tickets: enough to fill all slots even with one sample per ticket."""
        self._max_attempts = max_attempts

    async def run(self, tickets: Sequence[Ticket], *, done: Callable[[Ticket, Group | None], None]) -> list[Group]:
        """Returns the groups of all tickets in order, without tickets that failed.

        Raises ExceptionGroup for errors that no ticket caused (EngineDeadError).
        """
        waiting = iter(tickets)
        groups: dict[str, Group] = {}

        async def work() -> None:
            for ticket in waiting:
                group = await self._serve(ticket)
                if group is not None:
                    groups[ticket.id] = group
                done(ticket, group)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._num_at_once, len(tickets))):
                workers.create_task(work())
        return [groups[t.id] for t in tickets if t.id in groups]

    async def _serve(self, ticket: Ticket) -> Group | None:
        for attempt in range(self._max_attempts):
            try:
                return await self._attempt(ticket)
            except* (VerifierError, EpisodeError) as e:
                error = e.exceptions[0]
                logging.error("problem not scored ticket=%s attempt=%d reason=%s", ticket.id, attempt, error)
            if isinstance(error, EpisodeError) and error.is_final:
                break
        return None

    async def _attempt(self, ticket: Ticket) -> Group:
        started_s, started = time.time(), time.monotonic()
        members: dict[int, Member] = {}

        async def sample(index: int) -> None:
            async with self._places:
                made = await self._sampler.sample(ticket, index)
            response = self._read(ticket, made)
            members[index] = (made, await self._rewards.score(response, ticket.task), response)

        async with asyncio.TaskGroup() as samples:
            for index in range(ticket.num_samples):
                samples.create_task(sample(index))
        finished_s = started_s + time.monotonic() - started
        return build_group(ticket, members, actor=ACTOR, started_s=started_s, finished_s=finished_s)


def tickets_of(one: ProblemSet, *, version: Version, stop_token_ids: tuple[int, ...], place: int) -> list[Ticket]:
    """Returns the tickets of a set; `place` is the index of the set."""
    problems, sampling = one.requests(stop_token_ids)
    return pinned_tickets("eval", problems, sampling, version=version, round=0, name=one.name, place=place)


def leaves(error: BaseException) -> list[str]:
    """Returns the error's message, or the messages of all errors in a group."""
    if isinstance(error, BaseExceptionGroup):
        return [said for one in error.exceptions for said in leaves(one)]
    return [str(error) or type(error).__name__]


def start_engine(model: pathlib.Path, config: Config, *, seed: int) -> "VllmEngine":
    """Starts the engine with the folder's own weights; may take minutes."""
    if config.actor.cpu_cores:
        bind_to_cores(core_ids(config.actor.cpu_cores))
    if config.actor.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.actor.devices.partition(";")[0]
    from actor.vllm.engine import VllmEngine  # import vLLM only after the input is validated

    table = tensor_table(model, dtype=config.model.served_dtype)
    return VllmEngine.start(model, config, expected=table, has_own_weights=True, seed=seed)


async def evaluate_all(
    config: Config,
    problems: EvalProblems,
    engine: "VllmEngine",
    timeline: Timeline,
    judge: Judge | None,
    version: Version,
    progress: Progress,
) -> dict[str, list[Group]]:
    """Evaluates all sets, one after another; returns the groups per set, and always closes the engine.

    `version` names the engine's own weights in tickets. Raises ExceptionGroup for errors that no problem caused
    (EngineDeadError).
    """
    tokenizer = problems.tokenizer
    async with contextlib.AsyncExitStack() as parts:
        parts.push_async_callback(engine.close)
        await engine.serve_own_weights(version)
        rewards = build_scorer(config, judge)
        parts.push_async_callback(rewards.close)
        episodes = build_episodes(config, engine, pathlib.Path(config.model.path))
        if episodes is not None:
            parts.push_async_callback(episodes.close)
        runner = Runner(
            Sampler(engine, timeline=timeline, max_lag_steps=None, episodes=episodes),
            rewards,
            read=ResponseReader(tokenizer.backend, tokenizer.chat, thinking_marks=config.model.thinking_marks),
            places=max(config.actor.max_num_seqs, config.environments.max_in_flight),
        )
        groups: dict[str, list[Group]] = {}
        for place, one in enumerate(problems.sets):
            tickets = tickets_of(one, version=version, stop_token_ids=tokenizer.stop_token_ids, place=place)
            progress.begin(one.name)
            groups[one.name] = await runner.run(tickets, done=progress.done)
        return groups
