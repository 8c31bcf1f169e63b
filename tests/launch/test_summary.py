import dataclasses
import json

import numpy as np
import pytest

from bridge.timeline import Timeline
from configs.schema import Config
from configs.sections import RunConfig
from launch import finalize
from launch.startup.prepare_run import PreparedRun
from launch.supervision.supervisor import RunOutcome


def step_row(step, **values):
    return {
        "kind": "step",
        "step": step,
        "time/step_s": float(5 - step),
        "tokens_per_s": 100.0 * step,
        "sequences": 16.0,
        "lag/mean": 0.5,
        "lag/max": float(step),
        "ess": 0.75,
        "response/truncated": 0.125,
        "actor/pause_s": 0.25,
        "groups/dropped": 3.0,
        "groups": [f"{step}a", f"{step}b"],
    } | values


ROWS = [
    {"kind": "eval", "step": 0, "eval/reward": 0.25, "problems": 64},
    {"kind": "probe", "step": 0, "parity/max_abs_dlogprob": 1e-6},
    step_row(1),
    step_row(2, **{"ess": None}),
    {"kind": "round", "step": 2, "round/waiting_ratio": 0.5, "round/waiting_ratio_eq4": 0.25},
    {"kind": "probe", "step": 2, "parity/max_abs_dlogprob": 3e-6},
    step_row(3, **{"lag/max": 1.0, "incarnation": 1}),
    step_row(4, **{"lag/max": 1.0, "incarnation": 1, "groups/dropped": 5.0}),
    {"kind": "round", "step": 4, "round/waiting_ratio": 0.25, "round/waiting_ratio_eq4": 0.0},
    {"kind": "eval", "step": 4, "eval/reward": 0.5, "problems": 60},
]


@pytest.fixture
def prepared(tmp_path):
    config = Config(preset="cgp", run=RunConfig(name="mine", num_updates=4))
    return PreparedRun(config, tmp_path, tmp_path / "model")


def write(prepared, rows, tail=""):
    (prepared.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)


def test_learning_speed_is_the_slope_over_samples_times_samples_a_second():
    steps = [step_row(i, sequences=32.0 if i < 3 else 16.0) for i in range(1, 5)]  # 96 samples in 10 s
    evals = [{"step": step, "eval/reward": reward} for step, reward in ((0, 0.0), (2, 0.75), (4, 0.75))]
    found = finalize.learning_speed(steps, evals)
    assert found is not None
    slope, intercept = np.polyfit([0.0, 64.0, 96.0], [0.0, 0.75, 0.75], 1)
    left = np.array([0.0, 0.75, 0.75]) - intercept - slope * np.array([0.0, 64.0, 96.0])
    error = np.sqrt(np.sum(left**2) / (3 - 2) / np.sum((np.array([0.0, 64.0, 96.0]) - 160 / 3) ** 2))
    wanted = {"effectiveness": slope, "effectiveness_stderr": error, "throughput": 9.6, "speed": 9.6 * slope}
    assert found == pytest.approx(wanted)


def test_summarize_gives_the_run_in_numbers(prepared):
    write(prepared, ROWS)
    assert finalize.summarize(prepared, RunOutcome.DONE) == {
        "preset": "cgp",
        "outcome": "done",
        "steps": 4,
        "checkpoint": None,
        "held_out_reward_start": 0.25,
        "held_out_reward_end": 0.5,
        "held_out_loss_start": None,
        "held_out_loss_end": None,
        "held_out_problems": 60,
        "held_out": [[0, 0.25], [4, 0.5]],
        "evaluations": {},
        "truncated_responses": 0.125,
        "training_s": 10.0,
        "learning_speed": None,  # of two evaluations
        "tokens_per_s": 200.0,  # (4 * 100 + 3 * 200 + 2 * 300 + 1 * 400) tokens in 10 s; the rates' mean is 250
        "lag_mean": 0.5,
        "lag_max": 2.0,
        "ess": 0.75,
        "pause_s": 0.25,
        "engines": {},
        "waiting_ratio": 0.375,
        "waiting_ratio_eq4": 0.125,
        "parity_max_abs_dlogprob": 3e-6,
        "trained_groups": 8,
        "dropped_groups": 8.0,
    }


def test_summarize_of_a_supervised_run_has_its_held_out_losses(prepared):
    evals = [{"kind": "eval", "step": step, "eval/loss": loss, "problems": 64} for step, loss in ((0, 2.5), (2, 0.5))]
    write(
        prepared,
        [evals[0], *({"kind": "step", "step": i, "time/step_s": 1.0, "sequences": 4} for i in (1, 2)), evals[1]],
    )
    got = finalize.summarize(prepared, RunOutcome.DONE)
    assert (got["held_out_loss_start"], got["held_out_loss_end"], got["held_out_problems"]) == (2.5, 0.5, 64)
    assert (got["held_out_reward_end"], got["held_out"], got["learning_speed"], got["steps"]) == (None, [], None, 2)


