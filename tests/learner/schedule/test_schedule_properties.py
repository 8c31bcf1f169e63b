"""Planner, queue, intake, admission and a real store together, under every schedule: completions in random order,
actors that die, publishes that reach them late. Nothing is lost or trained twice, and no bound is ever broken."""

import contextlib
import dataclasses
import random
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actor.admission import Admission
from bridge.rollout_types import Group, Ticket, Version
from bridge.store.open import SqliteStore
from bridge.store.store_types import UnfitGroupError
from configs import schema, sections
from learner.schedule.rollout_stream import RolloutStream
from learner.schedule.sample_tickets import group_id
from learner.schedule.ticket_ledger import training_sampling
from tests.bridge.factories import make_group, make_rollout
from tests.learner.schedule.fakes import Marks, Problems, RestlessStore

K, R, U = 2, 4, 2
MAX_LAG = 2
WINDOW = sections.AdmissionConfig(policy="window", sequences=7)
EVERY = sections.PublishConfig(when="every")
SCHEDULES: dict[str, dict[str, Any]] = {
    "serial": dict(rounds=dict(train_start="round_complete")),
    "fifo": {},
    "frontier": dict(admission=sections.AdmissionConfig(policy="frontier", width=2)),
    "frontier of samples": dict(admission=sections.AdmissionConfig(policy="frontier", width=2, unit="sample")),
    "races": dict(rounds=dict(overprovision_prompts=1.5, overprovision_samples=1.5, groups_per_update=R)),
    "races of samples": dict(
        rounds=dict(overprovision_prompts=1.5, overprovision_samples=1.5),
        admission=sections.AdmissionConfig(policy="fifo", unit="sample"),
    ),
    "filter": dict(rounds=dict(filter_zero_variance=True)),
    "window": dict(admission=WINDOW, publish=EVERY, rounds=dict(max_lag_steps=MAX_LAG)),
    "window, two steps a publish": dict(
        admission=WINDOW, publish=sections.PublishConfig(when="every", every_n_steps=2), rounds=dict(max_lag_steps=4)
    ),
    "window, few may wait": dict(
        admission=dataclasses.replace(WINDOW, queue_groups=1), publish=EVERY, rounds=dict(max_lag_steps=MAX_LAG)
    ),
    "async ratio": dict(
        admission=sections.AdmissionConfig(policy="window", async_ratio=1.0),
        publish=EVERY,
        rounds=dict(max_lag_steps=MAX_LAG),
    ),
    "async ratio of samples": dict(
        admission=sections.AdmissionConfig(policy="window", async_ratio=0.5, unit="sample"),
        publish=EVERY,
        rounds=dict(max_lag_steps=MAX_LAG, overprovision_samples=1.5),
    ),
    "heats": dict(
        admission=sections.AdmissionConfig(policy="window", async_ratio=1.0),
        publish=EVERY,
        rounds=dict(max_lag_steps=MAX_LAG, overprovision_prompts=1.5, overprovision_samples=1.5),
    ),
    "heats of samples": dict(
        admission=sections.AdmissionConfig(policy="window", async_ratio=1.5, unit="sample"),
        publish=EVERY,
        rounds=dict(max_lag_steps=MAX_LAG, overprovision_prompts=2.0, overprovision_samples=1.5),
    ),
    "heats in a ring buffer": dict(
        admission=dataclasses.replace(WINDOW, when_full="drop_oldest", queue_groups=1),
        publish=EVERY,
        rounds=dict(max_lag_steps=MAX_LAG, overprovision_prompts=1.5, filter_zero_variance=True),
    ),
    "ring buffer": dict(
        admission=dataclasses.replace(WINDOW, when_full="drop_oldest", queue_groups=1),
        publish=EVERY,
        rounds=dict(max_lag_steps=MAX_LAG, filter_zero_variance=True),
    ),
}


INCARNATION = 2
"""Of a learner that was started again: versions are compared by it first."""


