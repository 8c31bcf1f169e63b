import dataclasses
import random

import pytest

from tests.learner.schedule.stream_learner import Learner, config_of


def test_one_group_over_the_batch_is_split_and_only_its_last_part_ends_the_update(store):
    learner = Learner(store, config_of(R=2, U=1, rows=1), num_tokens=8)  # 10 + 10 tokens, rows of 16
    learner.train(2)
    flags = [(len(b.ticket_ids), b.ends_update, b.ends_round) for b in learner.micros]
    assert flags == [(0, False, False), (1, True, False), (0, False, False), (1, True, True)]


def test_prompts_learn_the_rewards_of_an_update_once_it_is_made(store):
    learner = Learner(store, config_of())
    next(micro for micro in learner.stream.micro_batches() if micro.ends_update)
    learner.stream.drop_update(needs_fresh=False)
    assert learner.prompts.observed == []
    learner.train(2)
    assert learner.prompts.observed == [("", 0.5)] * 4


def test_round_complete_trains_a_round_that_is_there_at_once_whatever_the_lag_bound(store):
    config = config_of(R=4, U=1, updates=4, train_start="round_complete")
    rounds = dataclasses.replace(config.rounds, max_lag_steps=3)
    learner = Learner(store, dataclasses.replace(config, rounds=rounds))
    learner.train(4)
    assert learner.num_waits == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("train_start", ["group_ready", "round_complete"])
def test_every_round_has_its_own_groups_once_whatever_the_order_of_arrival(store, train_start, seed):
    rng = random.Random(seed)
    R, U, rounds, burst = 6, 2, 3, rng.randint(1, 5)
    held = []

    def serve_some():
        held.extend(store.claim("actor", limit=99, lease_s=1000))
        for _ in range(min(burst, len(held))):
            learner.put(held.pop(rng.randrange(len(held))))

    config = config_of(R=R, U=U, train_start=train_start, rows=rng.randint(1, 4), updates=rounds * R // U)
    learner = Learner(store, config, on_wait=serve_some)
    for n in range(rounds):
        learner.micros.clear()
        learner.train(R // U)
        batches = learner.micros
        assert sorted(learner.trained) == [f"{n * R + k:09d}" for k in range(R)]
        assert [b.ends_round for b in batches] == [False] * (len(batches) - 1) + [True]
        ends = [i + 1 for i, b in enumerate(batches) if b.ends_update]
        starts = [0, *ends[:-1]]
        counts = [sum(len(b.ticket_ids) for b in batches[s:e]) for s, e in zip(starts, ends, strict=True)]
        assert counts == [U] * (R // U)
    assert [fields["tickets"] for fields in learner.marks.of("issue")] == [R] * rounds
