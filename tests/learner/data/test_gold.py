from configs import sections
from configs.sections.prompts import PromptSource
from learner.data.row_filter import gold_rows
from tests.learner.data.rooms import SUMS, jsonl, parquet, rows_of


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
