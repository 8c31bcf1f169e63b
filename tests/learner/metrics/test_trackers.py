"""A feed over a record that the test writes, into a tracker that only remembers."""

import json
import pathlib

import pytest

from learner.metrics import trackers as feeds
from learner.metrics.metrics_writer import MetricsWriter
from learner.metrics.trackers import SentSteps, TrackerFeed, TrackerRefusedError, UnsureError


class Remembering:
    """A tracker; `fails` are raised by its next calls of `send`."""

    where = "there"

    def __init__(self) -> None:
        self.is_sure_when_closed = False
        self.fails_to_close: list[Exception] = []
        self.rows: list[tuple[str, int]] = []
        self.batches: list[int] = []
        self.fails: list[BaseException] = []
        self.num_opened = self.num_closed = 0

    def open(self) -> "Remembering":
        self.num_opened += 1
        return self

    def send(self, rows) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.batches.append(len(rows))
        self.rows += [(row["kind"], row["step"]) for row in rows]

    def close(self) -> None:
        if self.fails_to_close:
            raise self.fails_to_close.pop()
        self.num_closed += 1


@pytest.fixture
def tracker():
    return Remembering()


@pytest.fixture
def feed(tmp_path, tracker):
    """`feed()`: that of another start; `waits` has how long each waited."""

    def call(*, is_patient: bool = True, wait=lambda seconds: None, open_tracker=None) -> TrackerFeed:
        return TrackerFeed(
            tmp_path / "metrics.jsonl",
            tmp_path / "marks.json",
            open_tracker or tracker.open,
            wait=wait,
            name="fake",
            is_patient=is_patient,
        )

    return call


def write(folder: pathlib.Path, steps, *, restored_step: int = 0, kind: str = "step") -> None:
    writer = MetricsWriter(folder, restored_step=restored_step, incarnation=0)
    for step in steps:
        writer.write(kind, step, {"loss": 0.5}, groups=["g"])
    writer.close()


def append(folder: pathlib.Path, steps, *, kind: str = "step") -> None:
    """What the same learner writes later."""
    with open(folder / "metrics.jsonl", "a") as record:
        record.writelines(json.dumps({"kind": kind, "step": step, "loss": 0.5}) + "\n" for step in steps)


def steps(tracker: Remembering, kind: str = "step") -> list[int]:
    return [step for of, step in tracker.rows if of == kind]


def test_follow_sends_what_is_there_and_what_comes_meanwhile(tmp_path, feed, tracker):
    write(tmp_path, [1, 2])
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        append(tmp_path, [2 + len(waits)])

    feed(wait=wait).follow(lambda: len(waits) == 3)
    assert steps(tracker) == [1, 2, 3, 4, 5] and waits == [feeds.POLL_S] * 3
    assert (tracker.num_opened, tracker.num_closed) == (1, 1)


def test_follow_of_a_run_that_never_wrote_opens_nothing(tmp_path, feed, tracker):
    feed().follow(lambda: True)
    assert tracker.num_opened == 0
    write(tmp_path, [])
    feed().follow(lambda: True)
    assert tracker.num_opened == 0


def test_row_that_is_half_written_is_sent_once_it_is_whole(tmp_path, feed, tracker):
    write(tmp_path, [1, 2])
    record = tmp_path / "metrics.jsonl"
    whole = record.read_bytes()
    record.write_bytes(whole[:-5])
    looks = iter([False, False, True, True])

    def wait(seconds: float) -> None:
        assert steps(tracker) == [1]
        with open(record, "ab") as file:
            file.write(whole[-5:])

    feed(wait=wait).follow(lambda: next(looks))
    assert steps(tracker) == [1, 2]


def test_restarted_learner_sends_no_step_twice_and_goes_on(tmp_path, feed, tracker):
    write(tmp_path, [1, 2, 3, 4, 5])
    append(tmp_path, [0, 4], kind="eval")
    feed().follow(lambda: True)
    write(tmp_path, [4, 5, 6, 7], restored_step=3)  # goes back to step 3
    append(tmp_path, [4, 6], kind="eval")
    feed().follow(lambda: True)
    assert steps(tracker) == [1, 2, 3, 4, 5, 6, 7] and steps(tracker, "eval") == [0, 4, 6]
    assert tracker.num_opened == 2


def test_tracker_of_a_run_that_is_under_way_gets_all_of_it(tmp_path, feed, tracker, monkeypatch):
    monkeypatch.setattr(feeds, "MAX_ROWS", 4)
    write(tmp_path, range(1, 11))
    feed().follow(lambda: True)
    assert steps(tracker) == list(range(1, 11)) and tracker.batches == [4, 4, 2]


def test_what_fails_is_tried_again_after_growing_pauses_and_nothing_is_lost_or_twice(tmp_path, feed, tracker):
    write(tmp_path, [1, 2])
    tracker.fails = [ConnectionError("away"), TimeoutError("away"), RuntimeError("odd")]
    waits: list[float] = []
    one = feed(wait=waits.append)
    one.follow(lambda: True)
    assert steps(tracker) == [1, 2] and waits == [2.0, 4.0, 8.0]
    assert one.marks == SentSteps.read(tmp_path / "marks.json")
    assert (one.marks.num_sent, one.marks.problem, one.marks.num_unsure) == (2, "", 0)


