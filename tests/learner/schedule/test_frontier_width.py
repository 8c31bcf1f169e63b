"""Choice of the frontier's width; the oracles are sums by hand, and a simulation token by token."""

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.heartbeat_types import DecodeSpeed, Heartbeat
from bridge.rollout_types import Version
from configs import sections
from configs.schema import Config
from learner.schedule import frontier_width
from learner.schedule.frontier_width import FrontierWidth, WidthSpeeds, speed_of, with_losers
from tests.bridge.factories import make_group, make_report, make_rollout, make_ticket

R, K, U = 12, 2, 2


def linear(h):
    return 10.0 * h


def test_speed_of_more_sequences_counts_as_that_of_the_fastest_number():
    speeds = WidthSpeeds([[10, 10]] * 4, lambda h: 40.0 if h == 2 else 10.0, places=4)
    assert speeds.share(1) == pytest.approx(1.0)


def test_narrowest_is_at_least_an_update_and_at_most_a_round():
    flat = WidthSpeeds([[10, 10]] * 4, lambda h: 10.0 * min(h, 1), places=8)
    assert [flat.narrowest(least) for least in (1, 3, 9)] == [1, 3, 4]
    assert WidthSpeeds([[10, 10]] * 4, linear, places=8).narrowest(1) == 4


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6),
    places=st.integers(1, 9),
    width=st.integers(1, 6),
    flat_from=st.integers(1, 9),
)
def test_share_is_what_a_simulation_token_by_token_finds(lengths, places, width, flat_from):
    def round_s(width):
        groups = [list(group) for group in lengths]
        running: list[tuple[int, int]] = []
        """(order, index) of the responses that run."""
        seconds = Fraction(0)
        while any(map(any, groups)):
            in_service = [i for i, group in enumerate(groups) if any(group)][:width]
            queue = [(i, n) for i in in_service for n in sorted(range(len(groups[i])), key=lengths[i].__getitem__)]
            queue = [(i, n) for i, n in queue if groups[i][n] and (i, n) not in running]
            while queue and len(running) < places:
                running.append(queue.pop(0))
            # A token of each running response takes h / T(h).
            seconds += Fraction(len(running), min(len(running), flat_from))
            for i, n in running:
                groups[i][n] -= 1
            running = [(i, n) for i, n in running if groups[i][n]]
        return seconds

    speeds = WidthSpeeds(lengths, lambda h: float(min(h, flat_from)), places=places)
    assert speeds.share(width) == pytest.approx(float(round_s(len(lengths)) / round_s(width)))


def test_losers_of_a_groups_race_run_until_its_last_response_ends():
    assert with_losers([3, 9], 4) == [3, 9, 9, 9]
    assert with_losers([3, 9], 2) == [3, 9]


def rows(*speeds: tuple[int, int, float]) -> tuple[DecodeSpeed, ...]:
    """Means and speeds of the given numbers, from enough steps."""
    return tuple(DecodeSpeed(num_steps=n * 16, num_tokens=t * 16, seconds=s * 16) for n, t, s in speeds)


def report(*speeds, places=8, **fields):
    return make_report(max_sequences=places, decode_speeds=rows(*speeds), **fields)


def test_speed_interpolates_what_engines_measured_and_extrapolates_by_the_last_two():
    one = report((0, 0, 0.0), (4, 8, 0.2), (10, 40, 0.5))  # 40 tokens/s at 2 sequences, 80 at 4
    speed = speed_of([one])
    assert speed is not None
    assert [speed(h) for h in (0, 1, 2, 3, 4)] == pytest.approx([0, 20, 40, 60, 80])
    assert speed(8) == pytest.approx(160)
    flat = speed_of([report((0, 0, 0.0), (1, 2, 1.0), (1, 4, 2.0))])
    falling = speed_of([report((0, 0, 0.0), (1, 2, 1.0), (1, 4, 4.0))])
    assert flat is not None and falling is not None
    assert (flat(8), falling(8)) == (pytest.approx(2), pytest.approx(1))
    single = speed_of([report((1, 1, 0.5))])
    assert single is not None and single(8) == pytest.approx(16)


