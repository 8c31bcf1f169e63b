import io
import json
import os
import pathlib

import pytest
from rich.console import Console

from configs.schema import Config
from configs.sections import LossConfig, RunConfig
from launch.live_view import MetricsTail, PlainProgress, RunView, sparkline, state_texts


def step_row(step, **values):
    return {"kind": "step", "step": step, "reward/mean": 0.25, "lag/mean": 1.0, "ess": 0.9, "tokens_per_s": 1234.0} | {
        k.replace("__", "/"): v for k, v in values.items()
    }


def eval_row(step, reward):
    return {"kind": "eval", "step": step, "eval/reward": reward}


def append(file: pathlib.Path, *rows):
    with open(file, "a") as out:
        out.writelines(json.dumps(r) + "\n" for r in rows)


def replace(file: pathlib.Path, *rows):
    """As a restarted learner does it: another file under the same name."""
    part = file.with_name("part")
    part.write_text("")
    append(part, *rows)
    os.replace(part, file)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def view(tmp_path):
    return RunView(Config(preset="rolloutpipe", run=RunConfig(name="mine", num_updates=40)), tmp_path)


def shown(view, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.render())
    return console.export_text()


def test_new_rows_are_those_since_last_asked(file):
    tail = MetricsTail(file)
    assert tail.new_rows() == (False, [])
    append(file, {"step": 1}, {"step": 2})
    assert [r["step"] for r in tail.new_rows()[1]] == [1, 2]
    assert tail.new_rows() == (False, [])
    append(file, {"step": 3})
    assert tail.new_rows() == (False, [{"step": 3}])


def test_new_rows_leaves_a_half_written_line_until_it_is_whole(file):
    tail = MetricsTail(file)
    file.write_text('{"step": 1}\n{"st')
    assert tail.new_rows()[1] == [{"step": 1}]
    with open(file, "a") as out:
        out.write('ep": 2}\n')
    assert tail.new_rows() == (False, [{"step": 2}])


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": n} for n in (1, 2, 3, 4)]])
def test_new_rows_of_a_replaced_file_starts_over(file, rows):
    tail = MetricsTail(file)
    append(file, {"step": 1}, {"step": 2})
    tail.new_rows()
    replace(file, *rows)
    assert tail.new_rows() == (True, rows)


def test_new_rows_of_a_file_cut_short_starts_over(file):
    tail = MetricsTail(file)
    append(file, {"step": 1}, {"step": 2})
    tail.new_rows()
    file.write_text('{"step": 1}\n')
    assert tail.new_rows() == (True, [{"step": 1}])


def test_render_before_the_first_step_shows_what_each_process_is_at_and_for_how_long(view, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("launch.live_view.time.monotonic", lambda: now_s[0])
    view.status = {"learner": "compiling", "actor": "loading"}
    shown(view)
    now_s[0] += 7
    view.status |= {"actor": "warming up"}
    shown(view)
    now_s[0] += 5
    text = shown(view)
    assert "mine" in text and "step 0/40" in text and "reward" not in text
    (learner,) = (line.split() for line in text.splitlines() if "learner" in line)
    (actor,) = (line.split() for line in text.splitlines() if "actor" in line)
    assert learner[1:-1] == ["learner:", "compiling", "12", "s"]
    assert actor[1:-1] == ["actor:", "warming", "up", "5", "s"]


def test_update_and_render_show_the_latest_numbers(view, file):
    append(file, step_row(1), eval_row(0, 0.125), step_row(2, reward__mean=0.5))
    append(file, {"kind": "round", "step": 2, "round/waiting_ratio": 0.375}, {"kind": "probe", "step": 2})
    assert len(view.update()) == 5
    text = shown(view)
    for wanted in ("step 2/40", "0.500", "0.375", "0.125@0", "1,234", "rolloutpipe"):
        assert wanted in text
    assert view.line().startswith("step 2/40 reward 0.500 lag 1.0 ess 0.900 tokens/s 1,234 eta ")


def test_render_fits_eighty_columns(view, file):
    big = step_row(39, time__wait_s=12.34, time__train_s=12.34, mismatch_kl_k3=0.0123, entropy=1.234, lag__max=12.0)
    append(file, *(step_row(n, reward__mean=n / 40) for n in range(1, 39)), big | {"tokens_per_s": 123456.0})
    append(file, *(eval_row(n, 0.5) for n in range(0, 120, 10)))
    append(file, {"kind": "round", "step": 39, "round/waiting_ratio": 0.375})
    view.update()
    text = shown(view)
    assert max(map(len, text.splitlines())) <= 80
    # No number is cut.
    for wanted in ("123,456", "12.34", "0.0123", "1.234", "0.375", "0.500@110"):
        assert wanted in text
    assert "…" not in text
    (curve,) = (line for line in text.splitlines() if "train reward" in line)
    assert "0.250" in curve  # the curve and its last value on one line


def test_render_values_that_are_not_known_are_a_dash(view, file):
    append(file, step_row(1, reward__mean=None, ess=None))
    view.update()
    assert "reward - lag 1.0 ess -" in view.line()
    shown(view)


def test_update_replaced_file_forgets_the_abandoned_steps(view, file):
    append(file, *(step_row(n) for n in range(1, 6)), eval_row(5, 0.5))
    view.update()
    replace(file, *(step_row(n) for n in (1, 2)))
    view.update()
    assert [s["step"] for s in view.steps] == [1, 2] and view.evals == []
    assert "step 2/40" in shown(view)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([], "-"),
        ([None], "-"),
        ([0.5], "▁  0.500"),
        ([1, 1, 1], "▁▁▁  1.000"),
        ([0, 7, None, 3.5], "▁█▄  3.500"),
        ([-1, 0, 1], "▁▄█  1.000"),
    ],
)
def test_sparkline_scales_from_the_lowest_to_the_highest(values, want):
    assert sparkline(values) == want


