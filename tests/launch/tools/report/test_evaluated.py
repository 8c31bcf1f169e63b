"""What `launch.tools.evaluate` wrote, as a table of the report."""

import html
import json
import re

import pytest

from configs.run_folder import RunFolder
from launch.tools.evaluate import results
from launch.tools.report import run_data
from launch.tools.report.build import build
from launch.tools.report.run_data import of_run, read_results, rows_of
from learner.evaluation import eval_summary
from tests.launch.tools.report.folder import HOSTILE, make_folder
from tests.launch.tools.report.test_build import data_of


def found(step: int | None = 400, *, time_s=1_700_000_000.0, run_dir: str | None = "runs/mine", name="aime", avg=0.25):
    """As `launch.tools.evaluate` writes it, of a set of 30 problems and one that nobody could judge."""
    metrics = {"avg@16": (avg, 0.05), "pass@1": (avg, 0.05), "pass@16": (0.5, 0.0925), "maj@16": (0.3, None)}
    of_set = {"set": name, "source": "a.jsonl", "temperature": 0.6, "top_p": 0.95, "max_tokens": 9, "k": 16}
    of_set |= {"problems": 29, "left_out": 1, "truncated": 3, "notes": ["a note"], "samples": []}
    of_set["metrics"] = {name: {"value": value, "stderr": stderr} for name, (value, stderr) in metrics.items()}
    empty = {"set": "empty", "k": 1, "temperature": 0.0, "problems": 0, "left_out": 2, "metrics": {}}
    head = {
        "format": eval_summary.FORMAT,
        "time_s": time_s,
        "model": "/m/tiny",
        "run_dir": run_dir,
        "step": step,
        "seed": 0,
    }
    return head | {"sets": [of_set, empty]}


def cells(page):
    """The table's rows as a browser shows them."""
    (section,) = re.findall(r'<section id="evaluated">(.*?)</section>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)[1:]
    return [[html.unescape(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]


def test_results_format_is_the_one_that_is_written():
    assert run_data.FORMAT == eval_summary.FORMAT


@pytest.mark.heavy
def test_results_beside_a_run_are_in_its_report_by_step(tmp_path):
    folder = make_folder(tmp_path / "run", steps=2)
    assert 'id="evaluated"' not in build([folder])
    for of in (found(400), found(50, avg=0.125), found(400, time_s=1_700_009_999.5)):
        results.keep_beside(of, RunFolder(folder))
    (folder / "evaluated" / "torn.json").write_text('{"format": 1')
    page = build([folder])
    rows = cells(page)
    assert [(row[0], row[1], row[2]) for row in rows if len(row) == 10] == [
        ("made", step, name) for step in ("50", "400", "400") for name in ("aime", "empty")
    ]
    assert rows[0][3:9] == ["16", "0.6", "29, 1 not scored", "0.1250 ± 0.0500", "0.5000 ± 0.0925", "0.3000"]
    assert rows[1][2] == "aime: a note" and rows[2][5:9] == ["0, 2 not scored", "-", "-", "-"]
    assert "1 unreadable results files are omitted" in html.unescape(page)
    assert len(of_run(folder)[0]) == 3


@pytest.mark.heavy
def test_results_of_other_models_are_shown_beside_a_run_or_without_one_and_none_twice(tmp_path):
    folder = make_folder(tmp_path / "run", steps=2)
    results.keep_beside(found(400), RunFolder(folder))
    files = [tmp_path / "same.json", tmp_path / "base.json"]
    for file, of in zip(files, (found(400), found(None, run_dir=None, time_s=5.0)), strict=True):
        results.write(of, file)
    rows = [row for row in cells(build([folder], results=files)) if len(row) == 10]
    assert [(row[0], row[1]) for row in rows] == [("made", "400")] * 2 + [("tiny", "-")] * 2
    alone = build([], results=files)
    assert [row[0] for row in cells(alone) if len(row) == 10] == ["mine"] * 2 + ["tiny"] * 2
    assert "<title>Evaluated models - Sluice</title>" in alone and "<script" not in alone
    assert re.findall(r'<section id="(\w+)"', alone) == ["evaluated"] and re.findall(r'href="#(\w+)"', alone) == [
        "evaluated"
    ]


def test_results_that_are_none_are_refused_by_name(tmp_path):
    for text in ("{", "[]", '{"format": 1, "model": "m"}', json.dumps(found() | {"sets": [{"set": 3}]})):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match=r"r\.json: expected a results file of launch\.tools\.evaluate, "):
            read_results(tmp_path / "r.json")
    (tmp_path / "r.json").write_text(json.dumps(found() | {"format": 2}))
    with pytest.raises(ValueError, match="has results of format 2: expected at most 1"):
        build([], results=[tmp_path / "r.json"])


@pytest.mark.heavy
def test_hostile_names_of_sets_stay_text(tmp_path):
    folder = make_folder(tmp_path / "run", steps=2)
    for i, text in enumerate(HOSTILE):
        results.keep_beside(found(name=text.replace("\ud800", ""), time_s=10.0 + i), RunFolder(folder))
    page = build([folder])
    assert "<script>window.hurt" not in page and "<img" not in page and data_of(page)["runs"]
    assert any(row[2].startswith(HOSTILE[0]) for row in cells(page))


def test_rows_of_what_is_not_known_are_dashes():
    bare = run_data.Results(format=1, model="/", sets=(run_data.SetResult(set="a", k=1, problems=3, metrics={}),))
    (row,) = rows_of([], [bare])
    assert [row[name] for name in ("model", "step", "when", "temperature", "avg")] == ["/", "-", "-", "-", "-"]