def test_speed_of_several_engines_splits_sequences_by_size_and_shares_what_equal_ones_measured():
    idle = report(places=8)
    busy = report((1, 1, 0.1), (1, 2, 0.1), places=8)
    slow = report((1, 1, 0.1), (1, 2, 0.3), places=8)
    small = report((1, 1, 0.5), places=4)
    speed = speed_of([idle, busy, slow, small])
    assert speed is not None
    # 2 + 2 + 2 + 1 of 7 sequences. Two at a time sampled 4 tokens in 0.4 s; the small engine has a single row.
    assert speed(7) == pytest.approx(3 * 10 + 2)
    few = DecodeSpeed(num_steps=15, num_tokens=60, seconds=99.0)
    assert speed_of([report((1, 1, 0.5), places=4), make_report(max_sequences=4, decode_speeds=(few,))]) is not None
    assert speed_of([make_report(max_sequences=4, decode_speeds=(few,))]) is None
    assert speed_of([busy, report(places=4)]) is None
    assert speed_of([]) is None


def config_of(*, width: Any = "auto", policy: Any = "frontier", **rounds):
    return Config(
        preset="test",
        run=sections.RunConfig(num_updates=R // U),
        rounds=sections.RoundsConfig(groups_per_round=R, samples_per_group=K, groups_per_update=U, **rounds),
        admission=sections.AdmissionConfig(policy=policy, width=width),
    )


TOKENS_PER_S = 100.0
MEASURED = rows(
    (9, 9, 9 / TOKENS_PER_S), (9, 18, 9 / TOKENS_PER_S), (9, 36, 9 / TOKENS_PER_S), (9, 72, 9 / TOKENS_PER_S)
)
"""As fast as it has sequences: 100 tokens/s each."""


@pytest.fixture
def store(store, monkeypatch):
    monkeypatch.setattr(frontier_width, "REPORT_WAIT_S", 0.0)  # no actor reports after a round
    return store


def serve(store, *places, speeds=MEASURED):
    for number, size in enumerate(places):
        beat = make_report(max_sequences=size, decode_speeds=speeds)
        version = Version(incarnation=0, step=0)
        store.heartbeat(Heartbeat(process=f"a{number}", role="actor", pid=1, time_s=1.0, version=version, report=beat))


def width_of(store, saved=None, **config) -> FrontierWidth:
    """That of a learner which starts, or resumes from what was saved."""
    width = FrontierWidth(config_of(**config), store)
    width.resume(saved)
    return width


def train_round(width: FrontierWidth):
    for order in range(R):
        ticket = make_ticket(f"t{order}", order=order, num_samples=K)
        width.observe(make_group(ticket, rollouts=tuple(make_rollout(5) for _ in range(K))))
    return width.end_round()


def claimable(store):
    """Groups that an actor which leaves the width to the store gets of a round."""
    store.put_tickets(make_ticket(f"c{order}", order=100 + order, num_samples=K) for order in range(R))
    claimed = [t.id for t in store.claim("a0", limit=R, lease_s=60, width=R + 1)]
    store.release("a0", claimed)
    return len(claimed)


@pytest.fixture(autouse=True)
def everything_logged(caplog):
    """Whatever another test set as the level of logs."""
    caplog.set_level("INFO", logger="absl")


def test_first_round_is_unlimited_and_the_next_have_the_width_that_keeps_the_engines_full(store, caplog):
    width = width_of(store)
    serve(store, 8)
    assert claimable(store) == R
    assert train_round(width) == {"round/frontier_width": R}
    assert claimable(store) == 4  # 4 groups of 2 fill 8 places
    assert "frontier width chosen groups=4 speed=1.000 places=8" in caplog.text
    serve(store, 8, speeds=rows((9, 9, 1.0)))  # measured later; it stays, as the places do
    assert train_round(width) == {"round/frontier_width": 4}
    assert claimable(store) == 4


def test_width_is_chosen_from_what_engines_report_after_the_round(store, monkeypatch):
    monkeypatch.setattr(frontier_width, "REPORT_WAIT_S", 60.0)
    monkeypatch.setattr(frontier_width.time, "sleep", lambda seconds: serve(store, 8))
    width = width_of(store)
    serve(store, 8, speeds=())  # the last heartbeat of the round
    train_round(width)
    assert claimable(store) == 4


def test_round_waits_once_for_reports_and_a_stop_ends_the_wait(store, monkeypatch):
    monkeypatch.setattr(frontier_width, "REPORT_WAIT_S", 60.0)
    waits = []

    def on_wait():
        waits.append(1)
        if len(waits) == 3:
            monkeypatch.setattr(frontier_width, "REPORT_WAIT_S", 0.0)
            raise InterruptedError

    monkeypatch.setattr(frontier_width.time, "sleep", lambda seconds: None)
    width = FrontierWidth(config_of(), store, on_wait=on_wait)
    serve(store, 8, speeds=())
    with pytest.raises(InterruptedError):
        train_round(width)
    monkeypatch.setattr(frontier_width, "REPORT_WAIT_S", 60.0)
    assert train_round(width) == {"round/frontier_width": R} and len(waits) == 3


def test_width_is_saved_and_set_again_by_a_learner_that_resumes(store):
    serve(store, 8)
    before = width_of(store)
    train_round(before)
    saved = json.loads(json.dumps(before.get_state()))
    width_of(store)  # from a checkpoint before the first round's end: none, or of another store
    assert claimable(store) == R
    after = width_of(store, saved)
    assert claimable(store) == 4
    store.set_frontier_width(None)  # as in an older copy of the store
    assert train_round(after) == {"round/frontier_width": 4}
    assert claimable(store) == 4
    width_of(store, saved, width=3)
    assert claimable(store) == R  # the actors name the width
    width_of(store, saved, overprovision_samples=1.5)
    assert claimable(store) == R  # chosen for groups of another size


def test_width_is_chosen_again_when_the_engines_have_other_places(store):
    width = width_of(store)
    serve(store, 8)
    train_round(width)
    serve(store, 4)
    train_round(width)
    assert claimable(store) == 2
    serve(store, 4, 2)
    train_round(width)
    assert claimable(store) == 3


def test_width_stays_open_while_no_engine_has_measured(store, caplog):
    width = width_of(store)
    train_round(width)
    assert claimable(store) == R and not caplog.text
    serve(store, 8, speeds=())
    train_round(width)
    assert claimable(store) == R and "not chosen: an engine has timed too few decoding steps" in caplog.text


def test_engine_that_starts_again_and_again_does_not_keep_the_width_open(store):
    width = width_of(store)
    serve(store, 8)
    store.heartbeat(Heartbeat(process="starts", role="actor", pid=1, time_s=1.0))
    train_round(width)
    assert claimable(store) == 4


@pytest.mark.parametrize(("width", "is_told"), [(2, True), (4, False)])
def test_a_given_width_that_costs_speed_warns_once_and_is_kept(store, caplog, width, is_told):
    serve(store, 8, speeds=MEASURED[: int(math.log2(width * K)) + 1])  # it cannot have run more
    given = width_of(store, width=width)
    assert train_round(given) == {"round/frontier_width": width}
    said = "admission.width (2) leaves the engines an estimated 50% of their full speed; set admission.width=auto, or 4"
    assert (said in caplog.text) == is_told and claimable(store) == R
    caplog.clear()
    train_round(given)
    assert not caplog.text


def test_other_policies_have_no_width(store):
    serve(store, 8)
    fifo = width_of(store, policy="fifo")
    assert train_round(fifo) == {} and claimable(store) == R
