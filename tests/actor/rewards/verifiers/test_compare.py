import pytest

from actor.rewards.verifiers.code import as_json, is_printed, is_returned


@pytest.mark.parametrize(
    ("got", "wanted", "equal_in"),
    [
        ("3\n", "3", "exact tokens float"),
        ("3\r\n4\n\n", "3\n4", "exact tokens float"),
        (" 3 \n4", "3\n4\n", "tokens float"),
        ("3 4", "3 4 5", ""),
        ("3.0", "3", "float"),
        ("0.33333334", "0.3333333333", "float"),
        ("0.3334", "0.3333333333", ""),
        ("1000000.5", "1000001", "float"),  # 5e-7 of it
        ("1000000007", "1000000006", ""),  # whole numbers are counted
        ("+7", "7", "float"),
        ("nan", "nan", "exact tokens float"),
        ("inf", "1e999", ""),
        ("1_0", "10", ""),
        ("Yes", "yes", ""),
        ("", "", "exact tokens float"),
    ],
)
def test_printed_text_is_compared_as_the_row_says(got, wanted, equal_in):
    assert [c for c in ("exact", "tokens", "float") if is_printed(got, wanted, c, 1e-6)] == equal_in.split()


@pytest.mark.parametrize(
    ("got", "wanted", "equal_in"),
    [
        (3, 3, "exact tokens float"),
        (3.0, 3, "tokens float"),
        (0.30000000000000004, 0.3, "float"),
        (True, 1, ""),
        (1, True, ""),
        (None, None, "exact tokens float"),
        (None, 0, ""),
        ("a", "a", "exact tokens float"),
        ("3", 3, ""),
        ([1, [2.0]], [1, [2]], "tokens float"),
        ([1], [1, 2], ""),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, "float"),
        ({"a": 1}, {"b": 1}, ""),
        ({"a": 1}, [], ""),
        (10**400, 1.5, ""),
        (10**18, 10**18 + 1, ""),
        (float("nan"), float("nan"), "exact tokens float"),
        (float("inf"), 1e308, ""),
    ],
)
def test_returned_value_is_compared_as_the_row_says(got, wanted, equal_in):
    assert [c for c in ("exact", "tokens", "float") if is_returned(got, wanted, c, 1e-6)] == equal_in.split()


def test_wanted_value_is_what_json_makes_of_it():
    assert as_json({1: (2, 3)}) == {"1": [2, 3]}
    with pytest.raises(ValueError, match="must be JSON: TypeError"):
        as_json({1, 2})


@pytest.mark.parametrize("compare", ["exact", "tokens", "float"])
@pytest.mark.parametrize("end", ["", "x", ".x", "e", ".0e+", " x", "\nx"])
@pytest.mark.parametrize("piece", ["1", "1.", ".1", "1e", "+", "1 ", "\n"])
def test_line_without_end_is_compared_in_a_time_that_grows_as_it_does(piece, end, compare):
    """A quadratic step would take hours of these."""
    said = piece * (1_000_000 // len(piece)) + end
    assert not is_printed(said, "3.5", compare, 1e-6)
