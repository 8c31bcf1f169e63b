"""A run in one thread, driven by a random number generator: real planner, arrival policy, stream and SQLite store.

Actors, engines and crashes are simulated. Every token carries the version of the weights that made it, and every sample
a number of its own as its tokens, so what is trained is held against what was sampled and not against what a group says
of itself. Learners crash at any moment, resume from their last committed checkpoint, and train on under the next
incarnation; actors crash, forget their leases, hand in late, fail to judge, and hear of new weights late.
"""

import collections
import contextlib
import dataclasses
import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from bridge.rollout_types import Group, Version
from configs import schema
from learner.schedule.rollout_stream import RolloutStream, encode_tickets
from learner.schedule.sample_tickets import group_id
from learner.schedule.ticket_ledger import training_sampling
from tests.bench.schedules.engine import LEASE_S, Engine
from tests.learner.schedule.fakes import Marks, Problems, RestlessStore

MAX_CRASHES = 6
"""Crashes of the learner in one schedule: with many, a long round would never reach a checkpoint."""
MAX_TICKS_PER_UPDATE = 4000
VOCAB = 2**30
"""Numbers of samples are their token ids."""


class CrashError(Exception):
    """The learner's process died."""


@dataclasses.dataclass
class Findings:
    """Violations and events of one schedule; of a right one the first nine are 0."""

    trained_twice: int = 0
    lost: int = 0
    abandoned_groups: int = 0
    """Trained with a token of weights that a later learner went back behind."""
    over_lag_bound: int = 0
    wrong_groups: int = 0
    """Trained with other samples or another prompt than their tickets asked for."""
    fenced_groups: int = 0
    """Trained after an actor of them was fenced."""
    stood_still: int = 0
    stale_groups: int = 0
    """Dropped as stale, where no other prompt of a race can take their place."""
    doomed_restarts: int = 0
    """Samples restarted although a stale one of their ticket had ended, so that the group would be dropped."""
    restarts: int = 0
    """Samples restarted because they were stale."""
    restarted_tickets: int = 0
    """Tickets begun anew whole, because a sample of theirs that had ended was stale."""
    learner_crashes: int = 0
    actor_crashes: int = 0
    dropped: int = 0
    trained: int = 0

    def add(self, other: "Findings") -> None:
        """Adds another schedule's."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class World:
    """Learner lives one after the other over one store, and engines that do something whenever a learner looks."""

    def __init__(self, folder: str, config: schema.Config, seed: int, *, crashes: float, ess_stops: float) -> None:
        """`crashes` and `ess_stops` are probabilities per tick and per full update."""
        self.config, self.rng = config, random.Random(seed)
        self.now_s = 1000.0
        self.shared = RestlessStore(f"{folder}/store.db", clock=lambda: self.now_s)
        self.crashes, self.ess_stops = crashes, ess_stops
        self.failing = self.rng.choice([0.0, 0.0, 0.05, 0.3])
        self.findings = Findings()
        self.bases: dict[int, int] = {}
        self.announced: Any = None
        self.actors: dict[str, frozenset[str]] = {}
        """Actors of each group that was handed out last for a ticket."""
        self.versions: dict[int, tuple[Version, ...]] = {}
        """Of each sample's tokens, by its number."""
        self.num_samples = self.num_names = self.num_ticks = 0
        self.engines: list[Engine] = []
        for _ in range(2):
            self.join()
        self.history: list[tuple[int, list[str]]] = []
        """Updates that survive: step made, groups trained."""
        self.checkpoint: tuple[int, str] | None = None

    @property
    def _crash_rate(self) -> float:
        return self.crashes if self.findings.learner_crashes < MAX_CRASHES else 0.0

    def next_number(self) -> int:
        """A new sample's."""
        self.num_samples += 1
        return self.num_samples

    def draw_length(self) -> int:
        """Tokens of a response; a few take far longer than the others."""
        return 8 if self.rng.random() < 0.15 else self.rng.randint(1, 4)

    def join(self) -> None:
        """Another engine comes."""
        self.num_names += 1
        self.engines.append(Engine(f"a{self.num_names}", self))

    def replace(self, engine: Engine) -> None:
        """An engine is fenced for good; another one comes in its place."""
        if engine in self.engines:
            self.engines.remove(engine)
            self.join()

    def run(self, num_updates: int) -> None:
        """Lives until so many updates are made, and looks at what is left."""
        while not self.history or self.history[-1][0] < num_updates:
            with contextlib.suppress(CrashError):
                self._live(num_updates)
        self._look_at_the_end()

    def tick(self) -> None:
        """One thing that may happen at any time."""
        self.num_ticks += 1
        self.now_s += 0.05
        if self.num_ticks > self.max_ticks:
            raise AssertionError("stood still")
        rng = self.rng
        if rng.random() < self._crash_rate:
            raise CrashError
        engine, what = rng.choice(self.engines), rng.random()
        if engine.version is None or what < 0.12:
            engine.take_weights()
        elif what < 0.12 + 4 * self.crashes:
            self._crash(engine)
        elif what < 0.2:
            engine.follow_leases()
        elif what < 0.4 or not engine.serving:
            engine.claim()
            if rng.random() < 0.1:
                engine.beat()
        else:
            engine.sample()

    def _crash(self, engine: Engine) -> None:
        self.findings.actor_crashes += 1
        how = self.rng.random()
        held = [*engine.serving, *(t.id for t in engine.admission.waiting)]
        if how < 0.2:  # it was away for long: its leases are over, and it does not know
            self.now_s += LEASE_S
            return
        if how < 0.6:  # one in its place gives back what it held
            self.shared.release(engine.name, held)
        engine.start_over()

    def _live(self, num_updates: int) -> None:
        """A learner's life, from its last committed checkpoint on."""
        try:
            self._train(num_updates)
        except CrashError:
            self.findings.learner_crashes += 1
            self._book_drops()
            raise

    def _train(self, num_updates: int) -> None:
        config, step = self.config, 0 if self.checkpoint is None else self.checkpoint[0]
        self.history = [(s, groups) for s, groups in self.history if s <= step]
        self.incarnation = self.shared.acquire_leadership("here", lease_s=1e9)
        self.bases[self.incarnation] = step
        self.shared.record_restore(self.incarnation, step)
        self.max_ticks = self.num_ticks + MAX_TICKS_PER_UPDATE
        marks: Any = Marks()
        self.stream = stream = RolloutStream(
            config,
            store=self.shared,
            prompts=Problems(2),
            sampling=training_sampling(config, ()),
            timeline=marks,
            incarnation=self.incarnation,
            vocab_size=VOCAB,
            step=step,
            on_wait=self.tick,
        )
        stream._served._clock = lambda: self.now_s
        self._spy()
        stream.resume(None if self.checkpoint is None else json.loads(self.checkpoint[1]))
        self._publish(step)
        batches, groups = stream.micro_batches(), []
        while stream.step < num_updates:
            micro = next(batches)
            groups += micro.ticket_ids
            for _ in range(self.rng.randrange(6)):  # the learner computes
                self.tick()
            stream.poll()
            if not micro.ends_update:
                continue
            if stream.group_filter.fresh_from is None and self.rng.random() < self.ess_stops:
                stream.drop_update()
                if self.announced.version.step != stream.step:  # as the learner's loop does
                    self._publish(stream.step)
                groups = []
                continue
            self._fence()
            if stream.has_fenced_groups:
                stream.drop_update(needs_fresh=False)
                groups = []
                continue
            stream.end_update()
            self.findings.fenced_groups += sum(not stream.fenced_actors.isdisjoint(self.actors[g]) for g in groups)
            self.max_ticks = self.num_ticks + MAX_TICKS_PER_UPDATE
            self.history.append((stream.step, groups))
            groups = []
            publish = config.publish
            if micro.ends_round if publish.when == "round_end" else stream.step % publish.every_n_steps == 0:
                self._publish(stream.step)
            self._fence()
            if publish.when == "every" or micro.ends_round:
                self._save()
        self._book_drops()

    def _fence(self) -> None:
        if self.rng.random() < 0.02 and len(self.engines) > 1:
            self.stream.fence(self.rng.choice(self.engines).name, "off")

    def _publish(self, step: int) -> None:
        version = Version(incarnation=self.incarnation, step=step)
        bases = tuple(Version(incarnation=i, step=s) for i, s in self.bases.items())
        self.announced = SimpleNamespace(version=version, base_steps=bases)

    def _save(self) -> None:
        if self.rng.random() < 0.5:
            return
        step, host_state = self.stream.step, json.dumps(encode_tickets(self.stream.begin_save()))
        if self.rng.random() < 10 * self._crash_rate:
            raise CrashError  # inside the save
        self.checkpoint = step, host_state
        if self.rng.random() < 10 * self._crash_rate:
            raise CrashError  # before what it contains was acknowledged
        self.stream.acknowledge(step)

    def _spy(self) -> None:
        """Looks at every group that is handed out to be trained."""
        group_filter, take = self.stream.group_filter, self.stream.group_filter.take

        def look(limit: int) -> list[Group]:
            groups = take(limit)
            for group in groups:
                self._look_at(group)
            return groups

        group_filter.take = look

    def _look_at(self, group: Group) -> None:
        found, config = self.findings, self.config
        found.trained += 1
        ticket = self.stream.planner.ticket(group.ticket_id)
        self.actors[group.ticket_id] = group.actors
        numbers = {int(n) for r in group.rollouts for n in np.unique(r.tokens)}
        is_right = len(numbers) == len(group.rollouts) == config.rounds.samples_per_group
        is_right &= np.array_equal(group.prompt_tokens, ticket.prompt_tokens)
        found.wrong_groups += not is_right
        versions = {v for n in numbers for v in self.versions[n]}
        abandoned = any(v.step > base for v in versions for i, base in self.bases.items() if i > v.incarnation)
        found.abandoned_groups += abandoned
        bound = config.max_lag_steps
        if bound is not None:
            found.over_lag_bound += self.stream.step - min(v.step for v in versions) > bound

    def _book_drops(self) -> None:
        dropped = self.stream.group_filter.dropped
        if self.config.rounds.overprovision_prompts == 1:
            self.findings.stale_groups += dropped["stale"]
        self.findings.dropped += sum(dropped.values())

    def _look_at_the_end(self) -> None:
        """Each order that was issued is trained once, open, or deferred; and what is open, actors are offered."""
        found, planner = self.findings, self.stream.planner
        trained = [g for _, groups in self.history for g in groups]
        counts = collections.Counter(trained)
        found.trained_twice += sum(n - 1 for n in counts.values())
        open_ids = {t.id for t in planner.open_tickets}
        state = planner.get_state()
        found.lost += abs(state["num_issued"] - state["num_deferred"] - len(counts.keys() | open_ids))
        found.trained_twice += len(counts.keys() & open_ids)
        self.now_s += 10 * LEASE_S
        offered = {group_id(t.id) for t in self.shared.claim("end", limit=10**6, lease_s=LEASE_S)}
        here = {group_id(s.group.ticket_id) for s in self.shared.read_groups(after_seq=0, limit=10**6)}
        found.trained_twice += len(counts.keys() & offered)
        found.lost += len(open_ids - offered - here - set(self.stream._tickets.failed()))
