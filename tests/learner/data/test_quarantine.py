import json

from learner.data.problem import BadRow
from learner.data.row_filter import Quarantine


def lines(file):
    return [json.loads(x) for x in file.read_text().splitlines()]


def test_quarantine_appends_row_numbers_and_reasons_each_once_over_restarts(tmp_path):
    file = tmp_path / "quarantine.jsonl"
    first = Quarantine(file)
    first.add()
    assert not file.exists()
    first.add(BadRow(3, "torn", "a.jsonl"), BadRow(9, "empty", "a.jsonl"))
    first.add(BadRow(9, "empty", "b.jsonl"))
    again = Quarantine(file)
    again.add(BadRow(9, "empty", "a.jsonl"), BadRow(10, "empty", "a.jsonl"))
    assert lines(file) == [
        {"source": "a.jsonl", "row": 3, "reason": "torn"},
        {"source": "a.jsonl", "row": 9, "reason": "empty"},
        {"source": "b.jsonl", "row": 9, "reason": "empty"},
        {"source": "a.jsonl", "row": 10, "reason": "empty"},
    ]


def test_quarantine_with_a_line_that_a_kill_tore_is_read(tmp_path):
    file = tmp_path / "quarantine.jsonl"
    Quarantine(file).add(BadRow(3, "torn", "a.jsonl"))
    whole = file.read_text()
    file.write_text(whole + whole[:20])
    Quarantine(file).add(BadRow(3, "torn", "a.jsonl"))
    assert file.read_text() == whole + whole[:20]
