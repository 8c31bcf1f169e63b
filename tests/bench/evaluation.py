"""`launch.evaluate` against a plain loop of transformers: `python -m tests.bench.evaluation --model=FOLDER`.

Both answer the same problems greedily, in float32, and one verifier judges both: the numbers must be the same. Then k
samples a problem, with their standard errors and the engine's speed. The problems are small sums and differences in the
model's chat template.
"""

import argparse
import asyncio
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from actor.verifiers.judged import Response
from actor.verifiers.pool import VerifierPool
from bridge.types import Finish, Task

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
                *(sys.executable, "-m", "launch.evaluate", f"--model={model}", f"--out={out}"),
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
    """What the verifier gives each answer; one that was cut off earns nothing, as prompts.truncated has it."""

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


def main() -> None:
    """Measures and prints; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--k", type=int, default=8)
    given = parser.parse_args()
    rows = make_problems(given.problems)
    with tempfile.TemporaryDirectory() as folder:
        prompts = pathlib.Path(folder) / "sums.jsonl"
        prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
        found = evaluate(given.model, prompts, given.k)
    plain, plain_s = plain_answers(given.model, rows)
    rewards = judge(rows, plain)
    by_name = {one["set"]: one for one in found["sets"]}
    of_greedy, of_sampled = by_name["greedy"], by_name["drawn"]
    ours = {s["problem"]: s["responses"][0] for s in of_greedy["samples"]}
    same = [ours[i]["text"] == text for i, (text, _) in enumerate(plain)]
    num_other_rewards = sum(ours[i]["reward"] != reward for i, reward in enumerate(rewards))
    mean = sum(rewards) / len(rewards)
    for i, is_same in enumerate(same):
        if not is_same:
            print(f"problem {i} {rows[i]['prompt']!r}: {ours[i]['text']!r}, transformers {plain[i][0]!r}")
    print(f"greedy       {of_greedy['metrics']['avg@1']}")
    print(f"transformers {mean:.4f}, {sum(same)} of {len(same)} texts the same")
    for name, estimate in of_sampled["metrics"].items():
        print(f"{name:12} {estimate['value']:.4f} +- {estimate['stderr']:.4f}")
    values = {
        "greedy": of_greedy["metrics"]["avg@1"]["value"],
        "greedy_stderr": of_greedy["metrics"]["avg@1"]["stderr"],
        "transformers": mean,
        "same_texts": sum(same) / len(same),
        "other_rewards": num_other_rewards,
        "sampled": of_sampled["metrics"],
        "tokens_per_s": found["sampled_tokens"] / found["seconds"],
        "seconds": found["seconds"],
        "transformers_s": plain_s,
    }
    difference = abs(values["greedy"] - mean)
    aims = {
        "difference": {"value": difference, "aim": 0.0, "met": difference == 0.0},
        "same_texts": {"value": values["same_texts"], "aim": 0.98, "met": values["same_texts"] >= 0.98},
    }
    print(json.dumps({"bench": "evaluation", "values": values, "aims": aims}))


if __name__ == "__main__":
    main()
