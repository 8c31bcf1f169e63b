"""What a stream carries over a restart, takes back, and keeps out; on a real store."""

import dataclasses
import json

import pytest

from bridge import codec
from bridge.heartbeat_types import DecodeSpeed, Heartbeat
from bridge.rollout_types import Ticket
from bridge.store.store_types import FencedError
from configs import sections
from learner.schedule import frontier_width
from learner.schedule.rollout_stream import encode_tickets
from tests.bridge.factories import make_group, make_report, make_rollout, make_ticket
from tests.bridge.store.engines import rows
from tests.learner.schedule.fakes import Sourced
from tests.learner.schedule.stream_learner import K, Learner, config_of


def ids(*orders):
    return [f"{order:09d}" for order in orders]


def test_resume_after_a_committed_save_goes_on_behind_it_and_trains_nothing_twice(store):
    config = config_of(updates=8)
    before = Learner(store, config)
    before.train(1)
    saved = before.save()
    before.stream.acknowledge(1)
    before.train(1)  # lost with the process: its checkpoint was never written

    after = Learner(store, config, saved=saved, step=1)
    after.train(3)
    assert before.trained[:2] + after.trained == ids(*range(8))
    assert after.stream.step == 4 and after.prompts.next == 8
    assert after.marks.of("issue") == [{"tickets": 4, "step": 2}]  # the second round's; the first one's were there


def test_state_that_a_stop_may_save_later_costs_no_encoding_and_stays_as_it_was(store, monkeypatch):
    config = config_of(updates=8, window=True)
    before = Learner(store, config)
    before.train(1)
    want = before.save()
    with monkeypatch.context() as patch:
        patch.setattr(codec, "encode", None)
        held = before.stream.begin_save()
    before.train(2)
    assert json.loads(json.dumps(encode_tickets(held))) == want != before.save()


def test_acknowledge_lets_the_store_forget_only_what_the_committed_checkpoint_contains(store):
    learner = Learner(store, config_of(updates=8))
    learner.train(1)
    learner.stream.begin_save()
    learner.train(1)
    assert store.counts()["acknowledged"] == 0
    learner.stream.acknowledge(None)  # none is committed yet
    assert store.counts()["acknowledged"] == 0
    learner.stream.acknowledge(1)
    assert store.counts()["acknowledged"] == 2
    assert learner.stream.begin_save()["queue"]["unacknowledged"] == ids(2, 3)
    assert learner.marks.of("checkpoint") == [{"step": 1}]


def test_drop_update_asks_for_all_older_weights_made_anew_until_an_update_is_made(store):
    learner = Learner(store, config_of(window=True))
    batches = learner.train(1)  # now at step 1, groups of step 0 wait
    micro = next(batches)
    assert micro.ends_update and learner.stream.group_filter.fresh_from is None
    learner.stream.drop_update()
    assert learner.stream.group_filter.fresh_from is not None and learner.stream.num_dropped_updates == 1
    assert {t.min_version.step for t in learner.stream.planner.open_tickets} == {1}
    assert learner.stream.group_filter.dropped == {"off_policy": 2}
    again = next(batches)
    assert again.ends_update and list(micro.ticket_ids) == list(again.ticket_ids) == ids(2, 3)
    assert [t.id for t in learner.stream.planner.open_tickets][:2] == ids(4, 5)
    learner.stream.end_update()
    assert learner.stream.group_filter.fresh_from is None


@pytest.mark.heavy
def test_rewards_are_those_of_the_update_that_was_made_and_a_dropped_ones_are_forgotten(store):
    learner = Learner(store, config_of(window=True))
    batches = learner.train(1)
    # Two groups of K responses that no verifier was asked about.
    assert learner.stream.take_rewards()["verdicts/unscored"] == 2 * K
    next(batches)
    learner.stream.drop_update()
    next(batches)
    learner.stream.end_update()
    assert learner.stream.take_rewards()["verdicts/unscored"] == 2 * K
    assert learner.stream.take_rewards()["verdicts/unscored"] == 0


def test_fence_refuses_the_actors_claims_and_its_waiting_groups(store):
    learner = Learner(store, config_of())
    batches = learner.train(1)
    learner.stream.poll()
    learner.stream.fence("actor", "its logprobs are off", 0.5)
    with pytest.raises(FencedError):
        store.claim("actor", limit=1, lease_s=1)
    assert learner.marks.of("fence") == [{"actor": "actor", "off": 0.5}]
    with pytest.raises(FencedError):  # two groups of it waited; nobody is left to serve them anew
        next(batches)
    assert learner.stream.group_filter.dropped == {"fenced": 2}


