"""The adaptive timeout, and an actor's part in what it is made of."""

import asyncio
import math
import subprocess
import sys
import threading
from typing import Any, cast

import blake3
import hypothesis.strategies as st
import pytest
from hypothesis import given

from actor.rewards.adaptive_timeout import TASKS_AT_ONCE, AdaptiveTimeouts, task_key, timeout_s
from bridge.rollout_types import Task
from bridge.store.store_types import MAX_CASES, StoreLostError
from configs.sections import RewardsConfig
from tests.actor.fakes import until

PAPER: dict[str, Any] = {"factor": 1.5, "min_s": 2.0, "max_s": 30.0}


def task_of(verifier: str = "code", answer: str = "a", metadata: str = '{"cases": [1]}') -> Task:
    return Task.judged_by(verifier, answer=answer, metadata=metadata)


def anchors_of(store: Any, **settings: Any) -> AdaptiveTimeouts:
    return AdaptiveTimeouts(store, **PAPER | settings)


@pytest.mark.parametrize(
    ("anchor_s", "want_s"),
    [(None, 30.0), (0.0, 2.0), (1.0, 2.0), (1.4, 2.1), (4.0, 6.0), (19.9, 29.85), (20.0, 30.0), (1e9, 30.0)],
)
def test_timeout_is_the_papers(anchor_s, want_s):
    assert timeout_s(anchor_s, **PAPER) == pytest.approx(want_s)


@given(
    anchor_s=st.floats(0, 1e6),
    factor=st.floats(1, 10),
    bounds=st.lists(st.floats(0.001, 1e6), min_size=2, max_size=2).map(sorted),
)
def test_timeout_is_the_middle_of_three_numbers(anchor_s, factor, bounds):
    got = timeout_s(anchor_s, factor=factor, min_s=bounds[0], max_s=bounds[1])
    assert got == sorted([factor * anchor_s, *bounds])[1]


@pytest.mark.parametrize(
    "wrong",
    [{"factor": 0.9}, {"factor": math.nan}, {"min_s": 0.0}, {"min_s": 31.0}, {"max_s": math.inf}, {"max_s": math.nan}],
    ids=str,
)
def test_timeout_of_settings_that_fit_no_run_refused(wrong):
    with pytest.raises(ValueError, match="factor"):
        timeout_s(1.0, **PAPER | wrong)
    with pytest.raises(ValueError, match="factor"):
        anchors_of(Store(), **wrong)


def test_task_key_tells_tasks_apart_by_what_their_test_cases_are_and_nothing_else():
    others = [
        {"verifier": "mine:score"},
        {"answer": "b"},
        {"metadata": '{"cases": [2]}'},
        {"answer": "", "metadata": "a"},
    ]
    keys = [task_key(task_of(**other)) for other in ({}, *others)]
    assert len(set(keys)) == len(keys)
    assert all(len(k) == 32 and set(k) <= set("0123456789abcdef") for k in keys)
    assert task_key(task_of()) == keys[0]


@pytest.mark.heavy
def test_task_key_is_the_same_in_every_process():
    code = "from tests.actor.rewards.test_adaptive_timeout import task_key, task_of; print(task_key(task_of()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    in_msgpack = b"\x93" + b"\x91\xa4code" + b"\xa1a" + b'\xae{"cases": [1]}'
    assert said == task_key(task_of()) == blake3.blake3(in_msgpack).hexdigest()[:32]


