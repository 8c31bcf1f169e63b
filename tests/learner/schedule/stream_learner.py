"""A learner's stream over a real store, and an actor that serves it."""

import json
from typing import Any

from bridge.rollout_types import Ticket
from configs import schema, sections
from learner.schedule.rollout_stream import RolloutStream, encode_tickets
from learner.schedule.ticket_ledger import training_sampling
from learner.update.packing import MicroBatch
from tests.bridge.factories import make_group, make_rollout
from tests.learner.schedule.fakes import Marks, Problems

K = 2


def config_of(
    *,
    R=4,
    U=2,
    rows=8,
    window=False,
    updates=2,
    max_lag_steps=None,
    unit: Any = "group",
    train_start: Any = "group_ready",
):
    """Of sequences of 8 tokens by default, so that a group is one row of 16."""
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=updates),
        model=sections.ModelConfig(max_tokens=16),
        sampling=sections.SamplingConfig(max_response_tokens=8),
        rounds=sections.RoundsConfig(
            groups_per_round=R,
            groups_per_update=U,
            samples_per_group=K,
            max_lag_steps=max_lag_steps,
            train_start=train_start,
        ),
        admission=sections.AdmissionConfig(
            policy="window" if window else "fifo", width=4 if window else "auto", unit=unit
        ),
        publish=sections.PublishConfig(when="every" if window else "round_end"),
        packing=sections.PackingConfig(rows=rows, row_tokens=16),
    )


class Learner:
    """A stream, and one actor that hands in all it can claim whenever the learner waits, or does what a test says."""

    def __init__(self, store, config, *, saved=None, step=0, on_wait=None, prompts=None, num_tokens=6):
        self.store = store
        self.marks: Any = Marks()
        self.incarnation = store.acquire_leadership("here", lease_s=60)
        store.record_restore(self.incarnation, step)
        self.prompts = prompts or Problems(2)
        self.num_waits = 0
        self.stream = RolloutStream(
            config,
            store=store,
            prompts=self.prompts,
            sampling=training_sampling(config, ()),
            timeline=self.marks,
            incarnation=self.incarnation,
            vocab_size=1000,
            step=step,
            on_wait=on_wait or self.serve,
        )
        self.micros: list[MicroBatch] = []
        self._num_tokens = num_tokens
        self.stream.resume(saved)

    @property
    def trained(self) -> list[str]:
        return [ticket_id for micro in self.micros for ticket_id in micro.ticket_ids]

    def serve(self, count=99, actor="actor"):
        self.num_waits += 1
        assert self.num_waits < 100, "nothing comes any more"
        for ticket in self.store.claim(actor, limit=count, lease_s=1000):
            self.put(ticket, actor)

    def put(self, ticket: Ticket, actor="actor"):
        step, num_tokens = ticket.min_version.step, self._num_tokens
        rollouts = tuple(make_rollout(num_tokens, reward=float(i), step=step) for i in range(ticket.num_samples))
        self.store.put_group(make_group(ticket, rollouts=rollouts, actor=actor, incarnation=self.incarnation))

    def save(self) -> dict[str, Any]:
        """What a checkpoint of it would be read as."""
        return json.loads(json.dumps(encode_tickets(self.stream.begin_save())))

    def train(self, num_updates):
        """Some updates, steps counted as the main loop does; returns the micro-batches that follow."""
        batches = self.stream.micro_batches()
        while num_updates:
            self.micros.append(micro := next(batches))
            if micro.ends_update:
                self.stream.end_update()
                num_updates -= 1
        return batches
