import json

from learner.data.problems import BadRow
from learner.data.quarantine import write_quarantine


def test_write_quarantine_appends_row_numbers_and_reasons(tmp_path):
    file = tmp_path / "quarantine.jsonl"
    write_quarantine(file, [BadRow(3, "torn", "a.jsonl")])
    write_quarantine(file, [BadRow(9, "empty", "b.jsonl")])
    assert [json.loads(x) for x in file.read_text().splitlines()] == [
        {"source": "a.jsonl", "row": 3, "reason": "torn"},
        {"source": "b.jsonl", "row": 9, "reason": "empty"},
    ]