def config_of(schedule: str) -> schema.Config:
    fields = dict(SCHEDULES[schedule])
    rounds = dict(groups_per_round=R, groups_per_update=U, samples_per_group=K) | fields.pop("rounds", {})
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=R // rounds["groups_per_update"]),
        model=sections.ModelConfig(max_tokens=16),
        sampling=sections.SamplingConfig(max_response_tokens=8),
        rounds=sections.RoundsConfig(**rounds),
        packing=sections.PackingConfig(rows=4, row_tokens=16),
        actor=sections.ActorConfig(max_num_seqs=5),
        **fields,
    )


class FakeActor:
    """Serves what its real admission lets it; its weights follow the published ones when the world says so."""

    def __init__(self, name: str, config: schema.Config) -> None:
        self.name, self.config = name, config
        self.step: int | None = None
        self.restart()

    def restart(self) -> None:
        self.admission = Admission.of(self.config)
        self.running: dict[str, tuple[Ticket, int]] = {}
        """With the step that each began at."""

    def claim(self, store: SqliteStore, *, among: int) -> None:
        if self.step is None:
            return
        width = self.admission.width if self.admission.policy == "frontier" else None
        self.admission.rebalance({5: among})
        limit, part = self.admission.num_to_claim(), self.admission.samples_per_engine
        tickets = store.claim(self.name, limit=limit, lease_s=100, width=width, among=among, part=part)
        self.admission.offer(t for t in tickets if t.id not in self.running)
        for ticket in self.admission.admit(Version(incarnation=INCARNATION, step=self.step)):
            self.running[ticket.id] = ticket, self.step

    def finish(self, store: SqliteStore, ticket_id: str, rng: random.Random) -> None:
        ticket, began = self.running.pop(ticket_id)
        assert self.step is not None
        self.admission.remove(ticket_id)
        rewards = [0.0] * K if rng.random() < 0.3 else [float(i % 2) for i in range(K)]
        index = int(ticket_id.rpartition(".")[2]) % K if "." in ticket_id else 0
        rollouts = []
        for i in range(ticket.num_samples):
            rollout = make_rollout(4, reward=rewards[index + i])
            versions = np.array([began, began, self.step, self.step], np.int32)
            rollouts.append(dataclasses.replace(rollout, token_versions=versions))
        with contextlib.suppress(KeyError, UnfitGroupError):  # withdrawn
            store.put_group(make_group(ticket, actor=self.name, rollouts=tuple(rollouts), incarnation=INCARNATION))


class World:
    """A learner, and actors that do something at random whenever it waits."""

    def __init__(self, folder: str, config: schema.Config, seed: int) -> None:
        self.config, self.rng = config, random.Random(seed)
        self.shared = RestlessStore(f"{folder}/store.db")
        self.published = 0
        self.actors = [FakeActor(f"a{i}", config) for i in range(2)]
        marks: Any = Marks()
        self.stream = RolloutStream(
            config,
            store=self.shared,
            prompts=Problems(2),
            sampling=training_sampling(config, ()),
            timeline=marks,
            incarnation=INCARNATION,
            vocab_size=1000,
            on_wait=self.tick,
        )
        self.planner = self.stream.planner
        self.groups = spy_on(self)
        self.trained: list[str] = []
        self.num_ticks = 0

    def tick(self) -> None:
        """One thing that may happen at any time."""
        self.num_ticks += 1
        assert self.num_ticks < 5000, "stuck"
        actor = self.rng.choice(self.actors)
        what = self.rng.random()
        if actor.step is None or what < 0.3:
            actor.step = self.published  # in flight: running tickets go on under it
        elif what < 0.36:
            self.shared.release(actor.name, list(actor.running) + [t.id for t in actor.admission.waiting])
            actor.restart()
        elif what < 0.7 or not actor.running:
            actor.claim(self.shared, among=len(self.actors))
            self._check_frontier()
        else:
            actor.finish(self.shared, self.rng.choice(sorted(actor.running)), self.rng)
        held = {a.name: self.shared.leased(a.name) for a in self.actors}
        for a in self.actors:  # what was withdrawn is aborted
            for id_ in [i for i in a.running if i not in held[a.name]]:
                del a.running[id_]
                a.admission.remove(id_)
            for ticket in a.admission.waiting:
                if ticket.id not in held[a.name]:
                    a.admission.remove(ticket.id)

    def train(self, num_updates: int) -> None:
        batches = self.stream.micro_batches()
        while self.stream.step < num_updates:
            micro = next(batches)
            self.trained += micro.ticket_ids
            for _ in range(self.rng.randrange(4)):  # the world goes on while the learner computes
                self.tick()
            self.stream.poll()
            if micro.ends_update:
                self.stream.end_update()
                publish = self.config.publish
                is_due = (
                    micro.ends_round if publish.when == "round_end" else self.stream.step % publish.every_n_steps == 0
                )
                self.published = self.stream.step if is_due else self.published

    def _check_frontier(self) -> None:
        if self.config.admission.policy == "frontier":
            assert len({t.order for a in self.actors for t, _ in a.running.values()}) <= self.config.admission_width


