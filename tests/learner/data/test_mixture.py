import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.data.mixture import Mixture, apportion

NAMES = "abcdef"
WHOLE = st.lists(st.integers(1, 12), min_size=1, max_size=6)
ANY = st.lists(st.floats(0.01, 50), min_size=1, max_size=6)
OFF = Fraction(1, 10**9)
"""What shares of 10^-12 may be off by after a thousand picks."""


def picks(weights, count, mixture=None):
    mixture = mixture or Mixture(sorted(weights))
    return [mixture.pick(weights) for _ in range(count)]


def named(weights):
    return dict(zip(NAMES, weights, strict=False))


@given(weights=st.one_of(WHOLE, ANY).map(named), count=st.integers(1, 300))
def test_pick_every_name_is_within_one_of_its_share_at_any_time(weights, count):
    whole = sum(map(Fraction, weights.values()))
    done = picks(weights, count)
    for n in range(1, count + 1):
        for name, weight in weights.items():
            assert abs(done[:n].count(name) - n * Fraction(weight) / whole) < 1 + OFF


@given(
    phases=st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(1, 40)), max_size=8),
    before=st.integers(0, 100),
)
def test_pick_with_changing_weights_follows_them_and_never_picks_what_weighs_nothing(phases, before):
    phases = [(named(w), n) for w, n in phases if sum(w) > 0]
    steps = [weights for weights, n in phases for _ in range(n)]
    mixture, owed = Mixture(list(NAMES[:4])), dict.fromkeys(NAMES[:4], Fraction(0))
    done = []
    state = None
    for n, weights in enumerate(steps):
        if n == before:
            state = json.loads(json.dumps(mixture.get_state()))
        name = mixture.pick(weights)
        done.append(name)
        assert weights[name] > 0
        for other, weight in weights.items():
            owed[other] += Fraction(weight, sum(weights.values()))
        owed[name] -= 1
        assert all(abs(o) < 4 for o in owed.values())
    if state is not None:
        again = Mixture(list(NAMES[:4]))
        again.set_state(state)
        assert [again.pick(weights) for weights in steps[before:]] == done[before:]


def test_set_state_of_other_names_begins_anew():
    mixture = Mixture(["a", "b"])
    picks({"a": 1, "b": 5}, 4, mixture)
    other = Mixture(["a", "c"])
    other.set_state(mixture.get_state())
    assert other.get_state() == Mixture(["a", "c"]).get_state()


WEIGHTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.floats(0, 1e6), min_size=1, max_size=6).filter(
    lambda w: sum(w.values()) > 1e-9
)


@given(weights=WEIGHTS, total=st.integers(0, 10**12))
def test_in_parts_adds_up_and_is_within_a_part_of_the_proportion(weights, total):
    parts = apportion(weights, total)
    assert sum(parts.values()) == total and parts.keys() == weights.keys()
    for name, weight in weights.items():
        assert abs(parts[name] - total * weight / sum(weights.values())) <= 1.5 + total * 1e-15 * len(weights)
        assert weight > 0 or parts[name] == 0


def test_in_parts_largest_remainders_get_what_is_left():
    assert apportion({"a": 5, "b": 3, "c": 1}, 10) == {"a": 6, "b": 3, "c": 1}  # 5.56, 3.33, 1.11


def test_in_parts_without_a_weight_is_refused():
    with pytest.raises(ValueError, match="at least one must be above 0"):
        apportion({"a": 0.0}, 3)
