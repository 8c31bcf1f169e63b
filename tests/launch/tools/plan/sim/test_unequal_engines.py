"""Shares of the tickets over engines of unequal size, in token steps of one round; served first come first served, and
the work over the places, are what it is held against."""

import collections
import math
import random

import pytest

from actor.admission import Admission
from bridge.rollout_types import Version
from launch.tools.plan.sim.tickets import TicketPool
from tests.bridge.factories import make_ticket

R, K = 32, 8
SERVED = Version(incarnation=0, step=0)


def token_steps(sizes, lengths, *, shares=True, places=None):
    """Steps until a round is served; every running response gets one token a step."""
    pool = TicketPool(num_engines=len(sizes), width=None, by_sample=False, shares=shares, places=places or sizes)
    for order in range(R):
        pool.put(make_ticket(str(order), order=order, num_samples=K))
    actors = [Admission("fifo", max_sequences=size, samples_per_group=K) for size in sizes]
    for actor in actors:
        actor.rebalance(collections.Counter(sizes))
    waiting: list[list[tuple[str, int]]] = [[] for _ in sizes]
    running: list[list[list]] = [[] for _ in sizes]
    steps = 0
    while True:
        for engine, actor in enumerate(actors):
            actor.offer(pool.claim(engine, actor.num_to_claim()))
            for ticket in actor.admit(SERVED):
                waiting[engine] += [(ticket.id, length) for length in lengths[ticket.order]]
            free = sizes[engine] - len(running[engine])
            running[engine] += [list(one) for one in waiting[engine][:free]]
            del waiting[engine][:free]
        if not any(running):
            return steps
        num = min(left for engine in running for _, left in engine)
        steps += num
        for engine, actor in enumerate(actors):
            for one in running[engine]:
                one[1] -= num
                if not one[1] and actor.finish_sample(one[0]):
                    pool.end(one[0])
            running[engine] = [one for one in running[engine] if one[1]]


UNIFORM = [[100] * K for _ in range(R)]
RNG = random.Random(0)
TAILED = [[50 if RNG.random() < 0.9 else 800 for _ in range(K)] for _ in range(R)]


@pytest.mark.parametrize("lengths", [UNIFORM, TAILED], ids=["uniform", "tailed"])
@pytest.mark.parametrize("sizes", [(256, 32), (32, 256), (256, 32, 32, 32), (64, 16), (256, 256)])
def test_unequal_engines_serve_a_round_in_the_time_of_first_come_first_served(sizes, lengths):
    steps = token_steps(sizes, lengths)
    work = sum(map(sum, lengths))
    assert steps >= max(max(map(max, lengths)), math.ceil(work / sum(sizes)))
    assert steps <= 1.05 * token_steps(sizes, lengths, shares=False)


def test_equal_parts_would_more_than_double_the_time_of_a_round():
    assert token_steps((256, 32), UNIFORM) == 100
    assert token_steps((256, 32), UNIFORM, places=(1, 1)) >= 200


@pytest.mark.parametrize("lengths", [UNIFORM, TAILED], ids=["uniform", "tailed"])
def test_equal_engines_take_equal_parts(lengths):
    assert token_steps((64, 64), lengths) == token_steps((64, 64), lengths, places=(1, 1))