class Store:
    """A store's two calls; the maximum, as the real one's tests show. `gate` holds up whoever calls."""

    def __init__(self):
        self.rows: dict[str, tuple[float, ...]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.errors: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.num_at_once = self.most_at_once = 0

    def anchors(self, keys):
        self.begin("anchors", list(keys))
        return {k: self.rows[k] for k in keys if k in self.rows}

    def raise_anchors(self, anchors):
        self.begin("raise", dict(anchors))
        for key, case_s in anchors.items():
            here = list(self.rows.get(key, ()))
            here += [0.0] * (len(case_s) - len(here))
            self.rows[key] = tuple([max(a, b) for a, b in zip(here, case_s, strict=False)] + here[len(case_s) :])

    def begin(self, name, given):
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        self.calls.append((name, given))
        try:
            assert self.gate.wait(60)
            if self.errors:
                raise self.errors.pop(0)
        finally:
            self.num_at_once -= 1

    def num_calls(self, name):
        return sum(called == name for called, _ in self.calls)


async def test_timeouts_are_of_what_other_actors_found_once_the_store_has_said_so():
    store = Store()
    store.rows = {"a": (0.1, 4.0, 100.0)}
    anchors = anchors_of(store)
    assert anchors.timeouts_s("a") == ()
    anchors.begin("a")
    await until(lambda: anchors.timeouts_s("a") != (), "the store has said what it knows")
    assert anchors.timeouts_s("a") == pytest.approx((2.0, 6.0, 30.0))
    assert anchors.timeouts_s("b") == ()
    store.rows["a"] = (0.1, 8.0, 100.0)
    anchors.begin("a")
    await until(lambda: anchors.timeouts_s("a")[1] > 6.0, "a later group hears of it")
    assert anchors.timeouts_s("a") == pytest.approx((2.0, 12.0, 30.0))
    await anchors.close()


async def test_timeouts_of_a_run_have_its_factor_and_its_bounds():
    store = Store()
    store.rows = {"a": (0.1, 2.0, 9.0)}
    settings = RewardsConfig(timeout_factor=3.0, min_timeout_s=1.0, max_timeout_s=10.0)
    anchors = AdaptiveTimeouts.of_config(cast(Any, store), settings)
    anchors.begin("a")
    await until(lambda: anchors.timeouts_s("a") != (), "the store has said what it knows")
    assert anchors.timeouts_s("a") == pytest.approx((1.0, 6.0, 10.0))
    await anchors.close()


async def test_run_is_allowed_below_the_present_timeout_of_its_last_case():
    anchors = anchors_of(Store())
    assert anchors.allows("a", (99.0, 29.9)) and not anchors.allows("a", (1.0, 30.0))
    anchors.passed("a", (1.0, 4.0))
    assert anchors.allows("a", (99.0, 5.9)) and not anchors.allows("a", (0.1, 6.0))
    assert not anchors.allows("a", ()) and anchors.allows("a", (0.1, 0.1, 29.9))
    await anchors.close()


async def test_correct_run_lengthens_timeouts_here_at_once_and_the_store_hears_of_it():
    store = Store()
    store.rows = {"a": (6.0, 1.0)}
    anchors = anchors_of(store)
    anchors.passed("a", (4.0, 8.0))
    assert anchors.timeouts_s("a") == (6.0, 12.0)
    await anchors.close()
    assert store.rows == {"a": (6.0, 8.0)}


async def test_store_is_told_of_runs_that_are_longer_by_more_than_noise_alone():
    store = Store()
    anchors = anchors_of(store)
    for case_s in [(4.0, 0.0), (4.0, 0.0), (4.03, 0.0), (3.0, 0.0009), (1.0,)]:
        anchors.passed("a", case_s)
        await anchors.close()
    assert store.calls == [("raise", {"a": (4.0, 0.0)})]
    anchors.passed("a", (4.05, 0.0))
    anchors.passed("a", (4.0, 0.0, 0.0))
    await anchors.close()
    assert store.rows == {"a": (4.05, 0.0, 0.0)}


async def test_store_is_called_once_at_a_time_and_told_of_many_runs_in_one_call():
    store = Store()
    anchors = anchors_of(store)
    store.gate.clear()
    anchors.passed("first", (1.0,))
    await until(lambda: len(store.calls) == 1, "the first call is on its way")
    num_tasks = TASKS_AT_ONCE + 10
    for i in range(num_tasks):
        anchors.begin(f"t{i}")
        for s in (1.0, 2.0, 3.0):
            anchors.passed(f"t{i}", (s,))
    assert len(store.calls) == 1
    store.gate.set()
    await until(lambda: store.num_calls("anchors") == 2, "all were asked about")
    await anchors.close()
    assert store.rows == {"first": (1.0,)} | {f"t{i}": (3.0,) for i in range(num_tasks)}
    assert store.num_calls("raise") == 3 and store.most_at_once == 1
    assert max(len(given) for _, given in store.calls) == TASKS_AT_ONCE


async def test_close_waits_until_the_store_has_everything():
    store = Store()
    anchors = anchors_of(store)
    store.gate.clear()
    anchors.passed("a", (1.0,))
    await until(lambda: len(store.calls) == 1, "a call is on its way")
    anchors.passed("a", (2.0,))
    anchors.passed("b", (3.0,))
    closing = asyncio.create_task(anchors.close())
    await asyncio.sleep(0)
    assert not closing.done()
    store.gate.set()
    await closing
    assert store.rows == {"a": (2.0,), "b": (3.0,)}


async def test_close_that_is_given_up_loses_nothing_that_is_on_its_way():
    store = Store()
    anchors = anchors_of(store)
    store.gate.clear()
    anchors.passed("a", (1.0,))
    closing = asyncio.create_task(anchors.close())
    await until(lambda: len(store.calls) == 1, "a call is on its way")
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    store.gate.set()
    await anchors.close()
    assert store.rows == {"a": (1.0,)} and store.num_calls("raise") == 1


async def test_store_that_is_away_delays_nothing_and_hears_of_all_when_it_is_back():
    store = Store()
    store.rows = {"b": (4.0,)}
    store.errors = [StoreLostError("away"), StoreLostError("still away")]
    anchors = anchors_of(store)
    anchors.passed("a", (6.0,))
    await until(lambda: len(store.errors) == 1, "the store was away once")
    assert anchors.timeouts_s("a") == (9.0,)
    anchors.passed("a", (8.0,))
    await until(lambda: not store.errors, "and once more")
    anchors.begin("b")
    await until(lambda: anchors.timeouts_s("b") != (), "it is back")
    assert anchors.timeouts_s("a") == (12.0,) and anchors.timeouts_s("b") == (6.0,)
    await anchors.close()
    assert store.rows == {"a": (8.0,), "b": (4.0,)}


async def test_question_that_the_store_missed_is_asked_again():
    store = Store()
    store.rows = {"a": (4.0,), "b": (6.0,)}
    store.errors = [StoreLostError("away")]
    anchors = anchors_of(store)
    anchors.begin("a")
    await until(lambda: not store.errors, "the store was away")
    anchors.begin("b")
    await until(lambda: anchors.timeouts_s("b") != () and anchors.timeouts_s("a") != (), "both are known")
    await anchors.close()


async def test_close_says_what_a_store_that_stays_away_was_not_told():
    store = Store()
    store.errors = [StoreLostError("away")] * 9
    anchors = anchors_of(store)
    anchors.passed("a", (6.0,))
    with pytest.raises(StoreLostError):
        await anchors.close()
    store.errors.clear()
    await anchors.close()
    assert store.rows == {"a": (6.0,)}


async def test_refusal_of_the_store_is_raised_at_the_next_call():
    store = Store()
    store.errors = [PermissionError("no")]
    anchors = anchors_of(store)
    anchors.begin("a")
    await until(lambda: not store.errors, "it refused")
    with pytest.raises(PermissionError, match="no"):
        while True:
            anchors.begin("a")
            await asyncio.sleep(0)
    await anchors.close()


async def test_cache_keeps_the_tasks_used_last_and_their_runs_are_written_all_the_same():
    store = Store()
    anchors = anchors_of(store, max_known_cases=6)
    for key in "abc":
        anchors.passed(key, (4.0, 6.0))
    assert anchors.timeouts_s("a") == (6.0, 9.0)  # used: "b" is the one that goes
    anchors.passed("d", (8.0, 8.0))
    assert [k for k in "abcd" if anchors.timeouts_s(k)] == ["a", "c", "d"]
    anchors.passed("e", (8.0,) * 7)
    assert [k for k in "abcde" if anchors.timeouts_s(k)] == ["e"]  # one task is kept, however large
    await anchors.close()
    assert sorted(store.rows) == list("abcde")


async def test_run_of_more_cases_than_the_store_takes_has_anchors_of_the_first():
    store = Store()
    anchors = anchors_of(store)
    anchors.passed("a", (4.0,) * (MAX_CASES + 1))
    anchors.passed("b", (1e9,))
    await anchors.close()
    assert len(anchors.timeouts_s("a")) == len(store.rows["a"]) == MAX_CASES
    assert store.rows["b"] == (99_999.999,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_time_that_is_none_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        anchors_of(Store()).passed("a", (1.0, bad))
