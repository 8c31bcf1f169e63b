import dataclasses
import random
from typing import Any

import pytest

from configs import schema, sections
from learner.schedule.rollout_stream import RolloutStream
from learner.schedule.ticket_ledger import training_sampling
from tests.bridge.factories import make_group, make_rollout
from tests.learner.schedule.fakes import Marks, Problems

K, PROMPT, RESPONSE = 2, 2, 6  # so a sequence has 8 tokens and a group is one row of 16


def config_of(R=4, U=2, *, train_start: Any = "group_ready", rows=4, width=0):
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=R // U),
        model=sections.ModelConfig(max_tokens=16),
        sampling=sections.SamplingConfig(max_response_tokens=8),
        rounds=sections.RoundsConfig(
            groups_per_round=R, groups_per_update=U, samples_per_group=K, train_start=train_start
        ),
        admission=sections.AdmissionConfig(policy="window" if width else "fifo", width=width or "auto"),
        publish=sections.PublishConfig(when="every" if width else "round_end"),
        packing=sections.PackingConfig(rows=rows, row_tokens=16),
    )


class Learner:
    """The stream under test, and an actor that hands in groups when it is told to, or when the learner waits."""

    def __init__(self, config, store, *, pick=lambda held: 0, burst=1, num_tokens=RESPONSE):
        self.store, self.waits = store, 0
        self._pick, self._burst, self._num_tokens = pick, burst, num_tokens
        self.held = []
        self.prompts = Problems(PROMPT)
        self.marks: Any = Marks()
        self.stream = RolloutStream(
            config,
            store=store,
            prompts=self.prompts,
            sampling=training_sampling(config, ()),
            timeline=self.marks,
            incarnation=0,
            vocab_size=1000,
            on_wait=self._wait,
        )
        self.planner = self.stream.planner
        self.batches = self.stream.micro_batches()

    @property
    def issued(self):
        """How many tickets were issued, each time any were."""
        return [fields["tickets"] for fields in self.marks.of("issue")]

    def deliver(self, count):
        """The actor claims all there is and hands `count` groups in, in the order that `pick` says."""
        self.held += self.store.claim("actor", limit=1000, lease_s=1000)
        for _ in range(min(count, len(self.held))):
            ticket = self.held.pop(self._pick(len(self.held)) % len(self.held))
            step = ticket.min_version.step
            rollouts = tuple(make_rollout(self._num_tokens, reward=float(i), step=step) for i in range(K))
            self.store.put_group(make_group(ticket, rollouts=rollouts))

    def train(self, num_updates):
        """The micro-batches of some updates, steps counted as the main loop does."""
        seen = []
        while num_updates:
            seen.append(next(self.batches))
            if seen[-1].ends_update:
                self.stream.end_update()
                num_updates -= 1
        return seen

    def _wait(self):
        self.waits += 1
        self.deliver(self._burst)


def flags(batches):
    return [(len(b.ticket_ids), b.ends_update, b.ends_round) for b in batches]


def test_one_group_over_the_batch_is_split_and_only_its_last_part_ends_the_update(store):
    learner = Learner(config_of(R=2, U=1, rows=1), store, num_tokens=8)  # 10 + 10 tokens, rows of 16
    assert flags(learner.train(2)) == [(0, False, False), (1, True, False), (0, False, False), (1, True, True)]


def test_prompts_learn_the_rewards_of_an_update_once_it_is_made(store):
    learner = Learner(config_of(), store)
    next(micro for micro in learner.batches if micro.ends_update)
    learner.stream.drop_update(needs_fresh=False)
    assert learner.prompts.observed == []
    learner.train(2)
    assert learner.prompts.observed == [("", 0.5)] * 4


def test_round_complete_trains_a_round_that_is_there_at_once_whatever_the_lag_bound(store):
    config = config_of(R=4, U=1, train_start="round_complete", rows=8)
    rounds = dataclasses.replace(config.rounds, max_lag_steps=3)
    learner = Learner(dataclasses.replace(config, rounds=rounds), store, burst=4)
    learner.train(4)
    assert learner.waits == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("train_start", ["group_ready", "round_complete"])
def test_every_round_has_its_own_groups_once_whatever_the_order_of_arrival(store, train_start, seed):
    rng = random.Random(seed)
    R, U, rounds = 6, 2, 3
    learner = Learner(
        config_of(R, U, train_start=train_start, rows=rng.randint(1, 4)),
        store,
        pick=lambda held: rng.randrange(held),
        burst=rng.randint(1, 5),
    )
    for n in range(rounds):
        batches = learner.train(R // U)
        ids = [i for b in batches for i in b.ticket_ids]
        assert sorted(ids) == [f"{n * R + k:09d}" for k in range(R)]
        assert [b.ends_round for b in batches] == [False] * (len(batches) - 1) + [True]
        ends = [i + 1 for i, b in enumerate(batches) if b.ends_update]
        starts = [0, *ends[:-1]]
        counts = [sum(len(b.ticket_ids) for b in batches[s:e]) for s, e in zip(starts, ends, strict=True)]
        assert counts == [U] * (R // U)
    assert learner.issued == [R] * rounds
