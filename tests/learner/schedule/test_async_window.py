"""Windows: what the async ratio bounds."""

import random

from hypothesis import given
from hypothesis import strategies as st

from configs import schema, sections
from learner.schedule.async_window import AsyncWindow
from learner.schedule.ticket_books import training_sampling
from tests.learner.schedule.fakes import Problems


@given(alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]), U=st.integers(1, 4), seed=st.integers(0, 99))
def test_async_ratio_bounds_what_is_issued_and_the_lag_of_groups_served_in_order(alpha, U, seed):
    config = schema.Config(
        preset="test",
        rounds=sections.RoundsConfig(groups_per_round=U, groups_per_update=U),
        admission=sections.AdmissionConfig(policy="window", async_ratio=alpha),
        publish=sections.PublishConfig(when="every"),
    )
    planner, rng = AsyncWindow(config, training_sampling(config, ()), Problems()), random.Random(seed)
    issued_at: dict[str, int] = {}
    for n in range(20 * U):
        step = n // U
        issued_at |= {t.id: step for t in planner.issue(step=step)}
        assert len(planner.open_tickets) <= (1 + alpha) * U
        ticket = planner.open_tickets[0]
        planner.consume(ticket.id)
        if rng.random() < 0.3:
            issued_at |= {t.id: step for t in planner.issue(step=step)}
        # Whatever weights it began on, they are not too old for its turn, and they exist.
        assert n // U - ticket.min_version.step <= -(-alpha // 1) and ticket.min_version.step <= issued_at[ticket.id]
    lags = {int(i) // U - at for i, at in issued_at.items() if int(i) < 20 * U}
    assert max(lags) <= -(-alpha // 1)
