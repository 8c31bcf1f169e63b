"""Evaluations that run concurrently with training: due sets, requests in progress, and result rows.

Each set is evaluated separately, on the weights of the publish at which it became due. A set that becomes due while in
progress starts at a later publish. Only `Evaluator.wait` blocks.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence

from absl import logging

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Task, Version
from bridge.store.sql.learner_side import LearnerStore
from configs.schema import Config
from configs.sections.evaluation import HELD_OUT, EvaluationSet
from learner.evaluation import eval_summary
from learner.evaluation.eval_sets import ProblemSet
from learner.evaluation.pinned_requests import Accept, PinnedRequests, problem_number
from learner.heartbeat import live_actors
from learner.metrics.metrics_writer import MetricsWriter

Kept = Callable[[int, str, list[tuple[Group, Task]]], None]
"""Receives a step, a set's name, and its groups with their tasks in the order of the set's problems."""
LOOK_S = 0.5
"""Minimum seconds between polls while the learner waits for something else."""


def row_kind(name: str) -> str:
    """Returns the kind of a set's rows in metrics.jsonl."""
    return "eval" if name == HELD_OUT else f"eval/{name}"


def is_due(how: EvaluationSet, *, step: int, last: int | None, num_updates: int) -> bool:
    """Returns True if a set is due at a publish after `step` updates; `last` is the step of its last evaluation.

    A set is due at the start, at the first publish at or after every multiple of n steps, and at the end.
    """
    if last is None or (step == num_updates and last != step):
        return True
    every = how.every_n_steps or 0
    return every > 0 and step // every > last // every


@dataclasses.dataclass(kw_only=True)
class _Asked:
    one: ProblemSet
    pinned: PinnedRequests
    last_step: int | None
    """Step of the last evaluation that is written or in progress; None before the first."""


class Evaluator:
    """Evaluations of all sets of a run."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[ProblemSet],
        store: LearnerStore,
        *,
        stop_token_ids: tuple[int, ...],
        metrics: MetricsWriter,
        accept: Accept,
        fenced_actors: Callable[[], Collection[str]],
        on_wait: Callable[[], None],
        kept: Kept,
    ) -> None:
        """Starts no evaluation, and repeats none that `metrics`, rewound to the run's checkpoint, already contain.

        Evaluates the sets in their order. Rejects groups of `fenced_actors` and groups that `accept` rejects. Calls
        `on_wait`, which may raise, on every poll that found nothing, and `kept` after each completed evaluation.
        """
        self.waits = config.evaluation.at_publish == "wait"
        """True if a publish waits for evaluations in progress."""
        self._asked = [
            _Asked(
                one=one,
                pinned=PinnedRequests(
                    "eval",
                    store,
                    on_wait=on_wait,
                    is_exact=self.waits,
                    fenced_actors=fenced_actors,
                    name="" if one.name == HELD_OUT else one.name,
                    place=place,
                ),
                last_step=metrics.last_step(row_kind(one.name)),
            )
            for place, one in enumerate(sets)
            if one.problems
        ]
        self._config, self._store, self._stop_token_ids = config, store, stop_token_ids
        self._accept, self._metrics, self._kept = accept, metrics, kept
        self._looked_s = time.monotonic()
        self._is_settling = False

    @property
    def in_progress(self) -> bool:
        """True if any evaluation is in progress."""
        return any(a.pinned.version is not None for a in self._asked)

    def is_due(self, step: int) -> bool:
        """Returns True if a set would start now at a publish of `step`."""
        return bool(self._due(step))

    def start(self, *, version: Version, round: int) -> None:
        """Starts the due sets that are not in progress, on the published weights."""
        for asked in self._due(version.step):
            asked.last_step = version.step
            problems, sampling = asked.one.requests(self._stop_token_ids)
            asked.pinned.start(problems, sampling, version=version, round=round, limit=0)
        self._send()

    def poll(self) -> None:
        """Collects arrived groups, writes the rows of complete sets and sends more tickets; does not block."""
        self._looked_s = time.monotonic()
        for asked in self._out():
            if asked.pinned.poll(self._accept):
                self._settle(asked)
        self._send()

    def look(self) -> None:
        """Polls if `LOOK_S` has passed; safe to call often, and from within a wait for an evaluation."""
        if not self._is_settling and self.in_progress and time.monotonic() - self._looked_s >= LOOK_S:
            self.poll()

    def wait(self) -> None:
        """Blocks until all evaluations in progress are complete, and writes their rows."""
        for asked in self._out():
            asked.pinned.send()  # training is paused, so evaluations may use all slots
        for asked in self._out():
            self._settle(asked)

    def _out(self) -> list[_Asked]:
        return [a for a in self._asked if a.pinned.version is not None]

    def _due(self, step: int) -> list[_Asked]:
        return [
            a
            for a in self._asked
            if a.pinned.version is None
            and is_due(a.one.config, step=step, last=a.last_step, num_updates=self._config.run.num_updates)
        ]

    def _send(self) -> None:
        waiting = [a for a in self._out() if a.pinned.num_unsent]
        if not waiting:
            return
        bound = max_samples_out(self._config, live_actors(self._store))
        for asked in waiting:
            if bound is None:
                asked.pinned.send()
                continue
            room = bound - sum(a.pinned.num_pending for a in self._out())
            if room <= 0:
                return
            asked.pinned.send(room)

    def _settle(self, asked: _Asked) -> None:
        version, one = asked.pinned.version, asked.one
        assert version is not None
        self._is_settling = True
        try:
            groups = asked.pinned.wait(self._accept)
        finally:
            self._is_settling = False
        if not groups:
            logging.error(
                "evaluation without scored responses set=%s version=%s; see the actors' logs", one.name, version
            )
            return
        found = eval_summary.summarize(
            groups,
            num_problems=len(one.problems),
            pass_reward=one.config.pass_reward or 0.0,
            reads_answers=one.reads_answers,
        )
        metrics_of = eval_summary.held_out_metrics if one.name == HELD_OUT else eval_summary.metrics_of
        row = metrics_of(one.name, found)
        about = eval_summary.asked_of(one) | {
            "k": found.k,
            "problems": len(groups),
            "version": str(version),
            "verdicts": dict(found.verdicts),
            "notes": list(found.notes),
        }
        self._metrics.write(row_kind(one.name), version.step, row, **about)
        by_problem = sorted(((problem_number(g.ticket_id), g) for g in groups), key=lambda found: found[0])
        self._kept(version.step, one.name, [(g, one.problems[number].task) for number, g in by_problem])
        told = " ".join(f"{name}={e.value:.3f}({e.stderr:.3f})" for name, e in found.estimates.items())
        logging.info(
            "eval set=%s version=%s last_version=%d %s problems=%d left_out=%d%s",
            one.name,
            version,
            found.last_step,
            told,
            len(groups),
            found.num_left_out,
            "".join(f"; {note}" for note in found.notes),
        )


def max_samples_out(config: Config, actors: Sequence[Heartbeat]) -> int | None:
    """Returns the maximum number of evaluation samples in progress, or None if unlimited.

    The maximum is a share of the live actors' slots. Until an actor reports its engine, the config's engines count.
    """
    share = config.evaluation.max_engine_fraction
    if share == 1:
        return None
    places = sum(beat.report.max_sequences for beat in actors if beat.report is not None)
    return max(1, math.floor(share * (places or config.actor.num_engines * config.actor.max_num_seqs)))
