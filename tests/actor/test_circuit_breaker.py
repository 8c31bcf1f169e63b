from typing import Any

import numpy as np

from actor.circuit_breaker import MANY_S, MIN_ROWS, MIN_S, CircuitBreaker
from bridge.rollout_types import Task, Ticket
from tests.bridge.factories import make_ticket


def row(number: int) -> Ticket:
    return make_ticket(f"t{number}", prompt_tokens=np.array([number], np.int32))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def outage() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(clock), clock


def test_outage_of_many_rows_is_for_good_only_after_a_time():
    one, clock = outage()
    assert not any(one.record_failure(row(n)) for n in range(5 * MIN_ROWS))
    clock.now_s += MIN_S - 1
    assert not one.record_failure(row(0))
    clock.now_s += 1
    assert one.record_failure(row(0))
    assert str(one) == f"{5 * MIN_ROWS + 2} groups of {5 * MIN_ROWS} rows in a row, for 60 s,"


def test_one_bad_row_however_often_it_is_offered_ends_nothing_for_a_long_time():
    one, clock = outage()
    assert not one.record_failure(row(0))
    clock.now_s += MANY_S - 1
    assert not any(one.record_failure(row(0)) for _ in range(10 * MIN_ROWS))
    clock.now_s += 1
    assert one.record_failure(row(0))


def test_few_rows_that_fail_now_and_then_end_nothing():
    one, clock = outage()
    for number in range(MIN_ROWS - 1):
        clock.now_s += MANY_S
        assert not one.record_failure(row(number))


def test_success_ends_an_outage():
    one, clock = outage()
    for number in range(MIN_ROWS - 1):
        one.record_failure(row(number))
    clock.now_s += MIN_S
    one.record_success()
    assert not any(one.record_failure(row(n)) for n in range(MIN_ROWS))


def test_rows_differ_by_what_their_task_says():
    """An environment's rows may all have one prompt."""
    one, clock = outage()
    one.record_failure(row(0))
    clock.now_s += MIN_S
    fields: list[dict[str, Any]] = [{"answer": "", "metadata": f'{{"seed": {n}}}'} for n in range(MIN_ROWS - 1)]
    tasks = [Task(rewards=(), environment="guess", **f) for f in fields]
    said = [one.record_failure(make_ticket("t", prompt_tokens=row(0).prompt_tokens, task=t)) for t in tasks]
    assert said == [False] * (MIN_ROWS - 2) + [True]