@pytest.mark.heavy
def test_pauses_between_attempts_have_a_bound(tmp_path, feed, tracker):
    write(tmp_path, [1])
    tracker.fails = [ConnectionError("away") for _ in range(1100)]  # a float ends at 2 ** 1023
    waits: list[float] = []
    feed(wait=waits.append).follow(lambda: True)
    assert max(waits) == feeds.MAX_PAUSE_S == waits[-1]


def test_tracker_that_can_not_be_opened_is_opened_later(tmp_path, feed, tracker):
    write(tmp_path, [1])
    tries: list[int] = []

    def open_tracker():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("no route")
        return tracker.open()

    feed(open_tracker=open_tracker).follow(lambda: True)
    assert len(tries) == 3 and steps(tracker) == [1]


def test_failure_is_said_once_however_often_it_happens(tmp_path, feed, tracker, caplog):
    write(tmp_path, [1])
    tracker.fails = [ConnectionError("no route") for _ in range(5)]
    feed().follow(lambda: True)
    said = [r.getMessage() for r in caplog.records if "no route" in r.getMessage()]
    assert len(said) == 1 and "they wait in" in said[0]


def test_give_up_counts_what_it_has_not_taken_and_the_next_start_sends_it(tmp_path, feed, tracker):
    write(tmp_path, [1, 2, 3])
    one = feed()
    one.follow(lambda: True)
    append(tmp_path, [4, 5])
    tracker.fails = [ConnectionError("away")]
    other = feed(wait=lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        other.follow(lambda: True)
    assert other.give_up() == 2
    assert SentSteps.read(tmp_path / "marks.json").problem == "ConnectionError: away"
    feed().follow(lambda: True)
    assert steps(tracker) == [1, 2, 3, 4, 5] and SentSteps.read(tmp_path / "marks.json").num_left == 0


def test_rows_under_way_in_a_process_that_was_killed_are_not_sent_again_and_it_is_said(tmp_path, feed, tracker, caplog):
    write(tmp_path, [1, 2])
    tracker.fails = [SystemExit()]  # no Exception: as if the process ended there
    with pytest.raises(SystemExit):
        feed().follow(lambda: True)
    append(tmp_path, [3])
    feed().follow(lambda: True)
    assert steps(tracker) == [3]
    assert "2 sent rows may be missing" in caplog.text


def test_without_patience_the_first_failure_ends_it(tmp_path, feed, tracker):
    write(tmp_path, [1])
    tracker.fails = [ConnectionError("no route\nto host")]
    with pytest.raises(TrackerRefusedError, match="fake takes no metrics: ConnectionError: no route$"):
        feed(is_patient=False).follow(lambda: True)
    assert SentSteps.read(tmp_path / "marks.json").sent == {}


def test_tracker_that_fails_at_its_end_has_its_rows_counted_as_unsure_and_it_is_said(tmp_path, feed, tracker, caplog):
    write(tmp_path, [1, 2])
    feed().follow(lambda: True)
    append(tmp_path, [3])
    tracker.fails_to_close = [TimeoutError("no answer\nin time")]
    one = feed()
    one.follow(lambda: True)  # of a run: its end is no error of the run
    assert one.marks == SentSteps.read(tmp_path / "marks.json")
    assert (one.marks.num_unsure, one.marks.num_left, one.marks.num_sent) == (1, 0, 3)
    assert one.marks.problem == "TimeoutError: no answer"
    assert "fake failed to close: TimeoutError: no answer; 1 rows of this start may be missing" in caplog.text
    one.close()  # closed already
    feed().follow(lambda: True)
    assert steps(tracker) == [1, 2, 3]


def test_tracker_that_fails_at_its_end_by_hand_is_an_error_of_one_line(tmp_path, feed, tracker):
    write(tmp_path, [1, 2])
    tracker.fails_to_close = [TimeoutError("no answer\nin time")]
    with pytest.raises(UnsureError, match="^fake failed to close: TimeoutError: no answer; 2 rows .*missing$"):
        feed(is_patient=False).follow(lambda: True)
    assert SentSteps.read(tmp_path / "marks.json").num_unsure == 2


def test_rows_of_a_tracker_with_a_queue_in_memory_are_unsure_until_it_is_closed(tmp_path, feed, tracker, caplog):
    write(tmp_path, [1, 2])
    tracker.is_sure_when_closed = True
    seen: list[int] = []

    def wait(seconds: float) -> None:
        seen.append(SentSteps.read(tmp_path / "marks.json").num_unsure)
        if len(seen) == 1:
            append(tmp_path, [3])
        elif len(seen) == 2:
            raise SystemExit  # as if it were killed

    with pytest.raises(SystemExit):
        feed(wait=wait).follow(lambda: False)
    assert seen == [2, 3]
    append(tmp_path, [4])
    feed().follow(lambda: True)
    assert "3 sent rows may be missing" in caplog.text
    assert SentSteps.read(tmp_path / "marks.json").num_unsure == 0 and steps(tracker) == [1, 2, 3, 4]


def test_rows_without_a_metric_are_not_sent(tmp_path, feed, tracker):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": None, "old/name": 1}) + "\n")
    one = feed()
    one.follow(lambda: True)
    assert tracker.rows == [] and one.give_up() == 0


def test_marks_that_can_not_be_read_are_refused_with_what_to_do(tmp_path, feed):
    (tmp_path / "marks.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"marks.json is not a valid tracker progress file .*; remove it to send all rows again"
    ):
        feed()
