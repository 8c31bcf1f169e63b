"""The main job on a model whose chat template opens `<think>`: answers are read behind the thinking, with real vLLM."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.model_sizes import TinyModelRecipe
from configs.presets import tiny
from configs.sections import PromptsConfig
from configs.tasks.rows import Turn
from launch.startup import warmup
from launch.startup.preflight import check_model
from learner.data.problem import is_held_out
from tests.integration.support import jobs
from tests.learner.chat_folder import write_chat_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.engine]

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""Opens the assistant's thinking, like the templates of reasoning models."""


def thinking_sums(prompts: PromptsConfig, seed: int, of_sums=warmup._of_sums) -> Iterator[warmup.Example]:
    """Sums as the template asks for them; their partial sums, but for the first term and the total, come first."""
    for question, (answer,) in of_sums(prompts, seed):
        terms = [int(term.replace(" ", "")) for term in re.findall(r"[+-]?\s*\d+", question)]
        thought = " ".join(str(total) for total in list(itertools.accumulate(terms))[1:-1])
        if not is_held_out(question, prompts.held_out_one_in):
            asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"
            yield asked, [Turn(f"{thought}</think>{answer.text}", by_policy=True)]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen sums worked out in its thinking."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warmup, "_of_sums", thinking_sums)
        patched.setattr(warmup, "write_character_tokenizer", lambda parts: write_chat_tokenizer(parts, TEMPLATE))
        # Enough to end the thinking and to be right now and then.
        recipe = TinyModelRecipe(num_clean_steps=150, num_typo_steps=10)
        warmup.make_tiny_model(folder, recipe, tiny.tiny().prompts)
    check_model(tiny.tiny(), folder)
    return folder


def test_run_on_a_model_that_thinks_scores_answers_behind_its_thinking_and_tells_how_long_that_is(thinker: Path):
    job = jobs.start(
        thinker.parent / "run",
        thinker,
        run__num_updates=4,
        rounds__groups_per_round=8,
        rounds__groups_per_update=8,
        rounds__samples_per_group=8,
        admission__width=8,
        actor__max_num_seqs=64,
        packing__rows=4,
        checkpoint__every_n_steps=4,
        evaluation__num_problems=32,
        model__max_tokens=64,
        sampling__max_response_tokens=12,
        packing__row_tokens=256,
    )
    try:
        job.finish()
    finally:
        job.end()
    steps, evaluations = job.rows("step"), job.rows("eval")
    # A partial sum of two terms of one digit and its mark: two or three tokens, where nothing is mistyped.
    assert all(1.5 < s["response/thinking_tokens"] < 5 for s in steps)
    assert all(1.5 < e["eval/thinking_tokens"] < 5 for e in evaluations)
    lines = (job.folder / "samples.jsonl").read_text().splitlines()
    responses = [response for line in lines for response in json.loads(line)["responses"]]
    assert all(
        r["reward"] == 0 and r["tokens"] - r["thinking_tokens"] <= 1 for r in responses if "</think>" not in r["text"]
    )
    assert any(r["reward"] == 1 and 0 < r["thinking_tokens"] < r["tokens"] for r in responses)
