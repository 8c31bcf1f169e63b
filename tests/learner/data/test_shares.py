import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.data.mixture import apportion

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
