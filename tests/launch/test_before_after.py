"""What a run's model says beside what it said before."""

import dataclasses
import io
import json
import pathlib

import pytest
from rich.console import Console

from bridge.types import RewardPart, Task
from configs.schema import Config
from configs.sections import EvaluationConfig, ModelConfig, PromptsConfig, SamplingConfig
from launch import before_after
from learner.data.problems import Problem
from learner.data.tokenizer import load_tokenizer
from tests.learner.model_folder import CONFIG as MODEL
from tests.learner.model_folder import VOCAB_SIZE, make_model_folder

TASK = Task(rewards=(RewardPart("math", 1.0),), answer="5", metadata="{}")

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


@pytest.mark.heavy
def test_response_is_what_the_model_says_token_by_token(tmp_path):
    """A plain loop over transformers' logits says the same, greedily; sampled it ends by itself or at the limit."""
    import torch
    import transformers

    tokenizer = load_tokenizer(make_model_folder(tmp_path / "tokenizer"), vocab_size=VOCAB_SIZE)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL))
    model.save_pretrained(tmp_path / "model")
    # Of the folder's own, which a run does not sample by.
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1}))
    problems = [Problem(text, tokenizer.encode(text), TASK) for text in ("ab", "2 + 3 =")]
    wanted = []
    for problem in problems:
        tokens = problem.prompt_tokens.tolist()
        for _ in range(CONFIG.sampling.max_response_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in tokenizer.stop_token_ids:
                break
        wanted.append(tokenizer.decode(tokens[problem.prompt_tokens.size :]))
    greedy = dataclasses.replace(CONFIG, evaluation=EvaluationConfig(num_problems=8, temperature=0.0))
    assert before_after.respond(tmp_path / "model", problems, tokenizer, greedy) == wanted
    many = [problems[0]] * 12
    sampled = before_after.respond(tmp_path / "model", many, tokenizer, CONFIG)
    assert len(set(sampled)) > 6 and all(len(said) <= CONFIG.sampling.max_response_tokens for said in sampled)


def test_table_has_both_texts_as_they_are():
    asked = before_after.Asked(question="2 + 2?", answer="4", before="[bold]five[/bold]", after=" 4\n")
    console = Console(file=io.StringIO(), width=120)
    console.print(before_after.table([asked], before="a", after="b"))
    said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "[bold]five[/bold]" in said and "2 + 2?" in said
