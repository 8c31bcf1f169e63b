import json

from configs import sections
from configs.sections.prompts import PromptSource
from learner.data.problem import BadRow
from learner.data.row_filter import Quarantine, gold_rows
from tests.learner.data.rooms import SUMS, jsonl, parquet, rows_of


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


def test_gold_rows_are_the_well_formed_rows_of_all_files_with_their_tasks(tmp_path):
    rows = [rows_of(1)[0], "", "torn", *rows_of(2, start=1), {"prompt": "x"}]
    mixture = {
        "a": PromptSource(path=jsonl(tmp_path, rows)),
        "b": PromptSource(path=parquet(tmp_path, rows_of(2, start=9)), verifier="math"),
        "c": PromptSource(**SUMS),
        "d": PromptSource(path=jsonl(tmp_path, [{"prompt": "play", "answer": "3"}], "d.jsonl"), environment="guess"),
    }
    found = list(gold_rows(sections.PromptsConfig(mixture=mixture)))
    assert [(g.source, g.row, g.task.answer) for g in found] == [
        ("a", 1, "0"),
        ("a", 4, "2"),
        ("a", 5, "4"),
        ("b", 1, "18"),
        ("b", 2, "20"),
    ]
    assert found[0].question == rows_of(1)[0]["prompt"]


def test_gold_rows_with_a_limit_are_spread_over_the_file(tmp_path):
    prompts = sections.PromptsConfig(path=jsonl(tmp_path, rows_of(101)))
    assert [g.row for g in gold_rows(prompts, limit=5)] == [1, 26, 51, 76, 101]
    assert len(list(gold_rows(prompts, limit=500))) == len(list(gold_rows(prompts))) == 101
