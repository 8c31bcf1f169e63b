"""Tables of the report: results, cost, provenance and rewards per problem."""

import json

import pytest

from configs.run_folder import RunFolder
from launch.startup.provenance import record_start
from launch.tools.report import summary
from launch.tools.report.build import build
from launch.tools.report.run_data import read_run
from launch.tools.samples.samples_view import read_samples
from tests.launch.tools.report.folder import HOSTILE, make_folder


def with_rows(folder, rows):
    made = make_folder(folder, steps=2)
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(made)


def evaluation(step, reward, **values):
    return {"kind": "eval", "step": step, "eval/reward": reward, "problems": 100, **values}


def test_results_show_first_final_and_best_evaluation_with_errors_and_steps(tmp_path):
    rows = [evaluation(0, 0.25), evaluation(10, 0.75, **{"eval/reward_stderr": 0.01}), evaluation(20, 0.5)]
    found = dict(summary.results([with_rows(tmp_path / "run", rows)]))
    assert found["mean reward, first evaluation"] == ["0.250 ± 0.043, step 0"]
    assert found["mean reward, final evaluation"] == ["0.500 ± 0.050, step 20"]
    assert found["mean reward, best evaluation"] == ["0.750 ± 0.010, step 10"]


def test_results_of_a_run_without_evaluations_have_no_evaluation_rows(tmp_path):
    run = with_rows(tmp_path / "run", [{"kind": "step", "step": 1, "reward/mean": 0.5}])
    assert summary.results([run]) == [("mean reward, last tenth", ["0.5"])]


def test_results_of_a_supervised_run_are_its_held_out_losses_without_errors(tmp_path):
    rows = [{"kind": "eval", "step": step, "eval/loss": loss, "problems": 64} for step, loss in ((0, 0.865), (9, 0.25))]
    assert summary.results([with_rows(tmp_path / "run", rows)]) == [
        ("held-out loss, first evaluation", ["0.865, step 0"]),
        ("held-out loss, final evaluation", ["0.250, step 9"]),
    ]


def test_cost_is_the_sum_over_updates_and_the_time_to_the_last_row(tmp_path):
    rows = [
        {"kind": "step", "step": 1, "tokens": 600, "real_tokens": 900, "time/step_s": 60.0, "time_s": 1060.0},
        {"kind": "step", "step": 2, "tokens": 600, "real_tokens": 900, "time/step_s": 30.0, "time_s": 1090.0},
        evaluation(2, 0.5, time_s=1150.0),
    ]
    found = dict(summary.costs([with_rows(tmp_path / "run", rows)]))
    assert found["updates"] == ["2 of 2, done"] and found["wall time"] == ["2.5 min"]
    assert found["trained tokens"] == ["1,200"] and found["prompt and response tokens"] == ["1,800"]
    assert "throughput" not in found


def test_outcome_of_an_earlier_end_is_not_shown_for_a_run_that_went_on(tmp_path):
    run = with_rows(tmp_path / "run", [{"kind": "step", "step": step} for step in (1, 2, 3)])  # the summary is of two
    assert dict(summary.costs([run]))["updates"] == ["3 of 2, no summary yet"]


def test_dropped_groups_are_counted_over_all_starts(tmp_path):
    counts = [(0, 1, 90), (1, 2, 10)]
    rows = [{"kind": "step", "incarnation": i, "step": s, "groups/dropped": n} for i, s, n in counts]
    assert dict(summary.diagnostics([with_rows(tmp_path / "run", rows)]))["dropped groups"] == ["100"]


def test_provenance_is_that_of_the_first_start_with_later_changes(tmp_path):
    folder = make_folder(tmp_path / "run", steps=2)
    file = RunFolder(folder).provenance
    record_start(file)
    first = json.loads(file.read_text())
    later = first | {"commit": "e" * 40, "time_s": first["time_s"] + 60, "command": "sluice local"}
    file.write_text(file.read_text() + "torn\n" + json.dumps(later) + "\n")
    found = dict(summary.provenance([read_run(folder)]))
    assert found["command"] == [first["command"]] and found["commit"][0].startswith(first["commit"])
    assert first["host"] in found["machine"][0] and f"python {first['versions']['python']}" in found["versions"][0]
    assert found["preset, seed"] == ["tiny, 0"]
    assert "e" * 40 in found["restarted with"][0] and first["host"] not in found["restarted with"][0]


def test_provenance_of_a_run_without_a_record_says_so(tmp_path):
    found = dict(summary.provenance([read_run(make_folder(tmp_path / "run", steps=2))]))
    assert {found[name][0] for name in ("commit", "command", "machine", "versions", "started")} == {"not recorded"}


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"commit": 5, "host": ["h"], "accelerators": "a", "versions": [], "time_s": "x"}']
)
def test_provenance_of_other_fields_is_shown_as_far_as_it_is_known(tmp_path, line):
    folder = make_folder(tmp_path / "run", steps=2)
    RunFolder(folder).provenance.write_text(line + "\n")
    assert dict(summary.provenance([read_run(folder)]))["versions"] == ["not recorded"]


def group(step, problem, *rewards, kind="eval", order=0):
    responses = [{"reward": reward, "text": "t"} for reward in rewards]
    return {
        "format": 1, "kind": kind, "set": "heldout" if kind == "eval" else "", "step": step, "order": order,
        "prompt_id": problem, "prompt": f"prompt of {problem}", "responses": responses,
    }  # fmt: skip


def with_samples(folder, groups):
    made = make_folder(folder, steps=2, groups=0)
    (made / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in groups))
    return made


def test_problems_have_the_mean_reward_of_their_first_and_last_evaluation(tmp_path):
    groups = [group(0, "a", 0.0, 0.5), group(0, "b", 1.0, order=1), group(10, "a", 1.0, 1.0)]
    groups += [group(5, "a", 0.0, 0.0), group(5, "c", 1.0, kind="train")]
    rows, num = summary.problems(read_samples(with_samples(tmp_path / "run", groups)))
    assert num == 2 and [(r["id"], r["first"], r["last"], r["num_evaluations"]) for r in rows] == [
        ("a", 0.25, 1.0, 3),
        ("b", 1.0, 1.0, 1),
    ]
    assert rows[0]["prompt"] == "prompt of a"


def test_problems_are_limited_and_long_prompts_shortened(tmp_path):
    groups = [group(0, f"{i:03d}", 1.0, order=i) | {"prompt": "word " * 1000} for i in range(250)]
    rows, num = summary.problems(read_samples(with_samples(tmp_path / "run", groups)))
    assert num == 250 and [r["id"] for r in rows] == [f"{i:03d}" for i in range(summary.MAX_PROBLEMS)]
    assert rows[0]["prompt"].endswith("...") and len(rows[0]["prompt"]) < 110


@pytest.mark.heavy
def test_page_of_a_run_without_samples_says_what_is_missing(tmp_path):
    page = build([make_folder(tmp_path / "run", steps=2, groups=0)])
    assert "No problems: samples.jsonl has no evaluation." in page and "fig-reward-histogram" not in page


@pytest.mark.heavy
def test_hostile_provenance_and_prompts_stay_text(tmp_path):
    folder = with_samples(tmp_path / "run", [group(0, HOSTILE[1], 1.0) | {"prompt": HOSTILE[0], "set": HOSTILE[1]}])
    RunFolder(folder).provenance.write_text(json.dumps({"command": HOSTILE[0], "host": HOSTILE[1]}) + "\n")
    page = build([folder])
    assert "<script>window.hurt" not in page and "<img" not in page and "window.hurt = 1" in page