def fill_an_update(store, unit, makers, train_start) -> Learner:
    """A learner whose first update, of a round of four groups, waits to be made; `makers` hand its groups in."""
    learner = Learner(store, config_of(unit=unit, train_start=train_start))
    learner.stream._tickets.put_tickets(learner.stream.planner.issue(step=0))
    for actor in makers:
        learner.serve(count=K if unit == "sample" else 1, actor=actor)
    next(micro for micro in learner.stream.micro_batches() if micro.ends_update)
    return learner


def open_orders(store) -> list[int]:
    found = rows(store, """SELECT DISTINCT "order" FROM tickets WHERE run = :run AND state = 'open' ORDER BY 1""")
    return [order for (order,) in found]


@pytest.mark.parametrize("unit", ["group", "sample"])
def test_fence_after_an_update_keeps_its_groups_and_takes_the_actors_others_out_of_the_round(store, unit):
    learner = fill_an_update(store, unit, ("good", "bad", "bad", "good"), "round_complete")
    learner.stream.end_update()
    learner.stream.fence("bad", "its logprobs are off", 0.5)
    assert learner.stream.group_filter.dropped == {"fenced": 1} and not learner.stream.has_fenced_groups
    assert learner.stream.begin_save()["queue"]["unacknowledged"] == ids(0, 1, 3)
    assert open_orders(store) == [2]
    learner.train(1)
    assert learner.trained == ids(3, 2)

    after = Learner(store, config_of())  # of no checkpoint: the group that was trained is not there any more
    after.stream._tickets.put_tickets(after.stream.planner.issue(step=0))
    assert 1 in open_orders(store)


@pytest.mark.parametrize("unit", ["group", "sample"])
def test_full_update_with_a_group_of_a_fenced_actor_is_filled_again(store, unit):
    learner = fill_an_update(store, unit, ("bad", "good"), "group_ready")
    assert not learner.stream.has_fenced_groups
    learner.stream.fence("bad", "its logprobs are off", 0.5)
    learner.stream.unfence("bad")  # its next probe was right; what it sampled before is not
    assert learner.stream.has_fenced_groups
    learner.stream.drop_update(needs_fresh=False)
    assert not learner.stream.has_fenced_groups and learner.stream.num_dropped_updates == 0
    assert open_orders(store) == [0, 1, 2, 3]
    learner.train(2)
    assert sorted(learner.trained) == ids(0, 1, 2, 3) and learner.stream.step == 2


def test_ticket_that_nobody_could_make_a_group_for_gets_another_prompt(store):
    served = []

    def fail_once():
        if not served:
            (ticket, *_) = store.claim("actor", limit=1, lease_s=1000)
            served.append(ticket)
            store.fail_ticket(ticket.id, "no verdict", max_attempts=1)
            assert store.failed() == {ticket.id: "no verdict"}
        else:
            learner.serve()

    learner = Learner(store, config_of(), on_wait=fail_once)
    learner.train(2)
    assert sorted(learner.trained) == ids(0, 1, 2, 3) and learner.stream.group_filter.dropped == {"failed": 1}
    assert learner.prompts.next == 5 and store.failed() == {}


def test_width_of_the_frontier_is_chosen_at_a_rounds_end_and_kept_by_a_learner_that_resumes(store, monkeypatch):
    monkeypatch.setattr(frontier_width, "REPORT_WAIT_S", 0.0)  # the actor reports before
    config = dataclasses.replace(config_of(updates=8), admission=sections.AdmissionConfig(policy="frontier"))
    before = Learner(store, config)
    before.train(2)
    before.stream.trained(1.0, 2.0)
    # Two places: the frontier of U = 2 groups of two responses keeps the engine full.
    speeds = tuple(DecodeSpeed(num_steps=16, num_tokens=16 << i, seconds=1.0) for i in range(2))
    report = make_report(max_sequences=2, decode_speeds=speeds)
    store.heartbeat(Heartbeat(process="actor", role="actor", pid=1, time_s=1.0, report=report))
    assert before.stream.end_round()["round/frontier_width"] == 4
    saved = before.save()

    store.set_frontier_width(None)
    Learner(store, config, saved=saved, step=2)
    store.put_tickets(make_ticket(f"t{n}", order=100 + n) for n in range(4))
    assert len(store.claim("actor", limit=4, lease_s=60)) == 2


def test_what_is_set_aside_is_in_the_event_log_by_its_name(store):
    learner = Learner(store, config_of(updates=8))
    with learner.stream.aside("save"):
        pass
    assert [name for name, start, end in learner.marks.spans if start <= end] == ["save"]


