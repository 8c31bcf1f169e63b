import errno
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from bridge.timeline import Timeline, merge, read


def events_named(folder, name):
    return [e for e in read(folder) if e["name"] == name]


def test_span_and_instant_are_microseconds_with_arguments(tmp_path):
    timeline = Timeline(tmp_path / "events", "learner")
    timeline.span("train", 10.0, 10.5, lane=2, step=7, loss=np.float32(0.5))
    timeline.instant("publish", time_s=10.25, version="0:7")
    timeline.close()
    (train,) = events_named(tmp_path / "events", "train")
    assert (train["ph"], train["ts"], train["dur"], train["tid"]) == ("X", 10e6, 0.5e6, 2)
    assert train["args"] == {"step": 7, "loss": 0.5}
    (publish,) = events_named(tmp_path / "events", "publish")
    assert (publish["ph"], publish["ts"], publish["args"]) == ("i", 10.25e6, {"version": "0:7"})


def test_span_that_ends_before_it_starts_has_no_length(tmp_path):
    Timeline(tmp_path, "p").span("back", 10.0, 9.0)
    assert events_named(tmp_path, "back")[0]["dur"] == 0


def test_measure_records_what_its_block_adds_even_when_it_raises(tmp_path):
    timeline = Timeline(tmp_path, "p")
    with pytest.raises(RuntimeError, match="stop"), timeline.measure("work", lane=1, a=1) as args:
        args.update(b=2, name="n", start_s=3)  # names of span's own parameters, too
        raise RuntimeError("stop")
    (work,) = events_named(tmp_path, "work")
    assert work["args"] == {"a": 1, "b": 2, "name": "n", "start_s": 3} and work["tid"] == 1


def test_values_json_has_no_word_for_are_written_as_text(tmp_path):
    timeline = Timeline(tmp_path, "p")
    timeline.span("bad", 0.0, 1.0, loss=float("nan"), norm=np.float32("inf"), step=3)
    timeline.span("odd", 0.0, 1.0, path=tmp_path)
    assert events_named(tmp_path, "bad")[0]["args"] == {"loss": "nan", "norm": "inf", "step": "3"}
    assert events_named(tmp_path, "odd")[0]["args"] == {"path": str(tmp_path)}


class FullDisk(io.FileIO):
    """A file whose disk has room for so many bytes more."""

    room = 0

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(memoryview(data)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 10])
def test_full_disk_loses_events_and_says_how_many_and_no_line_is_torn(tmp_path, room):
    timeline = Timeline(tmp_path, "p")
    timeline.instant("before")
    timeline._file.close()
    timeline._file = disk = FullDisk(tmp_path / "p.jsonl", "a+")
    disk.room = room
    for _ in range(3):
        timeline.instant("lost")
    disk.room = 10**6
    timeline.instant("after")
    timeline.instant("last")
    names = [e["name"] for e in read(tmp_path)]
    assert names == ["process_name", "before", "events lost", "after", "last"]
    assert events_named(tmp_path, "events lost")[0]["args"] == {"count": 3}


@pytest.mark.parametrize("tear", ['{"name": "tor', '{"name": "torn", "ph": "X", "args": {"process_name": 1'])
def test_read_leaves_out_the_line_a_killed_process_was_writing(tmp_path, tear):
    Timeline(tmp_path, "p").instant("before", time_s=1.0)
    with open(tmp_path / "p.jsonl", "a") as f:
        f.write(tear)
    assert [e["name"] for e in read(tmp_path)] == ["process_name", "before"]
    Timeline(tmp_path, "p").instant("after", time_s=2.0)  # the process that took over
    names = [e["name"] for e in read(tmp_path)]
    assert names == ["process_name", "process_name", "before", "after"]


def test_read_reports_damage_in_the_middle_of_a_life(tmp_path):
    timeline = Timeline(tmp_path, "p")
    with open(tmp_path / "p.jsonl", "a") as f:
        f.write("damage\n")
    timeline.instant("after", time_s=2.0)
    with pytest.raises(ValueError, match=r"p\.jsonl:2"):
        read(tmp_path)


def test_read_orders_by_time_and_numbers_tracks_by_process_name(tmp_path):
    for process, times in (("actor-1", (5.0, 2.0)), ("learner", (3.0,)), ("actor-1", (9.0,))):
        timeline = Timeline(tmp_path, process)
        for t in times:
            timeline.instant("tick", time_s=t)
        timeline.close()
    events = read(tmp_path)
    assert [(e["ts"] / 1e6, e["pid"]) for e in events if e["name"] == "tick"] == [
        (2.0, 1),
        (3.0, 2),
        (5.0, 1),
        (9.0, 1),
    ]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {(1, "actor-1"), (2, "learner")}


def test_merge_writes_one_trace_that_starts_at_zero(tmp_path):
    Timeline(tmp_path / "events", "a").span("first", 1000.0, 1001.0)
    Timeline(tmp_path / "events", "b").instant("second", time_s=1002.0)
    merge(tmp_path / "events", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    times = {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] != "M"}
    assert times == {"first": 0.0, "second": 2e6}
    assert trace["metadata"]["start_unix_s"] == 1000.0
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["trace.json"]


def test_merge_of_nothing_is_an_empty_trace(tmp_path):
    (tmp_path / "events").mkdir()
    merge(tmp_path / "events", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_recording_after_close_goes_nowhere(tmp_path):
    timeline = Timeline(tmp_path, "p")
    timeline.close()
    timeline.instant("late", time_s=1.0)
    assert events_named(tmp_path, "late") == []


@pytest.mark.parametrize("name", ["", "a/b", "../p", "/p"])
def test_process_name_that_is_no_file_name_refused(tmp_path, name):
    with pytest.raises(ValueError, match="file name"):
        Timeline(tmp_path, name)


def test_span_is_as_long_as_the_monotonic_clock_says_when_the_wall_clock_is_set(tmp_path, monkeypatch):
    now = SimpleNamespace(wall_s=5000.0, steady_s=100.0)
    clock = SimpleNamespace(time=lambda: now.wall_s, monotonic=lambda: now.steady_s)
    monkeypatch.setattr("bridge.timeline.time", clock)
    with Timeline(tmp_path, "p").measure("round"):
        now.wall_s, now.steady_s = 5010.0 - 3610.0, 110.0  # set back by an hour meanwhile
    (event,) = events_named(tmp_path, "round")
    assert (event["ts"], event["dur"]) == (1390.0 * 1e6, 10.0 * 1e6)
