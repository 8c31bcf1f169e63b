import collections
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.types import Heartbeat
from learner.step_books import NotFiniteError, StepBooks
from tests.bridge.factories import make_report
from tests.learner.streams import MODEL, config_of


def books_of(*, skipped: int = 0, beats: Sequence[Heartbeat] = ()) -> StepBooks:
    """Of a run that goes on from a checkpoint in which so many updates were skipped."""
    stream: Any = SimpleNamespace(
        step=7,
        wait_s=0.0,
        num_dropped_updates=0,
        dropped=collections.Counter(),
        trained=lambda *a: None,
    )
    store: Any = SimpleNamespace(counts=lambda: {"reissued": 0}, heartbeats=lambda: list(beats))
    return StepBooks(config_of().optimizer, MODEL, stream=stream, store=store, num_skipped=skipped)


def update(books: StepBooks, skipped: int) -> dict[str, Any]:
    """The row of one update."""
    row, _ = books.close({"skipped_updates": skipped, "real_tokens": 10, "tokens": 5}, 0.0, 1.0)
    books.check_skipped()
    return row


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


def test_close_takes_the_slowest_live_actor_and_what_all_sampled_for_nothing():
    def beat(process: str, report, *, age_s: float = 0.0) -> Heartbeat:
        return Heartbeat(process=process, role="actor", pid=1, time_s=time.time() - age_s, report=report)

    beats = [
        Heartbeat(process="learner", role="learner", pid=1, time_s=time.time()),
        beat("starting", None),
        beat("no update yet", make_report(prefetch_s=3.0, num_sampled_tokens=10, num_emitted_tokens=7)),
        beat("slow", make_report(prefetch_s=1.0, pause_s=0.5, load_s=0.25, num_sampled_tokens=5, num_emitted_tokens=5)),
        beat("quick", make_report(prefetch_s=2.0, pause_s=0.25, load_s=0.125)),
        beat("dead", make_report(prefetch_s=99.0, pause_s=99.0, load_s=99.0, num_sampled_tokens=99), age_s=3600.0),
    ]
    row = update(books_of(beats=beats), 0)
    assert {k: v for k, v in row.items() if k.startswith("actor/")} == {
        "actor/pause_s": 0.5,
        "actor/load_s": 0.25,
        "actor/prefetch_s": 3.0,
        "actor/not_emitted_tokens": 3.0,
    }
    row = update(books_of(beats=beats[:2]), 0)
    assert {k: v for k, v in row.items() if k.startswith("actor/")} == {"actor/not_emitted_tokens": 0.0}
