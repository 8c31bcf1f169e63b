"""A run with several evaluation sets, and its last model evaluated alone: one run, and what several tests see of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.sections.evaluation import HELD_OUT
from learner.evaluation.evaluator import row_kind
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
        admission__width="auto",
        admission__sequences=24,
        prompts__truncated_responses="keep",  # nearly all that an untrained model says is cut off: not judged
        evaluation__every_n_steps=6,
        evaluation__sets__greedy__temperature=0,
        evaluation__sets__many__k=4,
        evaluation__sets__many__num_problems=8,
        evaluation__sets__own__path=here / "own.jsonl",
        evaluation__sets__own__verifier="exact",
        evaluation__sets__own__k=2,
        evaluation__sets__own__every_n_steps=0,
        evaluation__max_engine_fraction=0.5,
    )
    try:
        job.finish()
        yield job
    finally:
        job.end()


@pytest.fixture(scope="module")
def alone(job: jobs.Job) -> dict[str, Any]:
    """The results of the run's last weights, by the command, with the responses to all problems."""
    return evaluate(f"--run_dir={job.folder}", f"--out={job.folder / 'results.json'}", "--show=1000")


def evaluate(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "launch.tools.evaluate", *arguments]
    done = subprocess.run(
        command, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = next(a.removeprefix("--out=") for a in arguments if a.startswith("--out="))
    assert f"results      {out}" in done.stdout
    return json.loads(Path(out).read_text())


def read_samples(job: jobs.Job) -> list[dict[str, Any]]:
    """The groups of evaluations that the run keeps as text."""
    lines = (job.folder / "samples.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "eval"]


def test_each_set_is_evaluated_at_the_start_when_it_is_due_and_by_the_last_weights(job: jobs.Job):
    found = {name: job.rows(row_kind(name)) for name in (HELD_OUT, "greedy", "many", "own")}
    for name, of_set in found.items():
        numbers = "eval" if name == HELD_OUT else f"eval/{name}"
        steps = [r["step"] for r in of_set]
        assert steps[0] == 0 and steps[-1] == NUM_UPDATES and steps == sorted(set(steps))
        assert len(steps) == 2 if name == "own" else 2 <= len(steps) <= 3
        # Of the last one nothing was published under it; an earlier one may end on newer weights.
        versions = [(r[f"{numbers}/version"], r[f"{numbers}/last_version"]) for r in of_set]
        assert versions[-1] == (NUM_UPDATES, NUM_UPDATES)
        assert all(step <= first <= last for step, (first, last) in zip(steps, versions, strict=True))
        assert {r["set"] for r in of_set} == {name}
    assert {r["k"] for r in found["many"]} == {4} and {r["problems"] for r in found["many"]} == {8}
    assert all(
        {f"eval/many/{e}" for e in ("avg@4", "pass@2", "pass@4", "maj@4_stderr")} <= r.keys() for r in found["many"]
    )
    assert {r["problems"] for r in found["own"]} == {5}
    samples = [s for s in read_samples(job) if s["set"] == "many"]
    assert {s["step"] for s in samples} == {r["step"] for r in found["many"]}
    assert all(len(s["responses"]) == 4 and all(r["tokens"] > 0 for r in s["responses"]) for s in samples)


def test_nothing_is_trained_on_what_a_set_asks(job: jobs.Job):
    jobs.check_every_group_trained_once(job, num_updates=NUM_UPDATES, per_update=2, by_window=True)


def test_last_weights_evaluated_alone_give_the_greedy_numbers_of_the_run(job: jobs.Job, alone: dict[str, Any]):
    """The same weights over another way: a folder read by vLLM, and not a snapshot swapped into it."""
    of_run = job.rows(row_kind("greedy"))[-1]
    (of_folder,) = [one for one in alone["sets"] if one["set"] == "greedy"]
    assert alone["step"] == NUM_UPDATES and of_folder["metrics"]["avg@1"] == {
        "value": of_run["eval/greedy/avg@1"],
        "stderr": of_run["eval/greedy/avg@1_stderr"],
    }
    samples = [s for s in read_samples(job) if (s["set"], s["step"]) == ("greedy", NUM_UPDATES)]
    texts = [[r["text"] for s in of for r in s["responses"]] for of in (samples, of_folder["samples"])]
    assert len(texts[0]) >= 8 and texts[0] == texts[1][: len(texts[0])]
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


@pytest.mark.nightly
def test_greedy_answers_of_the_command_are_those_of_transformers(tmp_path: Path, model: Path):
    import torch
    import transformers

    rows = [{"prompt": f"{a} + {b} =", "answer": a + b} for a in range(1, 5) for b in range(1, 5)]
    file, num_tokens = tmp_path / "sums.jsonl", 8
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = evaluate(
        *(f"--model={model}", f"--out={tmp_path / 'results.json'}", f"--prompts=greedy={file}", "--verifier=exact"),
        *(f"--max_tokens={num_tokens}", "--show=1000", "--config.model.served_dtype=float32"),
        "--config.actor.enforce_eager=true",
    )["sets"]
    texts = {sample["problem"]: sample["responses"][0]["text"] for sample in found["samples"]}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = {}
    for number, row in enumerate(rows):
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False).input_ids  # it has no template
        said = policy.generate(ids, do_sample=False, max_new_tokens=num_tokens)[0, ids.shape[1] :]
        wanted[number] = tokenizer.decode(said, skip_special_tokens=False)
    # Two tokens may be as likely to the last digit.
    assert sum(texts[number] != text for number, text in wanted.items()) <= 1
