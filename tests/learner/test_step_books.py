import collections
from types import SimpleNamespace
from typing import Any

import pytest

from learner.step_books import NotFiniteError, StepBooks
from tests.learner.streams import MODEL, config_of


def books_of(*, skipped: int) -> StepBooks:
    """Of a run that goes on from a checkpoint in which so many updates were skipped."""
    stream: Any = SimpleNamespace(
        step=7,
        wait_s=0.0,
        num_dropped_updates=0,
        intake=SimpleNamespace(dropped=collections.Counter()),
        clock=SimpleNamespace(trained=lambda *a: None),
    )
    store: Any = SimpleNamespace(counts=lambda: {"reissued": 0}, heartbeats=lambda: [])
    return StepBooks(config_of().optimizer, MODEL, stream=stream, store=store, num_skipped=skipped)


def update(books: StepBooks, skipped: int) -> None:
    books.close({"skipped_updates": skipped, "real_tokens": 10, "tokens": 5}, 0.0, 1.0)
    books.check_skipped()


def test_check_skipped_stops_after_so_many_in_a_row_and_not_before():
    books = books_of(skipped=0)
    for skipped in (1, 2, 3, 4, 4, 5, 6, 7, 8):  # four, a good one, four
        update(books, skipped)
    with pytest.raises(NotFiniteError, match="the last 5 updates, up to step 7, .*max_skipped_in_a_row=5"):
        update(books, 9)


def test_check_skipped_after_a_restart_counts_only_what_is_new():
    books = books_of(skipped=4)
    for skipped in (4, 5, 6, 7, 8):
        update(books, skipped)
    with pytest.raises(NotFiniteError):
        update(books, 9)
