"""The simulated run against cases worked out by hand, and its books under all schedules."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.rollout_types import Task
from launch.tools.plan.profile import EngineProfile, LearnerProfile
from launch.tools.plan.sim.actors import SimActors
from launch.tools.plan.sim.event_queue import EventQueue, Lag
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile, Lengths
from tests.bridge.factories import make_ticket
from tests.launch.tools.plan.setup import by_rounds, by_window, lengths, profile_of, publishing

GROUP_S = 2 * 101 * 0.01  # training a group of 2 x (1 + 100) tokens


def metrics_of(outcome):
    return [{name.removeprefix("round/"): value for name, value in r.items()} for r in outcome.rounds]


def test_serial_round_is_rollout_then_training():
    config = by_rounds(rounds=dict(train_start="round_complete"))
    outcome = simulate(config, profile_of(verifier_s=0.5), num_updates=8)
    rollout_s, train_s = 10.5, 8 * GROUP_S
    for r in metrics_of(outcome):
        assert r["first_group_s"] == pytest.approx(rollout_s)
        assert r["rollout_to_train_end_s"] == pytest.approx(rollout_s + train_s)
        assert r["waiting_ratio"] == pytest.approx(rollout_s / (rollout_s + train_s))
        assert r["waiting_ratio_eq4"] == pytest.approx(r["waiting_ratio"])
    assert len(outcome.rounds) == 2
    assert outcome.seconds == pytest.approx(2 * (rollout_s + train_s))
    assert outcome.learner_utilisation == pytest.approx(train_s / (rollout_s + train_s))
    assert outcome.engine_utilisation == pytest.approx(10 / (rollout_s + train_s))
    assert outcome.group_lag == Lag(mean=1.5, p95=3, max=3)  # R/U = 4 updates by the same weights


def test_serial_with_several_passes_over_each_batch_trains_as_many_times_as_long():
    config = by_rounds(rounds=dict(train_start="round_complete", epochs=3))
    learner = LearnerProfile(seconds_per_token=0.01, optimizer_step_s=0.25)
    outcome = simulate(config, profile_of(learner=learner), num_updates=8)
    train_s = 3 * (8 * GROUP_S + 4 * 0.25)
    for r in metrics_of(outcome):
        assert r["rollout_to_train_end_s"] == pytest.approx(10.0 + train_s)
        assert r["waiting_ratio"] == pytest.approx(10.0 / (10.0 + train_s))
    assert outcome.learner_utilisation == pytest.approx(train_s / (10.0 + train_s))
    assert (outcome.num_steps, outcome.group_lag.max) == (8, 3)  # a lag counts updates, whatever the passes


def test_window_bound_by_the_learner_takes_each_pass_once_more_a_step():
    def step_s(epochs: int) -> float:
        config = by_window(admission=dict(width=8), rounds=dict(epochs=epochs))
        profile = profile_of(learner=LearnerProfile(seconds_per_token=0.1, micro_batch_s=0.5, optimizer_step_s=1.0))
        return simulate(config, profile, num_updates=12, warmup_updates=4).step_s

    once = 2 * GROUP_S * 10 + 0.5 * 1 + 1.0  # 404 tokens are less than a micro-batch
    assert step_s(1) == pytest.approx(once) and step_s(2) == pytest.approx(2 * once)


def test_serial_with_places_for_half_takes_two_waves():
    config = by_rounds(rounds=dict(train_start="round_complete"))
    engine = EngineProfile(running=(64.0,), tokens_per_s=(640.0,), max_num_seqs=8)
    outcome = simulate(config, profile_of(engine=engine), num_updates=4)
    assert metrics_of(outcome)[0]["first_group_s"] == pytest.approx(20.0)


def test_cgp_overlaps_training_with_the_second_wave():
    # Half the groups are there at 10 s, the others at 20 s; training the first four takes 8.08 s, so it waits 1.92 s.
    engine = EngineProfile(running=(64.0,), tokens_per_s=(640.0,), max_num_seqs=8)
    outcome = simulate(by_rounds(), profile_of(engine=engine), num_updates=4)
    (r,) = metrics_of(outcome)
    assert r["first_group_s"] == pytest.approx(10.0)
    assert r["rollout_to_train_end_s"] == pytest.approx(20.0 + 4 * GROUP_S)
    wait_s = 10.0 + (10.0 - 4 * GROUP_S)
    assert r["waiting_ratio"] == pytest.approx(wait_s / (20.0 + 4 * GROUP_S))


@pytest.mark.parametrize("num_engines", [1, 2, 4])
def test_frontier_is_one_over_all_engines(num_engines):
    # Two groups at a time on however many engines: 8 groups in four waves of 10 s.
    config = by_rounds(admission=dict(policy="frontier", width=2))
    profile = profile_of(num_engines=num_engines, learner=LearnerProfile(seconds_per_token=1e-6))
    (r,) = metrics_of(simulate(config, profile, num_updates=4))
    assert r["first_group_s"] == pytest.approx(10.0)
    assert r["rollout_to_train_end_s"] == pytest.approx(40.0, abs=0.01)


def test_first_dispatch_ends_with_the_group_that_fills_the_first_update():
    config = by_rounds(admission=dict(policy="frontier", width=1))  # one group after the other
    (r,) = metrics_of(simulate(config, profile_of(learner=LearnerProfile(seconds_per_token=1e-6)), num_updates=4))
    assert (r["first_group_s"], r["first_dispatch_s"]) == (pytest.approx(10.0), pytest.approx(20.0))


def test_tickets_are_shared_out_evenly():
    # 16 requests at total speed 40 whatever runs: one engine takes 40 s, two take 20 s, if each gets half.
    engine = EngineProfile(running=(1.0,), tokens_per_s=(40.0,), max_num_seqs=64)
    for num_engines in (1, 2, 4):
        profile = profile_of(engine=engine, num_engines=num_engines)
        outcome = simulate(by_rounds(rounds=dict(train_start="round_complete")), profile, num_updates=4)
        assert metrics_of(outcome)[0]["first_group_s"] == pytest.approx(40.0 / num_engines)


def test_samples_of_a_long_prompt_are_spread_over_the_engines():
    # One prompt of four has long responses. Whole, its four run on one engine at a quarter of its speed each; spread,
    # each engine runs one of them, the other three places soon free.
    engine = EngineProfile(running=(1.0,), tokens_per_s=(10.0,), max_num_seqs=4)
    responses = LengthProfile(kind="groups", groups=((400,) * 4, (4,) * 4, (4,) * 4, (4,) * 4))
    took = {}
    for unit in ("group", "sample"):
        config = by_rounds(
            rounds=dict(train_start="round_complete", groups_per_round=4, groups_per_update=4, samples_per_group=4),
            admission=dict(unit=unit),
        )
        profile = profile_of(engine=engine, num_engines=4, response_tokens=responses)
        took[unit] = metrics_of(simulate(config, profile, num_updates=1))[0]["first_group_s"]
    assert took["group"] == pytest.approx(4 * 400 / 10)
    assert took["sample"] == pytest.approx((400 + 3 * 4) / 10)


def test_publish_costs_are_where_the_code_has_them():
    # Export keeps the learner, after what the round is measured by; prefetch and pause come before the next round's
    # first token.
    config = by_rounds(rounds=dict(train_start="round_complete"))
    publish = publishing(export_s=3.0, prefetch_s=2.0, pause_s=1.0)
    first, second = metrics_of(simulate(config, profile_of(publish=publish), num_updates=8))
    assert first["rollout_to_train_end_s"] == pytest.approx(10.0 + 8 * GROUP_S)
    assert second["first_group_s"] == pytest.approx(2.0 + 1.0 + 10.0)


def test_window_with_slow_learner_has_the_lag_of_what_may_be_before_a_group():
    # Generation is quick beside training. Before a new group are 2 complete ones, 2 of the backlog and at most 8 in
    # progress: 6 updates' worth.
    config = by_window(U=2, admission=dict(width=8))
    profile = profile_of(learner=LearnerProfile(seconds_per_token=1.0))
    outcome = simulate(config, profile, num_updates=20, warmup_updates=10)
    assert 1 <= outcome.group_lag.mean < outcome.group_lag.max <= 6
    assert outcome.learner_utilisation == pytest.approx(1.0, abs=0.01)


def test_async_ratio_zero_waits_for_each_updates_weights():
    config = by_window(U=2, admission=dict(async_ratio=0.0))
    outcome = simulate(config, profile_of(), num_updates=10)
    assert outcome.group_lag.max == 0
    assert outcome.step_s == pytest.approx(10.0 + 2 * GROUP_S)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0])
def test_a_group_is_never_trained_at_more_than_its_lag_bound(alpha):
    config = by_window(U=2, admission=dict(async_ratio=alpha), rounds=dict(max_lag_steps=1))
    profile = profile_of(response_tokens=lengths(5, 400))
    outcome = simulate(config, profile, num_updates=40)
    assert outcome.group_lag.max <= 1


def test_in_flight_update_splits_a_response_between_versions():
    config = by_window(U=1, admission=dict(width=2))
    outcome = simulate(config, profile_of(), num_updates=20, warmup_updates=4)
    # Two groups are generated together, for 10 s, in which two are trained: their tokens come from several versions.
    assert 0 < outcome.token_lag.mean < outcome.group_lag.mean <= 3


def test_races_end_with_the_first_k_and_the_losers_get_their_own_round():
    config = by_rounds(R=4, U=4, rounds=dict(overprovision_prompts=1.25, overprovision_samples=1.5))
    groups = ((100, 100, 900), (100, 100, 900), (50, 50, 9), (100, 100, 7), (800, 900, 950))
    profile = profile_of(response_tokens=LengthProfile(kind="groups", groups=groups))
    outcome = simulate(config, profile, num_updates=5)
    rounds = metrics_of(outcome)
    # The fifth prompt is long in every pass: four short rounds of 10 s at most, then one of the four losers: 90 s.
    assert [r["first_group_s"] < 11 for r in rounds] == [True, True, True, True, False]
    assert rounds[-1]["rollout_to_train_end_s"] > 90
    assert outcome.num_dropped == {}  # the losers were ended, not left to finish for nobody
    assert outcome.wasted_tokens > 0


@pytest.mark.heavy
def test_full_queue_drops_the_oldest_and_generates_it_anew():
    slow = profile_of(learner=LearnerProfile(seconds_per_token=0.2))
    blocked = simulate(by_window(admission=dict(width=16)), slow, num_updates=30, warmup_updates=10)
    config = by_window(admission=dict(width=16, when_full="drop_oldest", queue_groups=2))
    dropping = simulate(config, slow, num_updates=30, warmup_updates=10)
    assert blocked.num_dropped == {}
    assert dropping.num_dropped["overflow"] > 0
    assert dropping.group_lag.mean < blocked.group_lag.mean


def test_groups_that_teach_nothing_are_replaced_in_their_round():
    config = by_rounds(rounds=dict(filter_zero_variance=True))
    outcome = simulate(config, profile_of(zero_variance_groups=0.5), num_updates=40)
    assert outcome.num_samples == 40 * 2 * 2
    assert 40 < outcome.num_dropped["zero_variance"] < 130  # 80 are expected


def test_drain_ends_what_an_actor_admitted_by_the_old_weights_and_claims_nothing_meanwhile():
    # Three places, K = 2, 10 s a response: groups 0 and 1 are admitted, and the last request of 1 waits in the engine.
    engine = EngineProfile(running=(64.0,), tokens_per_s=(640.0,), max_num_seqs=3)
    profile = profile_of(engine=engine, publish=publishing(pause_s=1.0))
    calendar, served = EventQueue(), {}

    def on_group(group):
        served[group.ticket.id] = (calendar.now_s, group.tokens_by_step)

    drawn = Lengths(profile.response_tokens, profile.prompt_tokens, seed=0)
    rollout = SimActors(by_rounds(R=4, at_publish="drain"), profile, drawn, calendar, on_group)
    tasks = [Task.judged_by("exact", answer=str(n)) for n in range(4)]
    rollout.offer([make_ticket(str(n), order=n, task=task) for n, task in enumerate(tasks)])
    calendar.at(5.0, rollout.update, 1)
    while calendar.step():
        pass
    assert served == {
        "0": (pytest.approx(10.0), {0: pytest.approx(200)}),
        "1": (pytest.approx(20.0), {0: pytest.approx(200)}),  # its last request started at 10 s
        "2": (pytest.approx(31.0), {1: pytest.approx(200)}),  # not before the pause
        "3": (pytest.approx(41.0), {1: pytest.approx(200)}),
    }


SCHEDULES = {
    "serial": by_rounds(rounds=dict(train_start="round_complete")),
    "cgp": by_rounds(),
    "rolloutpipe": by_rounds(admission=dict(policy="frontier")),
    "frontier by sample": by_rounds(admission=dict(policy="frontier", unit="sample")),
    "rollpacker": by_rounds(R=4, U=4, rounds=dict(overprovision_prompts=1.5, overprovision_samples=1.5)),
    "pipelinerl": by_window(admission=dict(width=8)),
    "recompute": by_window(admission=dict(width=8), kv_cache="recompute"),
    "roll_flash": by_window(
        rounds=dict(max_lag_steps=3), admission=dict(async_ratio=2.0, unit="sample"), at_publish="abort_and_resume"
    ),
    "drain": by_window(admission=dict(width=8), at_publish="drain"),
    "race by sample": by_window(rounds=dict(overprovision_samples=1.5), admission=dict(width=8, unit="sample")),
    "drop oldest": by_window(admission=dict(width=8, when_full="drop_oldest")),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", SCHEDULES)
@given(
    sigma=st.floats(0, 1.5),
    num_engines=st.integers(1, 3),
    capacity=st.sampled_from([0, 3000]),
    per_token_s=st.sampled_from([0.001, 0.05]),
    publish_s=st.sampled_from([0.0, 2.0]),
    is_shared=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=15)
def test_no_ticket_is_lost_or_trained_twice(
    name, sigma, num_engines, capacity, per_token_s, publish_s, is_shared, seed
):
    config = SCHEDULES[name]
    profile = profile_of(
        engine=EngineProfile(
            running=(1.0, 8.0), tokens_per_s=(10.0, 60.0), max_num_seqs=8, kv_capacity_tokens=capacity
        ),
        response_tokens=LengthProfile(kind="lognormal", median=60, sigma=sigma, max_tokens=900, prompt_share=0.5),
        learner=LearnerProfile(seconds_per_token=per_token_s),
        publish=publishing(export_s=publish_s, prefetch_s=publish_s, pause_s=publish_s / 4),
        num_engines=num_engines,
        num_learner_chips=0 if is_shared and config.publish.when == "round_end" else 1,
    )
    outcome = simulate(config, profile, num_updates=16, seed=seed)
    # A ticket lost would let the run stand still, one trained twice makes the real planner raise KeyError.
    per_update = config.rounds.groups_per_update * config.rounds.samples_per_group
    assert (outcome.num_steps, outcome.num_samples) == (16, 16 * per_update)
    assert outcome.seconds == pytest.approx(outcome.num_steps * outcome.step_s)
    assert 0 < outcome.learner_utilisation <= 1 + 1e-9
    assert 0 < outcome.engine_utilisation <= 1 + 1e-9
    assert 0 < outcome.engine_fill <= 1 + 1e-9
    if (bound := config.rounds.max_lag_steps) is not None:
        assert outcome.group_lag.max <= bound
    if config.publish.when == "round_end":
        steps_per_round = config.rounds.groups_per_round // config.rounds.groups_per_update
        assert outcome.group_lag.max == steps_per_round - 1
        assert len(outcome.rounds) == 16 // steps_per_round


def test_same_seed_same_outcome_another_seed_another():
    profile = profile_of(response_tokens=LengthProfile(kind="lognormal", median=60, sigma=1.0))
    a, b, c = (simulate(by_rounds(), profile, num_updates=8, seed=s) for s in (1, 1, 2))
    assert a == b
    assert a.seconds != c.seconds


def test_what_can_not_run_says_so():
    with pytest.raises(ValueError, match="at least 1 update"):
        simulate(by_rounds(), profile_of(), num_updates=0)
    small = dataclasses.replace(profile_of().engine, kv_capacity_tokens=50)
    with pytest.raises(ValueError, match="can never fit"):
        simulate(by_rounds(), profile_of(engine=small), num_updates=4)


@pytest.mark.parametrize("unit", ["group", "sample"])
@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
@pytest.mark.parametrize("training_speed", [1.1, 10.0])
def test_window_keeps_the_engines_full_whatever_the_lengths(unit, kind, training_speed):
    # Six engines of 16 places: H is what they hold. An engine makes 16 tokens/s when full.
    config = by_window(U=8, K=4, admission=dict(sequences=96, unit=unit))
    lengths = (
        LengthProfile(kind="uniform", max_tokens=400)
        if kind == "uniform"
        else LengthProfile(kind="lognormal", median=60, sigma=1.0, max_tokens=800)
    )
    engine = dataclasses.replace(profile_of().engine, running=(16.0,), tokens_per_s=(16.0,), max_num_seqs=16)
    profile = profile_of(
        num_engines=6,
        engine=engine,
        response_tokens=lengths,
        learner=LearnerProfile(seconds_per_token=1 / (96 * training_speed)),
    )
    outcome = simulate(config, profile, num_updates=15, warmup_updates=15)
    assert outcome.engine_fill >= 0.95


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_window_under_an_async_ratio_is_spread_over_all_engines(alpha):
    # Eight engines, each with places for its part of what is issued, all responses alike; training takes a tenth.
    config = by_window(U=8, K=4, admission=dict(async_ratio=alpha))
    places = round((1 + alpha) * 4)
    engine = dataclasses.replace(profile_of().engine, running=(1.0,), tokens_per_s=(1.0,), max_num_seqs=places)
    profile = profile_of(
        num_engines=8,
        engine=engine,
        response_tokens=LengthProfile(kind="uniform", min_tokens=100, max_tokens=100),
        learner=LearnerProfile(seconds_per_token=1 / 80),
    )
    outcome = simulate(config, profile, num_updates=15, warmup_updates=15)
    assert outcome.engine_fill >= 0.85


def test_no_sample_is_trained_that_began_more_than_alpha_updates_ago():
    config = by_window(U=2, K=4, admission=dict(async_ratio=1.0, unit="sample"), at_publish="abort_and_resume")
    lengths = LengthProfile(kind="lognormal", median=60, sigma=1.0, max_tokens=800)
    outcome = simulate(config, profile_of(response_tokens=lengths), num_updates=30, warmup_updates=5)
    assert outcome.group_lag.max == 1
    assert outcome.wasted_tokens == 0 and not outcome.num_dropped  # the learner waits for what would be too old


def test_stale_sample_alone_is_asked_for_anew():
    calendar, done = EventQueue(), []
    config = by_window(U=1, K=3, admission=dict(async_ratio=4.0, unit="sample"))
    profile = profile_of(response_tokens=LengthProfile(kind="groups", groups=((10, 20, 30),)))
    drawn = Lengths(profile.response_tokens, profile.prompt_tokens, seed=0)
    rollout = SimActors(config, profile, drawn, calendar, done.append)
    ticket = make_ticket("t", order=0, num_samples=3, num_requests=3, task=Task.judged_by("exact", answer="0"))
    rollout.offer([ticket])
    calendar.at(0.15, rollout.update, 1)
    while calendar.step():
        pass
    assert done.pop().tokens_by_step.keys() == {0, 1}
    started = calendar.now_s
    rollout.offer_again(ticket, attempt=1, older_than=1)
    while calendar.step():
        pass
    assert calendar.now_s > started and len(done) == 1
