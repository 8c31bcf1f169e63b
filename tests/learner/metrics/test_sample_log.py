import json
import threading

import numpy as np
import pytest

from bridge.rollout_types import Task
from configs.sections import SamplesConfig
from learner.metrics import sample_log
from learner.metrics.sample_log import SampleLog, thinned
from learner.metrics.sample_record import PickedGroup
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.support.processes import python

TASK = Task.judged_by("exact", answer="1")


def decode(tokens):
    return " ".join(map(str, tokens))


def picked(name):
    group = make_group(make_ticket(name, num_samples=1), rollouts=(make_rollout(),))
    return PickedGroup(group=group, task=TASK, source="", advantages=[np.zeros(3, np.float32)])


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write(file, steps, *, restored=0, config=None, **fields):
    written = SampleLog(file, config or SamplesConfig(), fields.get("decode", decode), restored_step=restored)
    for step in steps:
        written.trained(step, [picked(f"g{step}")])
    written.close()
    return written


def test_restarted_learner_drops_what_it_went_back_behind_and_has_each_step_once(tmp_path):
    file = tmp_path / "s.jsonl"
    write(file, [1, 2, 3, 4])
    file.write_text(file.read_text() + '{"step": 4, "torn')
    write(file, [3, 4, 5], restored=2)
    assert [r["step"] for r in rows(file)] == [1, 2, 3, 4, 5]


def test_evaluation_keeps_its_first_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_log, "EVAL_PROBLEMS", 2)
    written = SampleLog(tmp_path / "s.jsonl", SamplesConfig(), decode, restored_step=0)
    written.evaluated(10, "heldout", [(picked(f"p{i}").group, TASK) for i in range(5)])
    written.close()
    assert [(r["kind"], r["set"], r["ticket"]) for r in rows(tmp_path / "s.jsonl")] == [
        ("eval", "heldout", "p0"),
        ("eval", "heldout", "p1"),
    ]


def test_file_stays_within_its_bound_and_keeps_the_first_and_the_newest(tmp_path):
    file = tmp_path / "s.jsonl"
    for start in range(1, 401, 40):  # fewer than may wait
        write(file, range(start, start + 40), restored=start - 1, config=SamplesConfig(max_mib=0.02))
    steps = [r["step"] for r in rows(file)]
    assert file.stat().st_size <= 0.02 * 2**20
    assert steps == sorted(steps) and steps[0] == 1 and steps[-3:] == [398, 399, 400]


def test_thinned_takes_every_second_of_the_older_half():
    lines = [b"%d\n" % i for i in range(8)]
    assert thinned(lines, max_bytes=12) == [b"0\n", b"2\n", b"4\n", b"5\n", b"6\n", b"7\n"]
    assert thinned(lines, max_bytes=16) == lines
    assert thinned([b"x" * 100], max_bytes=10) == []


def test_thinned_keeps_each_sets_first_evaluation_whole():
    def line(step, name=""):
        return json.dumps({"step": step, "set": name}).encode() + b"\n"

    first = [line(0, "heldout"), line(0, "heldout"), line(4, "sums")]
    lines = [*first[:2], *[line(1 + i // 40) for i in range(160)], first[2], *[line(5, "heldout")] * 400, b'{"torn']
    kept = thinned(lines, max_bytes=sum(map(len, lines)) // 4)
    assert [k for k in kept if k in first] == first and kept[-1] == b'{"torn'
    assert len(kept) < 150
    assert thinned(lines, max_bytes=70) == [line(5, "heldout"), b'{"torn']  # no room for them beside the newest


def test_one_record_that_can_not_be_made_costs_no_other(tmp_path):
    texts = iter(["prompt", "response", None])

    def failing(tokens):
        if (text := next(texts)) is None:
            raise RuntimeError("decode")
        return text

    written = SampleLog(tmp_path / "s.jsonl", SamplesConfig(), failing, restored_step=0)
    written.trained(1, [picked("g"), picked("h")])
    written.close()
    assert written.num_lost == 1 and [r["ticket"] for r in rows(tmp_path / "s.jsonl")] == ["g"]


def test_learner_is_not_held_up_by_a_disk_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_log, "CLOSE_S", 0.01)
    is_open = threading.Event()

    def stuck(tokens):
        is_open.wait()
        return ""

    written = SampleLog(tmp_path / "s.jsonl", SamplesConfig(), stuck, restored_step=0)
    for step in range(sample_log.MAX_WAITING + 50):
        written.trained(step, [picked("g")])
    assert written.num_lost >= 49  # the first one is being written
    written.close()
    is_open.set()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("decode")])
def test_what_can_not_be_written_is_left_out_and_the_next_is_whole(tmp_path, error):
    calls = []

    def failing(tokens):
        calls.append(1)
        if len(calls) == 1:
            raise error
        return decode(tokens)

    written = write(tmp_path / "s.jsonl", [1, 2], decode=failing)
    assert written.num_lost == 1 and [r["step"] for r in rows(tmp_path / "s.jsonl")] == [2]


def test_lone_surrogates_of_a_row_make_no_line_unreadable(tmp_path):
    group = picked("g").group
    odd = Task.judged_by("exact", answer="\ud800")
    written = SampleLog(tmp_path / "s.jsonl", SamplesConfig(), decode, restored_step=0)
    written.evaluated(1, "heldout", [(group, odd)])
    written.close()
    assert rows(tmp_path / "s.jsonl")[0]["answer"] == "?"


FULL = """
import resource, signal, sys, pathlib
from learner.metrics import sample_record
from tests.learner.metrics.test_sample_log import SampleLog, SamplesConfig, picked
sample_record.MAX_CHARS = 10**6
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
texts = iter("x" * n for n in (10, 10, 50_000, 50_000, 10, 10))
log = SampleLog(pathlib.Path(sys.argv[1]), SamplesConfig(), lambda tokens: next(texts), restored_step=0)
for step in (1, 2, 3):
    log.trained(step, [picked(f"g{step}")])
log.close()
print(log.num_lost)
"""


@pytest.mark.heavy
def test_write_that_a_full_disk_cuts_short_leaves_whole_lines_and_the_next_is_whole(tmp_path):
    """A bound of a file's size takes a part of a write, as the last block of a disk does."""
    file = tmp_path / "s.jsonl"
    done = python("-c", FULL, file)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert [r["step"] for r in rows(file)] == [1, 3]
    assert "reason=the disk accepted" in done.stderr
