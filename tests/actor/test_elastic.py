"""The parallelism planner: its rule on known steps, and what holds for any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.elastic import ElasticPolicy, StepStats, kv_tokens_at
from actor.engine_protocol import EngineSize


def policy(*, tp: int = 2, max_tp: int = 8, kv_tokens: int = 10_000, restart_s: float = 100.0) -> ElasticPolicy:
    return ElasticPolicy(
        size=EngineSize(max_num_seqs=64, tensor_parallel_size=tp, kv_tokens=kv_tokens, weights_kv_tokens=2000),
        max_tensor_parallel_size=max_tp,
        restart_s=restart_s,
    )


def step(usage: float, *, seconds: float = 100.0, num_preempted: int = 0) -> StepStats:
    return StepStats(seconds=seconds, kv_usage_peak=usage, num_preempted=num_preempted)


def sizes(planner: ElasticPolicy, *steps: StepStats) -> list[int]:
    return [planner.next_size(one) for one in steps]


FULL, BUSY, QUIET = step(0.95), step(0.9), step(0.3)


def test_size_doubles_after_a_full_step_as_long_as_a_restart():
    assert sizes(policy(), BUSY, FULL) == [2, 4]
    assert sizes(policy(), step(0.949)) == [2]


def test_preempted_response_makes_a_step_full_at_any_usage():
    assert sizes(policy(), step(0.5, num_preempted=1)) == [4]


def test_short_full_steps_double_the_size_once_they_have_taken_as_long_as_a_restart():
    short = step(1.0, seconds=30.0)
    assert sizes(policy(), short, QUIET, short, BUSY, short, short) == [2, 2, 2, 2, 2, 4]
    assert sizes(policy(restart_s=0.0), step(1.0, seconds=0.1)) == [4]


def test_quiet_step_never_doubles_the_size():
    assert sizes(policy(restart_s=99.0, max_tp=2), FULL, BUSY) == [2, 2]
    planner = policy(max_tp=2)
    planner.next_size(FULL)
    planner.max_tensor_parallel_size = 4
    assert sizes(planner, BUSY, QUIET) == [2, 2]


@pytest.mark.parametrize(("tp", "max_tp", "want"), [(4, 4, 4), (3, 4, 3), (3, 6, 6), (1, 8, 2)])
def test_size_doubles_up_to_the_largest(tp, max_tp, want):
    assert policy(tp=tp, max_tp=max_tp).next_size(FULL) == want


def test_size_halves_after_four_steps_in_a_row_that_half_the_size_would_hold():
    # 12,000 tokens with the weights: half of them without the weights are 4000, nine tenths of these 3600.
    assert kv_tokens_at(policy().size, 1) == 4000
    assert sizes(policy(), *[step(0.36)] * 4) == [2, 2, 2, 1]
    assert sizes(policy(), *[step(0.361)] * 8) == [2] * 8
    assert sizes(policy(), QUIET, QUIET, QUIET, BUSY, QUIET, QUIET, QUIET, QUIET) == [2] * 7 + [1]
    preempts = step(0.3, seconds=1.0, num_preempted=1)
    assert sizes(policy(), QUIET, QUIET, QUIET, preempts, QUIET, QUIET, QUIET, QUIET) == [2] * 7 + [1]


def test_size_halves_only_after_steps_as_long_as_a_restart():
    assert sizes(policy(), *[step(0.3, seconds=20.0)] * 5) == [2, 2, 2, 2, 1]


def test_odd_size_and_one_whose_half_cannot_hold_the_weights_never_halve():
    assert sizes(policy(tp=3), *[step(0.0)] * 6) == [3] * 6
    assert sizes(policy(tp=1), *[step(0.0)] * 6) == [1] * 6
    assert sizes(policy(kv_tokens=1000), *[step(0.01)] * 6) == [2] * 6


STEPS = st.lists(
    st.builds(
        step,
        st.floats(0, 1),
        seconds=st.floats(0, 300),
        num_preempted=st.sampled_from([0, 0, 0, 5]),
    ),
    max_size=40,
)


@given(steps=STEPS, tp=st.sampled_from([1, 2, 4]))
def test_any_history_changes_the_size_for_a_reason_that_lasted_as_long_as_a_restart(steps, tp):
    planner = policy(tp=tp, max_tp=4)
    for index, one in enumerate(steps):
        size = planner.next_size(one)
        so_far = steps[: index + 1]
        full_s = sum(s.seconds for s in so_far if s.num_preempted or s.kv_usage_peak >= 0.95)
        if size == 2 * tp:
            assert size <= 4 and full_s >= 100.0 - 1e-6 and (one.num_preempted or one.kv_usage_peak >= 0.95)
        elif size != tp:
            last = so_far[-4:]
            assert size == tp / 2 and len(last) == 4
            assert all(not s.num_preempted and s.kv_usage_peak * 10_000 <= 0.9 * 4000 + 1e-6 for s in last) or tp == 4
        else:
            assert not (one.num_preempted and full_s >= 100.0 and 2 * tp <= 4)
        if size != tp:
            return
