import html
import json
import re
import shutil

import numpy as np
import pytest

from launch.tools.report.build import _response, build, shown_samples, write_report
from launch.tools.report.figures import COLOURS, draw, standard_error
from launch.tools.report.panels import positions
from launch.tools.report.run_data import json_for_script, read_run, read_runs
from launch.tools.samples.samples_view import ResponseLine, read_samples
from tests.launch.tools.report.folder import HOSTILE, make_folder


def data_of(page):
    """What the page's script reads; found as a browser finds it: up to the next end of a script."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    return json.loads(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("build") / "run", steps=30)


@pytest.mark.heavy
def test_report_is_one_file_of_a_bounded_size_that_names_no_other_place(run, tmp_path):
    size = write_report([run], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert size == len(page.encode()) < 6_000_000
    head = page[: page.index("BEGIN bokeh")] + page[page.index('id="page-script"') :]
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", head)
    assert "connect-src 'none'" in html.unescape(page)


@pytest.mark.heavy
def test_report_has_all_samples_rounds_numbers_and_the_config(run):
    page = build([run])
    (told,) = data_of(page)["runs"]
    assert sum(len(g["responses"]) for g in told["samples"]) == read_samples(run).num_responses
    assert [r["number"] for r in told["rounds"]] == list(range(15)) and told["num_rounds"] == 15
    for word in (
        "final evaluation",
        "trainer waiting ratio, mean",
        "grpo_clip",
        "groups_per_update",
        "failed or hung verifier calls",
    ):
        assert word in page


def test_zero_is_told_where_it_is_a_measurement():
    told = _response(ResponseLine(reward=0.0, advantage=0.0, lag=0.0, lag_max=0))
    assert {n: v for n, v in told.items() if v == 0} == {"reward": 0.0, "advantage": 0.0, "lag": 0.0, "tokens": 0}


@pytest.mark.heavy
def test_hostile_text_stays_text(tmp_path):
    folder = make_folder(tmp_path / "<img src=x onerror=1>", texts=HOSTILE)
    (folder / "config.json").write_text(json.dumps({"preset": HOSTILE[0], "run": {"name": HOSTILE[1]}}))
    page = build([folder])
    assert "<script>window.hurt" not in page and "<img" not in page
    assert page.count("</script") == len(re.findall(r"<script(?: |>)", page))
    texts = [p[1] for g in data_of(page)["runs"][0]["samples"] for r in g["responses"] for p in r["parts"]]
    assert any(text.startswith(HOSTILE[0]) for text in texts) and any(text.startswith(HOSTILE[1]) for text in texts)
    assert not any(character in text for text in texts for character in "\x1b\x00\u202e\ud800")


def test_json_in_a_script_ends_none_and_is_the_same_when_read():
    value = {"a": [*HOSTILE, "\u2028", 1.5, None]}
    text = json_for_script(value)
    assert not set(text) & set("<>&\u2028\u2029") and json.loads(text) == value
    text.encode()


@pytest.mark.heavy
def test_too_many_samples_are_thinned_evenly_and_the_page_says_so(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "run", steps=40, groups=400)
    monkeypatch.setattr("launch.tools.report.build.BUDGET_BYTES", 200_000)
    page = build([folder])
    (told,) = data_of(page)["runs"]
    steps = [g["step"] for g in told["samples"] if g["kind"] == "train"]
    assert 150_000 < len(json_for_script(told["samples"])) <= 200_010
    assert steps[0] <= 2 and steps[-1] >= 39 and steps == sorted(steps)
    num = sum(len(g["responses"]) for g in told["samples"])
    assert f"{num:,} of 3,200 stored responses are in this report" in page


def test_evaluations_have_their_half_where_training_has_far_more(tmp_path):
    samples = read_samples(make_folder(tmp_path / "run", steps=40, groups=200))
    shown = shown_samples(samples, budget_bytes=60_000)
    sizes = {
        kind: sum(len(json_for_script(g)) for g in shown.groups if g["kind"] == kind) for kind in ("eval", "train")
    }
    assert 20_000 < sizes["eval"] <= 30_000 and sizes["train"] > 20_000 and sum(sizes.values()) <= 60_000


@pytest.mark.heavy
def test_runs_side_by_side_have_a_colour_each_and_what_differs_is_told(run, tmp_path):
    other = make_folder(tmp_path / "other", name="other", steps=10, seed=1)
    page = build([run, other])
    assert [r["label"] for r in data_of(page)["runs"]] == ["made", "other"]
    assert "Differences" in page and "run.num_updates" in page
    keys = [k for d in draw(read_runs([run, other])).all for k in d.keys if k.run]
    assert {(k.run, k.colour) for k in keys} == {("0", COLOURS[0]), ("1", COLOURS[1])}


def test_runs_of_one_name_are_told_apart_by_their_folders_and_one_named_twice_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    assert [r.label for r in read_runs([run, copy])] == ["run", "copy"]
    with pytest.raises(ValueError, match="given twice"):
        read_runs([run, run])


def test_report_of_a_run_that_has_only_begun_is_made(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ValueError, match="expected a run folder"):
        read_run(folder)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"kind": "step", "torn')
    assert "No update is complete yet" in build([folder])


def test_lines_that_are_no_rows_are_counted_and_others_read(tmp_path):
    folder = make_folder(tmp_path / "run", steps=4)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('no json\n[]\n{"kind": "step"}\n{"kind": "step", "step": 5, "torn')
    got = read_run(folder)
    assert got.num_unreadable == 3 and [r["step"] for r in got.of("step")] == [1, 2, 3, 4]


def test_standard_error_is_the_rows_own_or_what_rewards_between_0_and_1_can_have_at_most(tmp_path):
    folder = make_folder(tmp_path / "run", steps=2)
    rows = [
        {"kind": "eval", "step": 0, "eval/reward": 0.5, "problems": 100},
        {"kind": "eval", "step": 2, "eval/reward": 0.5, "problems": 100, "eval/reward_stderr": 0.02},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    np.testing.assert_allclose(standard_error(read_run(folder), "eval", "eval/reward"), [0.05, 0.02])
    rows.append({"kind": "step", "step": 1, "reward/min": -3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    np.testing.assert_allclose(standard_error(read_run(folder), "eval", "eval/reward"), [np.nan, 0.02])


def test_named_evaluation_sets_have_a_figure_each_with_their_own_errors(tmp_path):
    folder = make_folder(tmp_path / "run", steps=2)
    with open(folder / "metrics.jsonl", "a") as file:
        values = {
            "eval/aime/avg@4": 0.25,
            "eval/aime/avg@4_stderr": 0.1,
            "eval/aime/pass@4": 0.5,
            "eval/aime/unscored_problems": 0.0,
        }
        file.write(json.dumps({"kind": "eval/aime", "step": 2} | values) + "\n")
    (panel,) = [d for d in draw([read_run(folder)]).all if d.title == "Evaluation set aime"]
    assert [k.label for k in panel.keys] == ["avg@4", "pass@4"]
    np.testing.assert_allclose(standard_error(read_run(folder), "eval/aime", "eval/aime/avg@4"), [0.1])


def test_samples_budget_is_of_what_is_written(tmp_path):
    samples = read_samples(make_folder(tmp_path / "run", steps=40, groups=200, texts=("<>&" * 500,)))
    shown = shown_samples(samples, budget_bytes=600_000)
    assert 400_000 < len(json_for_script(shown.groups)) <= 600_000


@pytest.mark.heavy
def test_report_of_very_many_actors_and_of_markup_stays_below_its_size(tmp_path):
    folder = make_folder(tmp_path / "run", steps=60, actors=16, groups=150, texts=("<>&" * 1300,))
    for file in folder.glob("events/actor-*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line * (32 if '"ph": "X"' in line else 1) for line in lines))
    assert len(build([folder]).encode()) < 6_000_000


@pytest.mark.heavy
def test_report_of_damaged_files_is_made(tmp_path):
    folder = make_folder(tmp_path / "run", steps=4, killed=True)
    rows = [
        {"kind": "step", "step": 5, "reward/min": "a", "actor/verifier_failures": "b", "reward/mean": [1]},
        {"kind": "step", "step": "x"}, {"kind": "step", "step": 6, "tokens": 10**400, "time/step_s": None},
        {"kind": "eval", "step": 6, "eval/reward": "c", "problems": {}}, {"kind": ["round"], "step": 6},
        {"kind": "round", "step": 4, "round/wait_s": "long"},
    ]  # fmt: skip
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write('{"kind": "step", "step": 1e400}\n')
    with open(folder / "samples.jsonl", "a") as file:
        line = {"format": 1, "kind": "train", "step": 9, "responses": [{"reward": float("inf"), "lag": float("nan")}]}
        file.write(json.dumps(line) + "\n")
    with open(folder / "events" / "supervisor.jsonl", "a") as file:
        for name, args in (
            ("message", {"line": 5}),
            ("message", {}),
            ("exit", {"process": 5, "signal": "x"}),
            ("exit", {}),
        ):
            file.write(json.dumps({"name": name, "ph": "i", "ts": 1.7e15, "args": args}) + "\n")
    for config in ({"run": 5}, {"rounds": {"groups_per_round": "a"}, "publish": []}, {"run": {"name": ["x"]}}):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text('["done"]')
        assert "Faults and restarts" in build([folder])


def with_rows(tmp_path, rows):
    folder = make_folder(tmp_path / "run", steps=2)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return read_run(folder)


UPDATES = [
    {"kind": "step", "step": 1, "time/step_s": 5.0, "tokens": 100, "sequences": 8},
    {"kind": "step", "step": 2, "time/step_s": 2.0, "tokens": 50, "sequences": 4},
    {"kind": "step", "step": 3, "time/step_s": 3.0, "tokens": 70, "sequences": 8},
]


def test_top_figure_of_a_supervised_run_is_its_loss_and_drawn_once(tmp_path):
    rows = [{"kind": "step", "step": step, "loss": 1.0 / step} for step in (1, 2)]
    folder = make_folder(tmp_path / "run", steps=2)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = draw([read_run(folder)])
    assert drawn.reward is not None and drawn.reward.title == "Loss"
    assert [one.title for _, of in drawn.sections for one in of if one.title == "Loss"] == []


EVALS = [{"kind": "eval", "step": 0, "eval/reward": 0.1}, {"kind": "eval", "step": 2, "eval/reward": 0.5}]


def test_time_tokens_and_samples_of_a_row_are_those_up_to_its_step(tmp_path):
    run = with_rows(tmp_path, [*UPDATES, *EVALS])
    assert positions(run, "step", "time").tolist() == [5, 7, 10]
    assert positions(run, "step", "tokens").tolist() == [100, 150, 220]
    assert positions(run, "step", "samples").tolist() == [8, 12, 20]
    assert positions(run, "eval", "time").tolist() == [0, 7]
    assert positions(run, "eval", "tokens").tolist() == [0, 150]
    assert positions(run, "eval", "step").tolist() == [0, 2]


def test_rows_that_bear_a_time_are_where_their_clock_says(tmp_path):
    times = (1010.0, 1020.0, 1090.0)  # it was paused before its last update
    updates = [row | {"time_s": t} for row, t in zip(UPDATES, times, strict=True)]
    run = with_rows(tmp_path, [*updates, EVALS[0] | {"time_s": 1003.0}, EVALS[1]])
    assert positions(run, "step", "time").tolist() == [7, 17, 87]
    assert positions(run, "eval", "time").tolist() == [0, 17]
    run = with_rows(tmp_path / "partly", [updates[0], *UPDATES[1:], *EVALS])
    assert positions(run, "step", "time").tolist() == [5, 7, 10]


@pytest.mark.heavy
def test_curves_can_be_drawn_over_what_a_run_has(tmp_path):
    page = data_of(build([make_folder(tmp_path / "run", steps=8)]))
    assert [(a["name"], a["label"]) for a in page["axes"]] == [
        ("step", "optimizer step"),
        ("time", "seconds since the start of training"),
        ("tokens", "trained tokens"),
    ]
    assert [a["largest"] for a in page["axes"]] == [8, 40 + 7 * 2, 8 * 600]
    sources = draw([with_rows(tmp_path / "bare", [{"kind": "step", "step": 2, "loss": 1.0}])]).sources
    assert [a.name for a in sources.axes.all] == ["step"]
