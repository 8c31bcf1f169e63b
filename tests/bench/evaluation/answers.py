"""The problems, the command's answers to them, a plain loop's, and the verifier that judges both."""

import asyncio
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierPool
from bridge.rollout_types import Finish, Task

MAX_TOKENS = 24
VERIFIER = "math"
ANSWER_IN = "text"
"""A model that was not tuned answers in a sentence."""


def make_problems(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sums and differences of numbers up to 20."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        a, b, is_sum = draw.randint(1, 20), draw.randint(1, 20), draw.random() < 0.5
        asked = f"What is {a} {'+' if is_sum else '-'} {b}? Reply with the number only."
        if asked not in [r["prompt"] for r in rows]:
            rows.append({"prompt": asked, "answer": a + b if is_sum else a - b})
    return rows


def evaluate(model: str, prompts: pathlib.Path, k: int) -> dict[str, Any]:
    """The command's results: the same problems greedily, and with k samples each, by one engine."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "results.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "launch.tools.evaluate", f"--model={model}", f"--out={out}"),
                *(f"--prompts=greedy={prompts}", f"--prompts=drawn={prompts}", f"--verifier={VERIFIER}"),
                *(f"--max_tokens={MAX_TOKENS}", "--show=1000000", "--config.model.served_dtype=float32"),
                *(f"--config.evaluation.sets.drawn.k={k}", "--config.evaluation.sets.drawn.temperature=1"),
                f"--config.prompts.answer_in={ANSWER_IN}",
                "--config.actor.enforce_eager=true",  # else it compiles for longer than it runs
            ],
            check=True,
        )
        return json.loads(out.read_text())


def plain_answers(model: str, rows: list[dict[str, Any]]) -> tuple[list[tuple[str, Finish]], float]:
    """What transformers answers, one problem after the other, and the seconds that it took."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ends = policy.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    found: list[tuple[str, Finish]] = []
    start = time.perf_counter()
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        said: list[int] = []
        past = None
        with torch.no_grad():
            while len(said) < MAX_TOKENS and not (said and said[-1] in ends):
                out = policy(ids, past_key_values=past, use_cache=True)
                past, token = out.past_key_values, int(out.logits[0, -1].argmax())
                said.append(token)
                ids = torch.tensor([[token]])
        finish: Finish = "stop" if said[-1] in ends else "length"
        found.append((tokenizer.decode(said, skip_special_tokens=True), finish))
    return found, time.perf_counter() - start


def judge(rows: list[dict[str, Any]], answers: list[tuple[str, Finish]]) -> list[float]:
    """What the verifier gives each answer; one that was cut off earns nothing, as prompts.truncated_responses has
    it."""

    async def scores() -> list[float]:
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=2)
        try:
            found: list[float] = []
            for row, (text, finish) in zip(rows, answers, strict=True):
                metadata = json.dumps({"answer_in": ANSWER_IN})
                task = Task.judged_by(VERIFIER, answer=str(row["answer"]), metadata=metadata)
                response = Response(text=text, finish=finish, num_tokens=1)
                found.append((await pool.score(VERIFIER, response, task)).value if finish == "stop" else 0.0)
            return found
        finally:
            await pool.close()

    return asyncio.run(scores())
