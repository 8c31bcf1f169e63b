"""Windows: the backlog that actors draw on, and the bounds on complete groups and on lag."""

import random

from hypothesis import assume, given
from hypothesis import strategies as st

from configs import schema, sections
from learner.schedule.ticket_ledger import training_sampling
from learner.schedule.window_planner import WindowPlanner
from tests.learner.schedule.fakes import Problems


def window_of(*, U=2, incarnation=0, every_n_steps=1, max_lag_steps=None, **admission) -> WindowPlanner:
    config = schema.Config(
        preset="test",
        rounds=sections.RoundsConfig(groups_per_round=U, groups_per_update=U, max_lag_steps=max_lag_steps),
        admission=sections.AdmissionConfig(policy="window", **admission),
        publish=sections.PublishConfig(when="every", every_n_steps=every_n_steps),
    )
    return WindowPlanner(config, training_sampling(config, ()), Problems(), incarnation=incarnation)


def issue(window: WindowPlanner, *, step=0, num_unclaimed=0) -> int:
    return len(window.issue(step=step, num_unclaimed=lambda: num_unclaimed))


def arrive(window: WindowPlanner, num: int) -> None:
    """The groups of the first so many orders."""
    for order in range(num):
        window.arrive(f"{order:09d}")


def trained_to(window: WindowPlanner, num_updates: int) -> WindowPlanner:
    """Consumes so many updates' groups, each as soon as it is issued."""
    for step in range(num_updates):
        for ticket in window.issue_up_to(2 * step + 1, step=step):
            window.consume(ticket.id)
    return window


@given(
    alpha=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 4.0]),
    every=st.sampled_from([1, 2, 3, 4]),
    U=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_async_ratio_bounds_what_is_issued_and_the_lag_of_groups_served_in_order(alpha, every, U, seed):
    assume(every - 1 <= -(-alpha // 1))  # or the configuration is refused
    planner, rng = window_of(U=U, async_ratio=alpha, every_n_steps=every), random.Random(seed)
    issued_at: dict[str, int] = {}
    for n in range(24 * U):
        step = n // U // every * every  # of the weights that are out
        while tickets := planner.issue(step=n // U, num_unclaimed=lambda: 0):  # they are claimed at once
            issued_at |= {t.id: step for t in tickets}
        assert len(planner.open_tickets) <= (1 + max(alpha, every - 1)) * U
        ticket = planner.open_tickets[0]
        planner.consume(ticket.id)
        if rng.random() < 0.3:
            issued_at |= {t.id: step for t in planner.issue(step=n // U, num_unclaimed=lambda: 0)}
        # Whatever weights it began on, they are not too old for its turn, and they exist.
        assert n // U - ticket.min_version.step <= -(-alpha // 1) and ticket.min_version.step <= issued_at[ticket.id]
    lags = {int(i) // U - at for i, at in issued_at.items() if int(i) < 24 * U}
    assert max(lags) <= -(-alpha // 1)


def test_backlog_of_an_updates_groups_is_kept_however_many_are_in_progress():
    window = window_of(U=3)
    assert issue(window) == 3
    assert issue(window, num_unclaimed=3) == 0
    assert issue(window, num_unclaimed=1) == 2  # two were claimed
    for _ in range(10):
        assert issue(window) == 3
    assert len(window.open_tickets) == 35 and not window.num_blocked


def test_full_queue_of_complete_groups_holds_tickets_back_and_is_counted_once_each_time():
    window = window_of(U=2, queue_groups=3)
    issue(window)
    issue(window)
    arrive(window, 3)
    assert issue(window) == issue(window, num_unclaimed=1) == 0
    assert window.num_blocked == {"queue": 1}
    assert issue(window, num_unclaimed=2) == 0  # nothing is lacking, so nothing is held back
    assert issue(window) == 0 and window.num_blocked == {"queue": 2}
    assert len(window.open_tickets) == 4
    window.consume(f"{0:09d}")
    assert issue(window) == 2 and window.num_blocked == {"queue": 2}


def test_full_queue_has_one_issued_for_one_that_is_trained_so_that_the_learner_never_starves():
    window = window_of(U=2, queue_groups=2)
    for _ in range(3):
        issue(window)
    arrive(window, 4)
    assert issue(window) == 0
    for order in range(2):
        window.consume(f"{order:09d}")
        assert issue(window) == 1
    window.consume(f"{2:09d}")  # one waits: the backlog is filled again
    assert issue(window) == 2


def test_groups_that_came_while_nobody_looked_are_trained_before_more_is_issued_than_stands_beside_a_full_queue():
    window = window_of(U=2, queue_groups=2, sequences=24)  # of 8 a group: three groups in service
    for _ in range(20):
        issue(window)
    arrive(window, 40)
    issued_at = []
    for order in range(39):
        window.consume(f"{order:09d}")
        if issue(window):
            issued_at.append(order)
    # Two wait, three are in service, two are for the taking: seven stay, so the learner never starves.
    assert issued_at == list(range(33, 39))


def test_dropping_the_oldest_holds_nothing_back():
    window = window_of(U=2, when_full="drop_oldest")
    issue(window)
    issue(window)
    arrive(window, 4)
    assert issue(window) == 2 and not window.num_blocked


def test_lag_bound_holds_tickets_back_and_is_counted():
    window = window_of(U=2, max_lag_steps=1)
    assert [issue(window), issue(window), issue(window)] == [2, 2, 0]
    assert window.num_blocked == {"lag": 1}
    assert issue(window, step=1) == 2


def test_tickets_are_of_the_learners_incarnation_also_when_asked_for_anew():
    # An actor compares incarnations first: of incarnation 0 a restarted learner's tickets would ask for nothing.
    window = trained_to(window_of(async_ratio=0.0, incarnation=3), 5)
    (first, _) = window.issue(step=5, num_unclaimed=lambda: 0)
    assert str(first.min_version) == "3:5"
    (again, _) = window.reissue_open(step=6)
    assert str(again.min_version) == "3:6"
