"""Supervised runs of a tiny model, in this process: what they learn, write, resume, and hand to a run with actors."""

import contextlib
import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import overrides, sections
from configs.run_folder import RunFolder, set_up_run
from launch.startup import preflight
from learner.heartbeat import Stopped
from learner.metrics.metrics_writer import read_rows
from learner.model.architecture import Architecture
from learner.restore import WeightLoader
from learner.supervised import is_due, mean_loss, open_sft, shape_of, train_sft
from tests.learner.chat_folder import make_chat_model, sft_config

ROWS = [{"prompt": f"{a} + {b} = ?", "response": str(a + b)} for a in range(6) for b in range(4)]


@pytest.fixture(autouse=True)
def handlers():
    """The process's signals are afterwards as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def model(tmp_path) -> Path:
    make_chat_model(tmp_path / "model", seed=1)
    return tmp_path / "model"


def trained(config: Any, model: Path, *, stop_at: int | None = None) -> Path:
    """Trains, or until the learner is asked to stop within update `stop_at`; returns the run's folder."""
    folder = set_up_run(config)
    with contextlib.closing(open_sft(config, folder, model)) as run:
        real = run.examples.next_update

        def next_update() -> Any:
            micros = real()
            if stop_at is not None and run.step == stop_at - 1:
                run.heartbeat._stop.set()
            return micros

        run.examples.next_update = next_update
        if stop_at is None:
            train_sft(run)
        else:
            with pytest.raises(Stopped):
                train_sft(run)
            assert run.checkpoints.latest == stop_at - 1
    return folder


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(RunFolder(folder).metrics) if row["kind"] == kind]


def settings(tmp_path: Path, **changed: Any) -> Any:
    fields: dict[str, Any] = dict(
        sft=sections.SftConfig(rows_per_update=8),
        prompts=sections.PromptsConfig(path=str(tmp_path / "rows.jsonl"), held_out_one_in=4),
        evaluation=sections.EvaluationConfig(num_problems=4, every_n_steps=3),
        checkpoint=sections.CheckpointConfig(every_n_steps=2),
    )
    return sft_config(tmp_path, ROWS, **(fields | changed))


@pytest.mark.heavy
def test_run_learns_and_its_model_starts_a_run_with_actors(tmp_path, model):
    config = settings(tmp_path, num_updates=7)
    folder = trained(config, model)
    steps, evals = rows_of(folder, "step"), rows_of(folder, "eval")
    assert [row["step"] for row in steps] == list(range(1, 8))
    assert [row["step"] for row in evals] == [0, 3, 6, 7]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"] and evals[-1]["eval/loss"] < 0.9 * evals[0]["eval/loss"]
    assert not {"reward/mean", "ess", "lag/mean"} & steps[0].keys()
    # What an RL run does with a model: its checks, its loader, its tokenizer.
    target = RunFolder(folder).model(7)
    of_groups = overrides.load_preset("rolloutpipe:tiny")
    of_groups = dataclasses.replace(of_groups, model=dataclasses.replace(of_groups.model, path=str(target)))
    tokenizer = preflight.check_model(of_groups, target)
    assert tokenizer.chat.exists
    params = WeightLoader(of_groups, Architecture.from_hf(target)).load(target, "float32")
    np.testing.assert_array_equal(
        np.asarray(params["embed"]["embedding"]), load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    )


@pytest.mark.heavy
@pytest.mark.parametrize("lora", [0, 4])
def test_run_that_was_stopped_ends_with_the_same_bits_as_one_that_was_not(tmp_path, model, lora):
    config = settings(tmp_path, num_updates=6, lora=sections.LoraConfig(rank=lora) if lora else sections.LoraConfig())
    whole = trained(config, model)
    other = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(tmp_path / "other")))
    trained(other, model, stop_at=4)
    resumed = trained(other, model)
    files = [RunFolder(folder).model(6) / "model.safetensors" for folder in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    losses = [[row["loss"] for row in rows_of(folder, "step")] for folder in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert [row["step"] for row in rows_of(resumed, "eval")] == [0, 3, 6]


AUTO = sections.PackingConfig(rows=4, row_tokens=256, auto=True)


@pytest.mark.heavy
def test_checkpoint_of_a_stop_holds_nothing_of_the_update_that_it_interrupts(tmp_path, model):
    config = settings(tmp_path, num_updates=6, packing=AUTO)
    folder = trained(config, model, stop_at=4)
    with contextlib.closing(open_sft(config, folder, model)) as run:
        state = run.examples.get_state()["packing"]
    assert len(state["packs"]) == state["num_seen"] == 3


@pytest.mark.heavy
def test_evaluation_has_a_shape_of_its_own_rows_before_the_first_update_and_the_same_loss(tmp_path, model):
    config = settings(tmp_path, packing=AUTO)
    with contextlib.closing(open_sft(config, set_up_run(config), model)) as run:
        problems = run.sets[0].problems
        shape = shape_of(problems, config)
        assert shape.rows * shape.row_tokens < AUTO.rows * AUTO.row_tokens / 4
        found = mean_loss(run, problems)
        run.config = dataclasses.replace(config, packing=dataclasses.replace(AUTO, auto=False))
        assert mean_loss(run, problems) == pytest.approx(found, abs=1e-5)


@pytest.mark.heavy
def test_rows_that_cannot_be_trained_are_quarantined_and_counted(tmp_path, model):
    bad = [
        {"prompt": "no response"},
        {"prompt": "long", "response": "x" * 200},
        {"prompt": [{"role": "user", "content": "hi"}]},
        {"prompt": [{"role": "assistant", "content": "me first"}]},
    ]
    prompts = sections.PromptsConfig(path=str(tmp_path / "rows.jsonl"), held_out_one_in=2**31 - 1, max_bad_share=0.2)
    config = sft_config(tmp_path, [*ROWS, *bad], prompts=prompts, sft=sections.SftConfig(rows_per_update=4))
    folder = set_up_run(config)
    with contextlib.closing(open_sft(config, folder, model)) as run:
        assert run.examples._prompts._opened[""].looked_at[0].train.tolist() == list(range(len(ROWS)))
    found = {row["row"]: row["reason"] for row in map(json.loads, RunFolder(folder).quarantine.open())}
    assert sorted(found) == [25, 26, 27, 28]
    assert (
        "no field 'response'" in found[25] and "no assistant message" in found[27] and "before the first" in found[28]
    )
    assert "row has" in found[26] and "expected 1 to 128" in found[26]


@pytest.mark.parametrize(("every", "want"), [(0, [0, 7]), (3, [0, 3, 6, 7]), (7, [0, 7]), (1, list(range(8)))])
def test_evaluations_are_due_at_the_start_the_end_and_between(every, want):
    assert [step for step in range(8) if is_due(step, every=every, last=7)] == want
