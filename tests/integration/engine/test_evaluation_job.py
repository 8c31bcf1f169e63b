"""A run with several evaluation sets, and its last model evaluated alone: one run, and what several tests see of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.evaluation.eval_summary import read_evaluations
from tests.integration.support import jobs
from tests.integration.support.processes import REPO

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_UPDATES = 12


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, model: Path):
    """By window, so that weights change under evaluations; `many` has 4 samples a problem, `own` a file of its own."""
    here = tmp_path_factory.mktemp("here")
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a, b in ((1, 2), (3, 4), (5, 1), (2, 2), (9, 9))]
    (here / "own.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    job = jobs.start(
        here / "run",
        model,
        config="pipelinerl:tiny",
        cwd=here,
        admission__width=0,
        admission__sequences=24,
        prompts__truncated="keep",  # nearly all that an untrained model says is cut off, and would not be judged
        evaluation__every_n_steps=6,
        evaluation__sets__greedy__temperature=0,
        evaluation__sets__many__k=4,
        evaluation__sets__many__num_problems=8,
        evaluation__sets__own__path=here / "own.jsonl",
        evaluation__sets__own__verifier="exact",
        evaluation__sets__own__k=2,
        evaluation__sets__own__every_n_steps=0,
        evaluation__max_share=0.5,
    )
    try:
        job.finish()
        yield job
    finally:
        job.end()


@pytest.fixture(scope="module")
def alone(job: jobs.Job) -> dict[str, Any]:
    """The results of the run's last weights, by the command."""
    return evaluate(f"--run_dir={job.folder}", f"--out={job.folder / 'results.json'}")


def evaluate(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "launch.tools.evaluate", *arguments]
    done = subprocess.run(
        command, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = next(a.removeprefix("--out=") for a in arguments if a.startswith("--out="))
    assert f"results      {out}" in done.stdout
    return json.loads(Path(out).read_text())


def test_each_set_is_evaluated_at_the_start_when_it_is_due_and_by_the_last_weights(job: jobs.Job):
    records = read_evaluations(job.folder / "evaluations.jsonl")
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record["set"], []).append(record)
    assert found.keys() == {"heldout", "greedy", "many", "own"}
    for name, of_set in found.items():
        steps = [r["step"] for r in of_set]
        assert steps[0] == 0 and steps[-1] == NUM_UPDATES and steps == sorted(set(steps))
        assert len(steps) == 2 if name == "own" else 2 <= len(steps) <= 3
        # Of the last one nothing was published under it; an earlier one may end on newer weights.
        assert (of_set[-1]["version"], of_set[-1]["last_version"]) == (NUM_UPDATES, NUM_UPDATES)
        assert all(r["version"] >= r["step"] and r["last_version"] >= r["version"] for r in of_set)
        assert [r["step"] for r in job.rows("eval" if name == "heldout" else f"eval/{name}")] == steps
    assert {r["k"] for r in found["many"]} == {4} and {r["problems"] for r in found["many"]} == {8}
    assert {tuple(r["metrics"]) for r in found["many"]} == {("avg@4", "pass@1", "pass@2", "pass@4", "maj@4")}
    assert all(r["problems"] == 5 and len(r["samples"]) == 5 for r in found["own"])
    responses = found["many"][0]["samples"][0]["responses"]
    assert len(responses) == 4 and all(r["tokens"] > 0 and "answer" in r for r in responses)


def test_nothing_is_trained_on_what_a_set_asks(job: jobs.Job):
    jobs.check_every_group_trained_once(job, num_updates=NUM_UPDATES, per_update=2, by_window=True)


def test_last_weights_evaluated_alone_give_the_greedy_numbers_of_the_run(job: jobs.Job, alone: dict[str, Any]):
    """The same weights over another way: a folder read by vLLM, and not a snapshot swapped into it."""
    of_run = [r for r in read_evaluations(job.folder / "evaluations.jsonl") if r["set"] == "greedy"][-1]
    (of_folder,) = [one for one in alone["sets"] if one["set"] == "greedy"]
    assert alone["step"] == NUM_UPDATES and of_folder["metrics"] == of_run["metrics"]
    texts = [[r["text"] for s in of["samples"] for r in s["responses"]] for of in (of_run, of_folder)]
    assert texts[0] == texts[1] and len(texts[0]) == 8
    assert [one["set"] for one in alone["sets"]] == ["heldout", "greedy", "many", "own"]
    assert alone in [json.loads(file.read_text()) for file in (job.folder / "evaluated").iterdir()]


def test_checkpoint_is_exported_once_and_evaluated_with_the_same_seed_alike(job: jobs.Job):
    steps = sorted(int(p.name) for p in (job.folder / "checkpoints").iterdir() if p.name.isdigit())
    step = steps[0]
    arguments = (f"--run_dir={job.folder}", f"--step={step}", "--prompts=heldout", "--k=4", "--limit=12", "--seed=5")
    first = evaluate(*arguments, f"--out={job.folder / 'a.json'}", "--show=12")
    assert (job.folder / f"model-{step}" / "model.safetensors").is_file() and first["step"] == step
    made = (job.folder / f"model-{step}" / "model.safetensors").stat().st_mtime_ns
    again = evaluate(*arguments, f"--out={job.folder / 'b.json'}", "--show=12", "--config.actor.max_num_seqs=3")
    assert (job.folder / f"model-{step}" / "model.safetensors").stat().st_mtime_ns == made
    # In batches of another size: what is drawn is each sample's own.
    assert first["sets"][0]["samples"] == again["sets"][0]["samples"] and first["sets"][0]["k"] == 4
