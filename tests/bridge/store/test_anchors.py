"""The longest correct runs of test cases: numbers that only go up, over both engines."""

import concurrent.futures
import contextlib
import itertools
import math
import random
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from bridge.store.store_types import MAX_CASE_S, MAX_CASES, SupersededLearnerError
from tests.bridge.store.engines import opened

NAMES = st.sampled_from(["a", "b", "c"])
MS = st.integers(0, 99_999_999)
RAISES = st.lists(st.dictionaries(NAMES, st.lists(MS, min_size=1, max_size=5), min_size=1), min_size=1, max_size=6)
EXAMPLES = itertools.count()


def in_seconds(ms):
    return {key: tuple(n / 1000 for n in cases) for key, cases in ms.items()}


def maximum(raises):
    """The oracle, in whole milliseconds."""
    found: dict[str, list[int]] = {}
    for one in raises:
        for key, cases in one.items():
            row = found.setdefault(key, [])
            row += [0] * (len(cases) - len(row))
            for i, ms in enumerate(cases):
                row[i] = ms if ms > row[i] else row[i]
    return in_seconds(found)


def everything(store, limit=7):
    found, last = {}, ""
    while page := store.all_anchors(after=last, limit=limit):
        assert len(page) <= limit and list(page) == sorted(page) and min(page) > last
        found |= page
        last = list(page)[-1]
    return found


def test_anchors_of_tasks_that_nobody_raised_are_left_out(store):
    assert store.anchors(["a"]) == {} and store.anchors([]) == {} and store.all_anchors(limit=9) == {}
    store.raise_anchors({})
    store.raise_anchors({"a": [0.25, 3.0], "b": [1.0]})
    assert store.anchors(["a", "never"]) == {"a": (0.25, 3.0)}
    assert store.all_anchors(limit=9) == {"a": (0.25, 3.0), "b": (1.0,)}


@pytest.mark.heavy
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raises=RAISES, data=st.data())
def test_raises_of_several_actors_in_any_order_and_again_give_the_maximum(place, raises, data):
    prefix = f"{next(EXAMPLES)}-"
    raises = [{prefix + key: cases for key, cases in one.items()} for one in raises]
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(opened(place)) for _ in range(2)]
        again = data.draw(st.lists(st.sampled_from(range(len(raises))), max_size=3))
        for index in data.draw(st.permutations([*range(len(raises)), *again])):
            call = data.draw(st.sampled_from(["raise_anchors", "put_anchors"]))
            getattr(data.draw(st.sampled_from(actors)), call)(in_seconds(raises[index]))
        want = maximum(raises)
        assert actors[0].anchors(list(want)) == want
        assert {k: v for k, v in everything(actors[1]).items() if k.startswith(prefix)} == want


@pytest.mark.heavy
def test_actors_that_raise_the_same_tasks_at_once_lose_nothing(place):
    rng = random.Random(7)
    keys = [f"k{i:02}" for i in range(20)]
    start = threading.Barrier(4)
    work = [
        [{k: [rng.randrange(10**6) for _ in range(3)] for k in rng.sample(keys, 12)} for _ in range(15)]
        for _ in range(4)
    ]

    def act(raises):
        with opened(place) as store:
            start.wait(timeout=60)
            for one in raises:
                store.raise_anchors(in_seconds(one))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(act, work))
    with opened(place) as store:
        assert everything(store) == maximum([one for raises in work for one in raises])


def test_anchor_is_kept_to_a_millisecond(store):
    store.raise_anchors({"a": [1.2344, 1.2346, 0.0004, 0]})
    assert store.anchors(["a"]) == {"a": (1.234, 1.235, 0.0, 0.0)}


def test_largest_task_that_may_be_is_kept_and_raised(store):
    key = "k" * 64
    store.raise_anchors({key: [MAX_CASE_S - 1] * MAX_CASES})
    store.raise_anchors({key: [MAX_CASE_S] * MAX_CASES})
    assert store.anchors([key]) == {key: (MAX_CASE_S,) * MAX_CASES}


@pytest.mark.parametrize(
    ("key", "seconds", "said"),
    [
        ("k" * 65, [1.0], "1 to 64 bytes"),
        ("é" * 33, [1.0], "1 to 64 bytes"),
        ("", [1.0], "1 to 64 bytes"),
        ("a\0", [1.0], "no NUL"),
        ("z", [], "1 to 4096 test cases, got 0"),
        ("z", [1.0] * 4097, "1 to 4096 test cases, got 4097"),
        ("z", [1.0, math.nan], "0 to 99999.999 seconds, got nan"),
        ("z", [math.inf], "got inf"),
        ("z", [-0.001], "got -0.001"),
        ("z", [100_000.0], "got 100000.0"),
    ],
)
@pytest.mark.parametrize("call", ["raise_anchors", "put_anchors"])
def test_anchors_out_of_bounds_are_refused_and_nothing_of_the_call_is_written(store, call, key, seconds, said):
    with pytest.raises(ValueError, match=said):
        getattr(store, call)({"a": [1.0], key: seconds})
    assert store.all_anchors(limit=9) == {}


def test_pages_of_all_anchors_are_in_the_order_of_their_keys(store):
    keys = [f"{i:04}" for i in range(40)] + ["Z", "a", "é"]
    store.raise_anchors({k: [i / 8] for i, k in enumerate(keys)})
    assert everything(store) == {k: (i / 8,) for i, k in enumerate(keys)}
    assert list(store.all_anchors(limit=2, after="0003")) == ["0004", "0005"]
    assert store.all_anchors(limit=0) == {}
    with pytest.raises(ValueError, match="limit"):
        store.all_anchors(limit=-1)


def test_anchors_put_by_a_learner_that_leads_no_more_are_not_written(place):
    with opened(place) as old, opened(place) as new:
        old.acquire_leadership("here", lease_s=60)
        old.put_anchors({"a": [1.0]})
        new.acquire_leadership("here", lease_s=60)
        with pytest.raises(SupersededLearnerError):
            old.put_anchors({"a": [2.0]})
        assert new.anchors(["a"]) == {"a": (1.0,)}


def test_anchors_are_of_one_run(engine, store, tmp_path):
    store.raise_anchors({"a": [1.0]})
    with contextlib.closing(engine.new_place(tmp_path / "other")) as place, opened(place) as other:
        assert other.anchors(["a"]) == {} and other.all_anchors(limit=9) == {}
        other.raise_anchors({"a": [0.5]})
        assert other.anchors(["a"]) == {"a": (0.5,)} and store.anchors(["a"]) == {"a": (1.0,)}
        assert other.all_anchors(limit=9) == {"a": (0.5,)} and store.all_anchors(limit=9) == {"a": (1.0,)}
