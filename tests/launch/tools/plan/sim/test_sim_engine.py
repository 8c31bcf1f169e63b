"""The simulated engine against two brute-force ones: token by token, and every request's remaining tokens by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.sim.sim_engine import NEVER, SimEngine


def profile_of(**fields) -> EngineProfile:
    defaults: dict[str, Any] = dict(running=(1.0, 4.0, 8.0), tokens_per_s=(10.0, 30.0, 40.0), max_num_seqs=4)
    return EngineProfile(**(defaults | fields))


def run_to_end(engine: SimEngine) -> dict[str, float]:
    """Finish times by id."""
    ends = {}
    while (at := engine.next_event_s()) < NEVER:
        ends |= {f.id: f.time_s for f in engine.advance(at)}
    return ends


def total_speed(profile: EngineProfile, h: int) -> float:
    """The table, read by hand."""
    points = [(0.0, 0.0), *zip(profile.running, profile.tokens_per_s, strict=True)]
    for (h0, t0), (h1, t1) in zip(points, points[1:], strict=False):
        if h <= h1:
            return t0 + (t1 - t0) * (h - h0) / (h1 - h0)
    return points[-1][1]


def token_by_token(
    profile: EngineProfile, requests: list[tuple[int, int, int]], kept_free: float
) -> tuple[dict[str, float], int, int]:
    """(finish times, preemptions, tokens made) of (priority, prompt, length) all there at time 0; one token a turn.

    `kept_free` of the cache stays free when one starts beside others.
    """
    waiting = [[priority, i, prompt, length, 0] for i, (priority, prompt, length) in enumerate(requests)]
    running: list[list[int]] = []
    now, ends, num_preempted, num_tokens = 0.0, {}, 0, 0
    entered = len(requests)
    may_start = True
    while waiting or running:
        if may_start:
            waiting.sort(key=lambda r: (r[0], r[1]))
            while waiting and len(running) < profile.max_num_seqs:
                size = waiting[0][2] + waiting[0][4]
                used = sum(r[2] + r[4] for r in running)
                free = profile.kv_capacity_tokens - used - size
                kept = max(kept_free * profile.kv_capacity_tokens, len(running) + 1)
                if profile.kv_capacity_tokens and running and free < kept:
                    break
                request = waiting.pop(0)
                now += size * profile.prefill_s_per_token
                now += profile.request_s if request[4] == 0 else profile.restart_s
                running.append(request)
        may_start = False
        while profile.kv_capacity_tokens and len(running) > 1:
            if sum(r[2] + r[4] + 1 for r in running) <= profile.kv_capacity_tokens:
                break
            worst = max(running, key=lambda r: (r[0], running.index(r)))
            running.remove(worst)
            worst[1] = entered = entered + 1
            waiting.append(worst)
            num_preempted += 1
        now += len(running) / total_speed(profile, len(running))
        num_tokens += len(running)
        for request in running:
            request[4] += 1
        for request in [r for r in running if r[4] == r[3]]:
            running.remove(request)
            ends[(request[0], request[2], request[3], request[4])] = now
            may_start = True
    return ends, num_preempted, num_tokens


REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=12)


@given(
    requests=REQUESTS,
    capacity=st.one_of(st.just(0), st.integers(18, 60)),
    kept_free=st.sampled_from([None, 0.0, 0.05, 0.4]),
    prefill=st.sampled_from([0.0, 0.03]),
    costs=st.sampled_from([(0.0, 0.0), (0.2, 0.0), (0.2, 0.05)]),
)
def test_finish_times_and_preemptions_are_those_of_one_token_at_a_time(requests, capacity, kept_free, prefill, costs):
    requests = [(i + 100 * p, *rest) for i, (p, *rest) in enumerate(requests)]  # distinct priorities
    fields = {} if kept_free is None else {"kv_watermark": kept_free}  # vLLM keeps nothing free unless told to
    fields |= dict(zip(("request_s", "restart_s"), costs, strict=True))
    profile = profile_of(kv_capacity_tokens=capacity, prefill_s_per_token=prefill, **fields)
    wanted, num_preempted, num_tokens = token_by_token(profile, requests, kept_free or 0.0)
    engine = SimEngine(profile)
    # Everything is known before the first token, so that the lowest priorities start first in both.
    for priority, prompt, length in sorted(requests):
        engine.add(0.0, str(priority), priority=priority, prompt_tokens=prompt, response_tokens=length)
    got = run_to_end(engine)
    assert got == pytest.approx({str(key[0]): end for key, end in wanted.items()})
    assert engine.num_preemptions == num_preempted
    assert num_tokens == sum(length for _, _, length in requests)


def by_hand(profile, arrivals, updates):
    """Finish times with (time, length) arrivals, latency and (time, pause) updates: remaining tokens, one by one."""
    now, stall, ends = 0.0, 0.0, {}
    future = sorted([(t, "add", i) for i, (t, _) in enumerate(arrivals)] + [(t, "update", p) for t, p in updates])
    queue, starting, left = [], [], {}
    while future or queue or starting or left:
        while queue and len(starting) + len(left) < profile.max_num_seqs:
            starting.append((now + profile.start_latency_s, queue.pop(0)))
        for ready, i in [s for s in starting if s[0] <= now + 1e-12]:
            starting.remove((ready, i))
            left[i] = float(arrivals[i][1])
        begin = max(now, stall)
        speed = total_speed(profile, len(left)) / len(left) if left else 0.0
        then = min(
            [begin + n / speed for n in left.values()] + [ready for ready, _ in starting] + [t for t, *_ in future[:1]],
            default=math.inf,
        )
        for i in left:
            left[i] -= max(0.0, then - begin) * speed
        now = max(now, then)
        for i in [i for i, n in left.items() if n < 1e-9]:
            del left[i]
            ends[str(i)] = now
        while future and future[0][0] <= now + 1e-12:
            _, what, value = future.pop(0)
            if what == "add":
                queue.append(value)
            else:
                stall = max(now, stall) + value
    return ends


TIMES = st.integers(0, 400).map(lambda n: n / 16)


@given(
    arrivals=st.lists(st.tuples(TIMES, st.integers(1, 40)), min_size=1, max_size=15),
    updates=st.lists(st.tuples(TIMES, st.sampled_from([0.0, 0.3, 2.0])), max_size=4),
    latency=st.sampled_from([0.0, 0.7]),
)
def test_finish_times_with_arrivals_and_updates_are_those_of_remaining_tokens_by_hand(arrivals, updates, latency):
    profile = profile_of(start_latency_s=latency)
    engine = SimEngine(profile)
    got = {}
    events = sorted([(t, "add", i) for i, (t, _) in enumerate(arrivals)] + [(t, "update", p) for t, p in updates])
    for step, (now, what, value) in enumerate(events):
        got |= {f.id: f.time_s for f in engine.advance(now)}
        if what == "add":
            # By arrival, so that the order of service is plain.
            engine.add(now, str(value), priority=step, prompt_tokens=0, response_tokens=arrivals[value][1])
        else:
            engine.update(now, step=step, pause_s=value, at_publish="keep")
    got |= run_to_end(engine)
    assert got == pytest.approx(by_hand(profile, arrivals, updates), rel=1e-6, abs=1e-6)


OPERATIONS = st.lists(
    st.tuples(st.floats(0, 0.8), st.sampled_from(["add", "add", "add", "abort", "update"])),
    min_size=1,
    max_size=60,
)


@given(
    operations=OPERATIONS,
    mode=st.sampled_from(["keep", "abort_and_resume", "drain"]),
    capacity=st.sampled_from([0, 40, 90]),
    latency=st.sampled_from([0.0, 0.2]),
    data=st.data(),
)
def test_whatever_happens_every_token_is_made_once_under_rising_versions(operations, mode, capacity, latency, data):
    profile = profile_of(kv_capacity_tokens=capacity, prefill_s_per_token=0.01, start_latency_s=latency)
    engine, lengths, finished, now, step = SimEngine(profile), {}, [], 0.0, 0
    aborted = set()
    for i, (gap, what) in enumerate(operations):
        now += gap
        while (at := engine.next_event_s()) <= now:
            finished += engine.advance(at)
            assert engine.num_in_place <= profile.max_num_seqs
            assert not capacity or engine.kv_tokens <= capacity + 1e-6
        finished += engine.advance(now)
        if what == "add":
            lengths[str(i)] = data.draw(st.integers(1, 25))
            prompt = data.draw(st.integers(0, 8))
            engine.add(now, str(i), priority=i % 7, prompt_tokens=prompt, response_tokens=lengths[str(i)])
        elif what == "abort":
            alive = sorted(set(lengths) - {f.id for f in finished} - aborted)
            if alive:
                victim = data.draw(st.sampled_from(alive))
                aborted.add(victim)
                assert 0 <= engine.abort(now, victim) <= lengths[victim]
        else:
            step += 1
            engine.update(now, step=step, pause_s=0.1, at_publish=mode)
    while (at := engine.next_event_s()) < NEVER:
        finished += engine.advance(at)
    assert sorted(f.id for f in finished) == sorted(set(lengths) - aborted)
    assert engine.step == step and engine.num_requests == 0
    assert engine.kv_tokens == pytest.approx(0.0, abs=1e-9)
    for response in finished:
        assert sum(tokens for _, tokens in response.spans) == pytest.approx(lengths[response.id])
        versions = [v for v, _ in response.spans]
        assert versions == sorted(set(versions))
    assert engine.busy_s <= engine.now_s + 1e-9
    assert engine.sequence_s <= profile.max_num_seqs * engine.busy_s + 1e-9


def constant(**fields) -> EngineProfile:
    """Every sequence at 10 tokens/s, whatever else runs."""
    return profile_of(running=(8.0,), tokens_per_s=(80.0,), max_num_seqs=8, **fields)


def test_keep_pauses_and_stamps_tokens_with_their_weights():
    engine = SimEngine(constant())
    engine.add(0.0, "a", priority=0, prompt_tokens=5, response_tokens=40)
    engine.advance(1.5)
    engine.update(1.5, step=1, pause_s=2.0, at_publish="keep")
    (response,) = engine.advance(10.0)
    assert response.time_s == pytest.approx(6.0)
    assert response.spans == [(0, pytest.approx(15)), (1, pytest.approx(25))]


def test_keep_with_recompute_pays_for_the_whole_cache():
    engine = SimEngine(constant(prefill_s_per_token=0.1))
    engine.add(0.0, "a", priority=0, prompt_tokens=5, response_tokens=40)  # decodes from 0.5 s on
    engine.advance(1.5)
    engine.update(1.5, step=1, pause_s=2.0, at_publish="keep", recompute=True)
    (response,) = engine.advance(20.0)
    assert engine.recomputed_tokens == pytest.approx(15)
    assert response.time_s == pytest.approx(1.5 + 2.0 + 1.5 + 3.0)


def test_abort_and_resume_goes_on_from_its_tokens_and_pays_for_them_again():
    engine = SimEngine(constant(prefill_s_per_token=0.1))
    engine.add(0.0, "a", priority=0, prompt_tokens=5, response_tokens=40)
    engine.advance(1.5)
    engine.update(1.5, step=1, pause_s=2.0, at_publish="abort_and_resume")
    (response,) = engine.advance(20.0)
    assert response.time_s == pytest.approx(1.5 + 2.0 + 1.5 + 3.0)
    assert response.spans == [(0, pytest.approx(10)), (1, pytest.approx(30))]


@pytest.mark.parametrize(
    ("at_publish", "recompute", "num_restarts"),
    [("keep", False, 0), ("keep", True, 2), ("abort_and_resume", False, 2)],
)
def test_every_request_that_starts_again_costs_its_restart(at_publish, recompute, num_restarts):
    # Two at 10 tokens/s from 0.6 s on; at 1.6 s each has 10 of 20 tokens, and the pause ends at 3.6 s.
    engine = SimEngine(constant(request_s=0.3, restart_s=0.2))
    for id_ in ("a", "b"):
        engine.add(0.0, id_, priority=0, prompt_tokens=0, response_tokens=20)
    engine.advance(1.6)
    engine.update(1.6, step=1, pause_s=2.0, at_publish=at_publish, recompute=recompute)
    end_s = 3.6 + 0.2 * num_restarts + 1.0
    assert run_to_end(engine) == pytest.approx({"a": end_s, "b": end_s})


def test_watermark_keeps_a_share_of_the_cache_free_when_a_request_starts_beside_others():
    # "a" holds 11 of 100 tokens when "b" of 30 comes: 59 would be left. "b" takes 0.5 s.
    for watermark, start_s in ((0.0, 0.1), (0.59, 0.1), (0.6, 2.0)):
        engine = SimEngine(constant(kv_capacity_tokens=100, kv_watermark=watermark))
        engine.add(0.0, "a", priority=0, prompt_tokens=10, response_tokens=20)
        engine.advance(0.1)
        engine.add(0.1, "b", priority=1, prompt_tokens=30, response_tokens=5)
        assert run_to_end(engine) == pytest.approx({"a": 2.0, "b": start_s + 0.5})


def test_drain_serves_all_that_it_has_by_the_old_weights():
    # One place: "b" waits in the engine when the new weights come; "c" comes after them.
    engine = SimEngine(profile_of(running=(1.0,), tokens_per_s=(10.0,), max_num_seqs=1))
    engine.add(0.0, "a", priority=0, prompt_tokens=0, response_tokens=40)
    engine.add(0.0, "b", priority=1, prompt_tokens=0, response_tokens=10)
    engine.update(0.0, step=1, pause_s=2.0, at_publish="drain")
    engine.advance(4.5)
    assert engine.is_draining and engine.step == 0
    engine.update(4.5, step=2, pause_s=2.0, at_publish="drain")  # newer ones meanwhile
    (b,) = engine.advance(5.0)
    assert (b.id, b.time_s, b.spans) == ("b", pytest.approx(5.0), [(0, pytest.approx(10))])
    assert not engine.is_draining and engine.step == 2
    engine.add(5.0, "c", priority=2, prompt_tokens=0, response_tokens=10)
    (c,) = engine.advance(20.0)
    assert (c.time_s, c.spans) == (pytest.approx(8.0), [(2, pytest.approx(10))])


def test_drain_of_an_empty_engine_takes_the_weights_at_once():
    engine = SimEngine(constant())
    engine.update(1.0, step=1, pause_s=2.0, at_publish="drain")
    assert engine.step == 1 and not engine.is_draining


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(running=(), tokens_per_s=()), "engine.running"),
        (dict(running=(4.0, 2.0), tokens_per_s=(1.0, 2.0)), "rise"),
        (dict(running=(4.0,), tokens_per_s=(0.0,)), "tokens_per_s"),
        (dict(max_num_seqs=0), "max_num_seqs"),
        (dict(prefill_s_per_token=-1.0), "prefill_s_per_token"),
        (dict(request_s=-1.0), "request_s"),
        (dict(restart_s=-1.0), "restart_s"),
        (dict(kv_watermark=1.0), "kv_watermark"),
    ],
)
def test_profile_that_makes_no_sense_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        profile_of(**fields)


def test_request_that_can_never_fit_is_refused():
    engine = SimEngine(profile_of(kv_capacity_tokens=20))
    with pytest.raises(ValueError, match="can never fit"):
        engine.add(0.0, "a", priority=0, prompt_tokens=10, response_tokens=11)
    with pytest.raises(ValueError, match="at least 1"):
        engine.add(0.0, "a", priority=0, prompt_tokens=10, response_tokens=0)


def test_speeds_follow_the_table():
    profile = profile_of(max_num_seqs=12)
    wanted = [total_speed(profile, h) / h for h in range(1, 13)]
    np.testing.assert_allclose(profile.speeds()[1:], wanted)