def test_restarted_window_whose_tickets_are_all_out_ends_its_rounds(store):
    # Nothing is issued after the restart: the round began all the same, when the learner did.
    config = config_of(window=True)
    before = Learner(store, config)
    before.train(1)
    saved = before.save()
    before.stream.acknowledge(1)
    before.serve()

    after = Learner(store, config, saved=saved, step=1)
    after.stream.planner.issue = lambda **_: []
    after.stream.planner.top_up = lambda **_: []
    after.train(1)
    start = after.stream.clock.rollout_start_s
    assert start is not None
    after.stream.trained(start, start + 1.0)
    metrics = after.stream.end_round()
    assert metrics["round/rollout_to_train_end_s"] == pytest.approx(1.0)
    assert (metrics["round/is_long"], metrics["round/long_queue"]) == (0.0, 0)


def test_dispatch_is_told_from_the_one_that_fills_its_update(store):
    learner = Learner(store, config_of(), on_wait=lambda: learner.serve(count=1))
    fills = []
    learner.stream.clock.dispatched = lambda now_s, *, fills_update: fills.append(fills_update)
    learner.train(2)
    assert fills == [False, True, False, True]


def test_window_is_filled_again_while_the_learner_computes(store):
    learner = Learner(store, config_of(window=True))
    batches = learner.stream.micro_batches()
    next(batches)
    learner.serve(count=1)
    assert store.num_unclaimed() < 2
    learner.stream.poll()
    assert store.num_unclaimed() == 2


def test_round_is_not_begun_while_the_last_one_computes(store):
    learner = Learner(store, config_of(updates=8))
    learner.train(2)
    learner.stream.poll()
    assert store.num_unclaimed() == 0 and learner.stream.planner.num_issued == 4


def test_fenced_actors_waiting_groups_go_at_once_so_that_good_ones_take_their_place(store):
    learner = Learner(store, config_of())
    store.put_tickets(learner.stream.planner.issue(step=0))
    learner.serve(count=1)
    make_one(store)
    learner.stream.poll()
    learner.stream.fence("actor", "its logprobs are off", 0.5)
    assert learner.stream.group_filter.dropped == {"fenced": 1}  # the other one's group stays
    assert make_one(store).order == 0
    next(learner.stream.micro_batches())
    assert store.counts()["done"] == 2  # the good one was not thrown away with the bad one


def test_group_of_older_weights_than_its_ticket_asks_for_is_early_and_the_ticket_is_offered_again(store):
    learner = Learner(store, config_of(updates=8))
    learner.train(2)  # the second round is sampled by step 2
    store.put_tickets(learner.stream.planner.issue(step=2))
    early = make_one(store, step=1)
    assert early.min_version.step == 2
    learner.stream.poll()
    assert learner.stream.group_filter.dropped == {"below_min_version": 1}
    assert make_one(store, step=2).id == early.id
    learner.stream.poll()
    assert learner.stream.group_filter.dropped == {"below_min_version": 1}


def test_group_with_one_stale_sample_is_asked_for_that_one_anew(store):
    config = config_of(window=True, max_lag_steps=1)
    config = dataclasses.replace(config, admission=dataclasses.replace(config.admission, unit="sample"))
    learner = Learner(store, config, step=3)
    learner.stream._tickets.put_tickets(learner.stream.planner.issue(step=3, num_unclaimed=lambda: 0))
    for step in (0, 3):
        (ticket,) = store.claim("actor", limit=1, lease_s=1000)
        store.put_group(make_group(ticket, rollouts=(make_rollout(6, step=step),)))
    learner.stream.poll()
    assert learner.stream.group_filter.dropped == {"stale": 1}
    assert store.counts()["reissued"] == 1


def make_one(store, *, step=0) -> Ticket:
    """Another actor's group of the next ticket, by that step's weights."""
    (ticket,) = store.claim("other", limit=1, lease_s=1000)
    rollouts = tuple(make_rollout(6, reward=float(i), step=step) for i in range(K))
    store.put_group(make_group(ticket, rollouts=rollouts, actor="other"))
    return ticket


@pytest.mark.parametrize("window", [False, True])
def test_prompts_are_told_what_each_trained_group_earned_once_and_by_its_source(store, window):
    config = config_of(updates=8, window=window)
    before = Learner(store, config, prompts=Sourced(2))
    before.train(1)
    saved = before.save()
    assert before.prompts.observed == [("s0", 0.5), ("s1", 0.5)]  # K = 2 rewards, 0 and 1
    before.stream.acknowledge(1)
    before.train(1)  # lost with the process

    after = Learner(store, config, saved=saved, step=1, prompts=Sourced(2))
    after.train(3)
    assert after.prompts.observed == [
        (f"s{n}", 0.5) for n in range(2, 8)
    ]  # those that wait arrive again, and count once
