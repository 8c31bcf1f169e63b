"""What a run's model says beside what it said before."""

import dataclasses
import io
import json
import pathlib

import pytest
from rich.console import Console

from configs.schema import Config
from configs.sections import EvaluationConfig, ModelConfig, PromptsConfig, SamplingConfig
from launch import before_after
from tests.learner.model_folder import make_model_folder

CONFIG = Config(
    preset="test",
    model=ModelConfig(max_tokens=64),
    prompts=PromptsConfig(path="rows.jsonl", eval_path="held_out.jsonl", verifier="math"),
    sampling=SamplingConfig(max_response_tokens=4),
    evaluation=EvaluationConfig(num_problems=8),
)


def test_last_model_is_the_one_of_the_most_steps(tmp_path):
    with pytest.raises(ValueError, match="has no model yet"):
        before_after.last_model(tmp_path)
    for name in ("model-9", "model-10", "model-new"):
        (tmp_path / name).mkdir()
    assert before_after.last_model(tmp_path).name == "model-10"


def test_held_out_problems_are_the_first_of_the_runs_own(tmp_path):
    for name, first in (("rows", 100), ("held_out", 0)):
        rows = [{"prompt": f"What is {first + i}?", "answer": i} for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = PromptsConfig(
        path=str(tmp_path / "rows.jsonl"), eval_path=str(tmp_path / "held_out.jsonl"), verifier="math"
    )
    config = dataclasses.replace(CONFIG, prompts=prompts)
    problems, _ = before_after.held_out(config, make_model_folder(tmp_path / "model"), num=3)
    assert [(p.question, p.task.answer) for p in problems] == [(f"What is {i}?", str(i)) for i in range(3)]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dataclasses.replace(CONFIG, prompts=PromptsConfig(environment="guess")), "episodes of an environment"),
        (
            dataclasses.replace(
                CONFIG,
                evaluation=EvaluationConfig(num_problems=0),
                publish=dataclasses.replace(CONFIG.publish, probe_every_n_publishes=0),
            ),
            "holds no problems out",
        ),
    ],
)
def test_run_without_single_responses_to_show_is_refused(config, said):
    with pytest.raises(ValueError, match=said):
        before_after.held_out(config, pathlib.Path("unused"), num=3)


def test_table_has_both_texts_as_they_are():
    asked = before_after.Asked(question="2 + 2?", answer="4", before="[bold]five[/bold]", after=" 4\n")
    console = Console(file=io.StringIO(), width=120)
    console.print(before_after.table([asked], before="a", after="b"))
    said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "[bold]five[/bold]" in said and "2 + 2?" in said