def test_sparkline_long_history_is_averaged_down_to_the_width():
    text = sparkline([n // 10 for n in range(80)], width=8)
    assert text == "▁▂▃▄▅▆▇█  7.000"
    assert len(sparkline([float(n) for n in range(1001)], width=60).split()[0]) <= 60


def test_told_few_processes_are_told_one_by_one():
    status = {"learner": "pid 1", "actor-0": "pid 2, starting", "actor-1": "exited (1), not restarted"}
    assert state_texts(status) == ["learner: pid 1", "actor-0: pid 2, starting", "actor-1: exited (1), not restarted"]


def test_told_of_many_actors_those_that_do_the_same_are_told_together():
    status = {"learner": "pid 1"} | {f"actor-{i}": f"pid {10 + i}, waiting" for i in range(14)}
    status |= {"actor-14": "pid 30, starting", "actor-15": "exited (1), not restarted", "actor-16": "pid 31"}
    assert state_texts(status) == [
        "learner: pid 1",
        "14 actors: waiting",
        "actor-14: starting",
        "actor-15: exited (1), not restarted",
        "actor-16: running",
    ]


def test_view_shows_the_last_estimates_of_each_evaluation_set_with_their_errors(view, file):
    row = {"kind": "eval/aime", "set": "aime", "eval/aime/truncated": 0.5}
    for step, value in ((0, 0.0), (4, 0.25)):
        estimates = {"eval/aime/avg@4": value, "eval/aime/avg@4_stderr": 0.125, "eval/aime/maj@4": 0.5}
        append(file, row | {"step": step} | estimates | {"eval/aime/maj@4_stderr": None})
    append(file, step_row(4))
    view.update()
    assert "aime" in shown(view) and "avg@4 0.250+-0.125 maj@4 0.500  @4" in shown(view)
    replace(file, step_row(1))
    view.update()
    assert "aime" not in shown(view)


def test_process_keeps_its_line_where_not_all_fit_beside_each_other(view, file):
    append(file, step_row(1))
    view.update()
    states = ["learner: pid 1, starting", "actor-0: pid 2", "actor-1-r1: pid 3, loading weights to the device"]
    view.status = dict(state.split(": ") for state in states)
    assert [state for state in states if state not in shown(view)] == []


def test_view_of_80_columns_breaks_no_word(file, tmp_path):
    folder = pathlib.Path("/home/someone/projects/experiments/reinforcement/learning/runs/arithmetic_smollm2")
    view = RunView(Config(preset="tiny", run=RunConfig(num_updates=100_000)), folder)
    view._tail = MetricsTail(file)
    view.status = {
        "learner": "pid 123456, compiling accumulate (8 x 128 tokens)",
        "actor-0": "pid 1234, engine: capturing graphs and profiling the memory of the accelerator device",
        "actor-1": "exited (1), not restarted",
    }
    states = {word for state in state_texts(view.status) for word in state.split()}
    assert states <= set(shown(view).split())
    row = {"kind": "eval/hard_problems_of_a_set", "set": "hard_problems_of_a_set", "step": 99_998}
    append(file, step_row(99_998), row | {"eval/hard_problems_of_a_set/mean@4": 0.5})
    view.update()
    words = set(shown(view).split())
    assert states | {"hard_problems_of_a_set", "99998/100000", "learning/runs/arithmetic_smollm2"} <= {
        *words,
        *(word.partition("reinforcement/")[2] for word in words),
    }


def test_supervised_run_shows_its_losses_and_no_samples(tmp_path, file):
    config = Config(preset="sft", loss=LossConfig(name="sft"), run=RunConfig(name="mine", num_updates=40))
    view, lines = RunView(config, tmp_path), list[str]()
    progress = PlainProgress(view, lines.append)
    progress.update(view.update())
    losses = [{"kind": "step", "step": i, "loss": 3.0 - i, "tokens_per_s": 1234.0} for i in (1, 2)]
    append(
        file,
        {"kind": "eval", "step": 0, "eval/loss": 2.75},
        *losses,
        {"kind": "eval/b", "set": "b", "step": 2, "eval/b/loss": 0.5},
    )
    progress.update(view.update())
    assert [line.partition("] ")[2] for line in lines] == [
        "held-out loss 2.750 at step 0",
        "evaluation b loss 0.500 at step 2",
        "step 2/40 loss 1.000 tokens/s 1,234 eta -",
    ]
    text = shown(view)
    assert "train loss" in text and "2.750@0" in text and "loss 0.500" in text
    assert "reward" not in text and "lag" not in text and "truncated" not in text
