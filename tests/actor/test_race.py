"""The race of a ticket's redundant samples: who wins, who is aborted, whatever the order in which they end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.sample_race import SampleRace


def test_first_k_to_end_win_and_the_rest_lose_at_once():
    race = SampleRace(num_samples=2, num_requests=5)
    assert race.finish(3) == []
    assert race.finish(0) == [1, 2, 4]


def test_as_many_requests_as_samples_have_no_losers():
    race = SampleRace(num_samples=3, num_requests=3)
    assert [race.finish(i) for i in (2, 0, 1)] == [[], [], []]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_request_that_does_not_run_cannot_end(index):
    race = SampleRace(num_samples=2, num_requests=3)
    race.finish(0)
    race.finish(1)
    with pytest.raises(KeyError):  # 0 and 1 have won, 2 has lost, 3 never was
        race.finish(index)


def test_request_that_failed_can_not_win_and_the_race_goes_on_while_k_others_can():
    race = SampleRace(num_samples=2, num_requests=4)
    assert race.fail(0) and race.finish(1) == [] and race.fail(2)
    assert race.finish(3) == []  # nobody is left to lose


def test_race_is_lost_when_fewer_than_k_can_still_win():
    race = SampleRace(num_samples=2, num_requests=3)
    assert race.fail(2) and not race.fail(0)


@pytest.mark.parametrize(("num_samples", "num_requests"), [(0, 1), (3, 2)])
def test_race_that_cannot_be_won_is_refused(num_samples, num_requests):
    with pytest.raises(ValueError, match="num_samples <= num_requests"):
        SampleRace(num_samples=num_samples, num_requests=num_requests)


@given(st.data(), st.integers(1, 8), st.integers(0, 8))
def test_each_request_wins_or_loses_once_by_its_place_in_the_order(data, num_samples, num_redundant):
    num_requests = num_samples + num_redundant
    order = data.draw(st.permutations(range(num_requests)))
    race = SampleRace(num_samples=num_samples, num_requests=num_requests)
    losers = [race.finish(index) for index in order[:num_samples]]
    assert losers == [[]] * (num_samples - 1) + [sorted(order[num_samples:])]