def test_summarize_of_a_run_that_measured_nothing_is_null(prepared):
    got = finalize.summarize(prepared, RunOutcome.FAILED)
    assert (got["outcome"], got["steps"], got["trained_groups"], got["held_out"]) == ("failed", 0, 0, [])
    assert {got[k] for k in ("held_out_reward_start", "tokens_per_s", "lag_max", "waiting_ratio", "ess")} == {None}


def test_summarize_leaves_a_torn_last_line_out(prepared):
    write(prepared, ROWS[:3], tail='{"kind": "step", "st')
    assert finalize.summarize(prepared, RunOutcome.FAILED)["steps"] == 1


def test_summarize_values_that_were_not_finite_are_left_out(prepared):
    write(prepared, [*ROWS, step_row(5, **{"lag/max": None}), {"kind": "probe", "parity/max_abs_dlogprob": None}])
    got = finalize.summarize(prepared, RunOutcome.DONE)
    assert (got["lag_max"], got["parity_max_abs_dlogprob"]) == (2.0, 3e-6)


@pytest.mark.parametrize("rows", [ROWS, []])
def test_finish_writes_summary_json_and_prints_it(prepared, capsys, rows):
    write(prepared, rows)
    (prepared.folder / "events").mkdir()
    (prepared.folder / "model-4").mkdir()
    got = finalize.finish(prepared, RunOutcome.DONE)
    assert json.loads((prepared.folder / "summary.json").read_text()) == got
    assert (prepared.folder / "trace.json").is_file()
    out = capsys.readouterr().out
    assert "mine: done" in out and str(prepared.folder / "metrics.jsonl") in out
    assert ("held-out reward, end" in out) == bool(rows)
    assert (str(prepared.folder / "model-4") in out) == bool(rows)


def test_engines_are_counted_by_role_over_their_restarts(prepared):
    events = prepared.folder / "events"
    for name, kinds in {
        "actor-0": ["train", "eval"],
        "actor-0-r1": ["train"],
        "actor-1": ["probe"],
        "learner": [],
    }.items():
        log = Timeline(events, name)
        for kind in kinds:
            log.span("rollout", 1, 2, kind=kind)
            log.span("reward", 1, 2, kind=kind)
        log.close()
    want = {"actor-0": {"tickets": 2, "starts": 2}, "actor-1": {"tickets": 0, "starts": 1}}
    assert finalize.summarize(prepared, RunOutcome.DONE)["engines"] == want


def test_summarize_has_the_last_evaluation_of_each_set_with_its_errors(prepared, capsys):
    of_set = {"kind": "eval/aime", "set": "aime", "problems": 3, "eval/aime/truncated": 0.5}
    rows = [
        of_set | {"step": step, "eval/aime/avg@4": value, "eval/aime/avg@4_stderr": 0.125}
        for step, value in ((0, 0.0), (4, 0.5))
    ]
    held_out = ROWS[-1] | {"set": "heldout", "eval/heldout/avg@1": 0.5, "eval/heldout/avg@1_stderr": None}
    texts = {"kind": "eval/texts", "set": "texts", "step": 4, "problems": 3, "eval/texts/loss": 1.25}
    write(prepared, [*ROWS[:-1], *rows, texts, held_out])
    got = finalize.summarize(prepared, RunOutcome.DONE)
    assert got["evaluations"] == {
        "aime": {"step": 4, "avg@4": 0.5, "avg@4_stderr": 0.125},
        "heldout": {"step": 4, "avg@1": 0.5, "avg@1_stderr": None},
        "texts": {"step": 4, "loss": 1.25},
    }
    finalize._print(prepared, got)
    printed = capsys.readouterr().out
    assert "aime avg@4" in printed and "0.500 +- 0.125" in printed and "heldout avg@1" not in printed
    assert "texts loss" in printed and "1.250 nats/token" in printed


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((1, 2), "it continues after step 2 and repeats steps 3 to 4"),
        ((4,), "it continues after step 4\n"),
        ((), "it continues after step 0 and repeats steps 1 to 4"),
    ],
)
def test_summary_of_a_run_that_was_stopped_says_what_is_kept(prepared, capsys, saved, said):
    config = dataclasses.replace(prepared.config, run=RunConfig(name="mine", num_updates=8))
    for step in saved:
        (prepared.folder / "checkpoints" / str(step)).mkdir(parents=True)
    (prepared.folder / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)  # of a save that was killed
    write(prepared, ROWS)
    got = finalize.finish(dataclasses.replace(prepared, config=config), RunOutcome.INTERRUPTED)
    assert (got["steps"], got["checkpoint"]) == (4, max(saved, default=None))
    shown = capsys.readouterr().out
    assert said in shown and "steps kept in the last checkpoint" in shown


def test_summary_of_a_run_that_is_done_says_nothing_of_going_on(prepared, capsys):
    write(prepared, ROWS)
    finalize.finish(prepared, RunOutcome.DONE)
    assert "to resume" not in capsys.readouterr().out


def test_finish_writes_the_summary_though_the_trace_cannot_be_written(prepared, monkeypatch, capsys):
    def merge(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(finalize.timeline, "merge", merge)
    finalize.finish(prepared, RunOutcome.DONE)
    assert json.loads((prepared.folder / "summary.json").read_text())["outcome"] == "done"
    assert "No space left on device" in capsys.readouterr().err