def spy_on(w: World) -> dict[str, Group]:
    """Looks at every group that is handed out; they are in the dict that it returns."""
    groups: dict[str, Group] = {}
    take = w.stream.group_filter.take

    def look(limit: int) -> list[Group]:
        handed_out = take(limit)
        for group in handed_out:
            assert group.ticket_id not in groups, "twice"
            groups[group.ticket_id] = group
            assert len(group.rollouts) == K
            assert np.array_equal(group.prompt_tokens, w.planner.ticket(group.ticket_id).prompt_tokens)
            if w.config.publish.when == "every":
                ratio = w.config.admission.async_ratio
                bound = w.config.rounds.max_lag_steps if ratio is None else -(-ratio // 1)
                assert bound is not None
                assert w.stream.step - group.min_step <= bound
            if w.config.publish.when == "round_end":
                assert group.min_step == group.max_step == w.published, "a round's groups are by its weights alone"
            if w.config.rounds.filter_zero_variance:
                assert len({r.reward for r in group.rollouts}) > 1
        return handed_out

    w.stream.group_filter.take = look
    return groups


@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=pytest.mark.heavy) if s.endswith(" of samples") else s for s in SCHEDULES]
)
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_lost_or_doubled_and_no_bound_is_broken(schedule: str, seed: int):
    config = config_of(schedule)
    num_updates = 6 * R // config.rounds.groups_per_update
    with tempfile.TemporaryDirectory() as folder:
        world = World(folder, config, seed)
        world.train(num_updates)
        planner = world.planner
        assert len(world.trained) == len(set(world.trained)) == num_updates * config.rounds.groups_per_update
        assert sorted(world.trained) == sorted(world.groups)
        # Every order that was issued is trained, open or deferred.
        state = planner.get_state()
        everything = [*world.trained, *(t.id for t in planner.open_tickets)]
        assert len(everything) + state["num_deferred"] == state["num_issued"]
        assert len(set(everything)) == len(everything)
        # No actor began before the weights that its ticket asks for were there.
        assert world.stream.group_filter.dropped["below_min_version"] == 0
        # No prompt is in two places, and by rounds without a filter none was drawn in vain.
        prompts = [int(g.prompt_tokens[0]) for g in world.groups.values()]
        prompts += [int(t.prompt_tokens[0]) for t in planner.open_tickets + planner.long_queue]
        assert len(prompts) == len(set(prompts))
        if not config.rounds.filter_zero_variance:
            assert sorted(prompts) == list(range(len(prompts)))
        # What the store still offers or leases is what is open, and nothing else.
        offered = {t.id for t in world.shared.claim("end", limit=10**6, lease_s=100)}
        offered |= {id_ for a in world.actors for id_ in world.shared.leased(a.name)}
        offered = {group_id(i) for i in offered}
        waiting = {s.group.ticket_id for s in world.stream._tickets.read_groups(after_seq=0, limit=10**6)} - set(
            world.trained
        )
        assert offered | waiting >= {t.id for t in planner.open_tickets}
        assert not offered & set(world.trained)
        world.shared.close()
