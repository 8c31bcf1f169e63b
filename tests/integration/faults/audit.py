"""The auditor: whether what a run left is that of a run that trained each group exactly once. Pure.

It knows nothing of the product's books but what they look like, and believes none of them alone: the learner's log of
what it trained is held against its metrics, its checkpoints, the database's own record of groups and tickets, and
(`replay`) against the losses of a quiet run over the very same groups.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.integration.faults import keepers
from tests.integration.faults.evidence import Evidence, Life, Update, array, body

_FORGOTTEN = "(forgotten) "
"""How the id of a row begins in which the store only counts old tickets: each of them has a row in the log before."""


@dataclasses.dataclass(kw_only=True)
class Verdict:
    """What the auditor found; all counts are 0 and nothing is said of a run that is as it should be."""

    trained_twice: int = 0
    lost: int = 0
    orphans: int = 0
    unknown_version_tokens: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    num_updates: int = 0
    num_abandoned_updates: int = 0
    """Made and thrown away by a restart from a checkpoint before them."""
    num_groups: int = 0
    num_handed_over: int = 0
    """Groups with responses that one actor began and another went on with."""
    num_tokens: int = 0
    num_lives: int = 0
    replayed: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the quiet run found (`replay`)."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.problems or self.trained_twice or self.lost or self.orphans or self.unknown_version_tokens)


def audit(evidence: Evidence, *, num_orphans: int) -> Verdict:
    """All but the replay, of a run that has ended; `num_orphans` processes of it outlived who started them."""
    history = surviving(evidence.lives)
    trained = [g for update in history for g in update.groups]
    verdict = Verdict(
        orphans=num_orphans,
        num_updates=len(history),
        num_abandoned_updates=sum(len(life.updates) for life in evidence.lives) - len(history),
        num_groups=len(set(trained)),
        num_handed_over=sum("&" in body(p)["actor"] for i, p in trained_payloads(evidence).items() if i in trained),
        num_lives=len(evidence.lives),
    )
    twice = [g for g, count in collections.Counter(trained).items() if count > 1]
    verdict.trained_twice = len(twice)
    issued = {id_ for _, id_, kind, _ in evidence.states if kind == "train" and not id_.startswith(_FORGOTTEN)}
    lost = sorted(issued - set(trained))
    verdict.lost = len(lost)
    verdict.problems += [f"trained twice: {twice[:5]}"] * bool(twice) + [f"never trained: {lost[:5]}"] * bool(lost)
    for check in (_steps, _books_of_steps, _lives, _store, _checkpoints):
        verdict.problems += check(evidence, history)
    verdict.problems += keepers.problems(evidence.ends, max_restarts=evidence.max_restarts)
    verdict.num_tokens, bad, said = _versions(evidence, set(trained))
    verdict.unknown_version_tokens += bad
    verdict.problems += said
    return verdict


def surviving(lives: Sequence[Life]) -> list[Update]:
    """The updates that are in the weights at the end: of each life those that no later one went back behind."""
    history: list[Update] = []
    for i, life in enumerate(lives):
        limit = min((later.begins_at for later in lives[i + 1 :]), default=None)
        history += [u for u in life.updates if limit is None or u.step <= limit]
    return history


def trained_payloads(evidence: Evidence) -> dict[str, bytes]:
    """The group that was trained for each ticket: the last one that came, since a trained one is asked for no more."""
    return {g.ticket_id: g.payload for g in evidence.groups if g.op == "INSERT" and g.payload is not None}


def _steps(evidence: Evidence, history: Sequence[Update]) -> Iterator[str]:
    steps = [u.step for u in history]
    if steps != list(range(1, len(steps) + 1)):
        odd = next((i, s) for i, s in enumerate(steps, 1) if i != s)
        yield f"steps are not contiguous: number {odd[0]} is step {odd[1]}"
    if evidence.finished_step != len(steps):
        yield f"the run was finished at step {evidence.finished_step}, its log has {len(steps)}"


def _books_of_steps(evidence: Evidence, history: Sequence[Update]) -> Iterator[str]:
    """metrics.jsonl, whose rows a restart takes away with the steps that it goes back behind."""
    logged = [(u.step, sorted(u.groups)) for u in history]
    booked = [(r["step"], sorted(r["groups"])) for r in evidence.rows]
    if logged != booked:
        differing = [s for (s, a), (t, b) in zip(logged, booked, strict=False) if (s, a) != (t, b)][:5]
        yield f"the log and the metrics differ: {len(logged)} and {len(booked)} steps, differing {differing}"


def _lives(evidence: Evidence, history: Sequence[Update]) -> Iterator[str]:
    for life in evidence.lives:
        if evidence.restores.get(life.incarnation) != life.begins_at:
            yield (
                f"incarnation {life.incarnation} began at step {life.begins_at}, the store was told "
                f"{evidence.restores.get(life.incarnation)}"
            )
        steps = [u.step for u in life.updates]
        if steps != list(range(life.begins_at + 1, life.begins_at + 1 + len(steps))):
            yield f"incarnation {life.incarnation} made steps {steps[:3]}... from step {life.begins_at}"
    numbers = [life.incarnation for life in evidence.lives]
    if numbers != sorted(set(numbers)):
        yield f"incarnations in the order {numbers}"


def _store(evidence: Evidence, history: Sequence[Update]) -> Iterator[str]:
    """At most one group a ticket at any time; at the end all are trained, and all that is trained is known."""
    there: set[str] = set()
    came: set[str] = set()
    for row in evidence.groups:
        if row.op == "INSERT":
            if row.ticket_id in there:
                yield f"a second group of ticket {row.ticket_id} came while the first was there"
            there.add(row.ticket_id)
            came.add(row.ticket_id)
        elif row.op == "DELETE":
            there.discard(row.ticket_id)
    trained = {g for u in history for g in u.groups}
    if unknown := sorted(trained - came):
        yield f"trained, and never in the store: {unknown[:5]}"
    states = {i: state for i, (kind, state) in evidence.tickets.items() if kind == "train"}
    if open_ := sorted(i for i, state in states.items() if state != "acknowledged"):
        yield f"not acknowledged at the end: {open_[:5]}"
    if there:
        yield f"groups left in the store: {sorted(there)[:5]}"
    if evidence.progress:
        yield f"progress left in the store: {sorted(evidence.progress)[:5]}"


def _checkpoints(evidence: Evidence, history: Sequence[Update]) -> Iterator[str]:
    if evidence.damaged_files:
        yield f"damaged checkpoint files: {evidence.damaged_files[:3]}"
    if evidence.finished_step not in evidence.checkpoints:
        yield f"no checkpoint of the last step: {sorted(evidence.checkpoints)}"
    for step, books in evidence.checkpoints.items():
        trained = [g for u in history if u.step <= step for g in u.groups]
        if books["planner"]["num_consumed"] != len(trained):
            yield f"checkpoint {step} says {books['planner']['num_consumed']} groups, the log {len(trained)}"
        if foreign := set(books["queue"]["unacknowledged"]) - set(trained):
            yield f"checkpoint {step} has groups that were not trained by then: {sorted(foreign)[:5]}"


def _versions(evidence: Evidence, trained: set[str]) -> tuple[int, int, list[str]]:
    """(trained tokens, those of a version that was never announced or of an abandoned future, what is to be said)."""
    announced = set(evidence.announcements)
    steps_of: Mapping[int, set[int]] = collections.defaultdict(set)
    for incarnation, step in announced:
        steps_of[incarnation].add(step)
    num_tokens = num_bad = 0
    said: list[str] = []
    for ticket_id, payload in trained_payloads(evidence).items():
        if ticket_id not in trained:
            continue
        group = body(payload)
        older = [(v["incarnation"], v["step"]) for v in group["older_versions"]]
        oldest = min([group["incarnation"], *(i for i, _ in older)])
        known = set().union(*(steps for i, steps in steps_of.items() if oldest <= i <= group["incarnation"]))
        said += [f"ticket {ticket_id} has tokens of {i}:{s}, never announced" for i, s in set(older) - announced]
        bad = 0
        for rollout in group["rollouts"]:
            versions = array(rollout["token_versions"])
            num_tokens += versions.size
            bad += int(np.sum(~np.isin(versions, list(known))))
            if np.any(np.diff(versions) < 0):
                said.append(f"versions go back within a sample of ticket {ticket_id}: {versions.tolist()}")
        bad += _abandoned(evidence, group)
        if bad:
            num_bad += bad
            said.append(f"{bad} tokens of ticket {ticket_id} are of no version that was announced")
    return num_tokens, num_bad, said[:20]


def _abandoned(evidence: Evidence, group: Mapping[str, Any]) -> int:
    """Counts tokens of weights that a later learner went back behind; no learner may train them after that.

    Of each incarnation in a group, by the newest step that it has of it: steps above the lowest later base step, up to
    that one. A step that two incarnations share counts if either one's is abandoned.
    """
    newest = max((int(array(r["token_versions"]).max()) for r in group["rollouts"]), default=0)
    older = [(v["incarnation"], v["step"]) for v in group.get("older_versions", ())]
    num_abandoned = 0
    bounds = [
        (min(later), step)
        for incarnation, step in (*older, (group["incarnation"], newest))
        if (later := [base for i, base in evidence.restores.items() if i > incarnation])
    ]
    for rollout in group["rollouts"]:
        versions = array(rollout["token_versions"])
        is_abandoned = [(low < versions) & (versions <= high) for low, high in bounds]
        num_abandoned += int(np.sum(np.any(is_abandoned, axis=0))) if is_abandoned else 0
    return num_abandoned
