"""Measures the time of the text verifiers by the length of odd texts: `python -m tests.bench.verifier_time`.

Judges 2,000 texts with math (each `answer_in`), exact, format and reasoning_gym: runs, nests and mixes of the
characters on which regular expressions and parsers go wrong, from 100 to 100,000 characters. Prints one JSON line: by
verifier and length the largest processor seconds, and the texts above `--limit_s`.
"""

import argparse
import collections
import faulthandler
import json
import random
import sys
import time
from collections.abc import Callable, Iterator

import reasoning_gym

from actor.rewards.types import Context, Response
from actor.rewards.verifiers import math, text_match
from actor.rewards.verifiers import reasoning_gym as gym
from bridge.rollout_types import Task
from configs.sections import RewardsConfig

LENGTHS = (100, 1_000, 10_000, 100_000)
UNITS = (
    " ", "\t", "\n", "\u00a0", "\u3000", "7", "1 ", "0.", "1,", "1,234", "a", "ab ", "word", "\\", "\\\\", "{", "}",
    "{}", "(", ")", "()", "[", "]", "$", "$$", "$1$", "$1$ and ", "\\$", "^", "^{", "_", "!", ",", ", ", ";", ":",
    "%", "*", "**", "#", "####", "#### 5\n", "-", "+", "+1", "=", "x=", "<", ">", "<answer>", "</answer>",
    "<answer>5</answer>", "\\boxed", "\\boxed{", "\\boxed{5}", "\\boxed{5} and ", "\\text{", "\\text{a}", "\\frac",
    "\\frac{1}{", "\\sqrt{", "\\left(", "\\ldots", ", \\ldots", "\\pm", "\\cup", "answer", "answer ", "answer is ",
    "the answer is 5 ", "the answer is 5. ", "Answer: ", "is ", "and ", "or ", "and", "five ", "twenty-", "million ",
    "0.\\overline{3}", "0.3...", "1/2", "/", "|", "'", '"', "?", ".", "\u221a", "\u00b2", "\u00bd", "\u4e2d",
    "\U0001f600", "\x00", "i", "e", "sin ", "\\lfloor ", "\\begin{pmatrix}", "&", "a_1", "x<1 or ",
)  # fmt: skip
GOLDS = ("5", r"\frac{1}{2}", r"1, 2, \ldots, n", r"(-\infty,2)\cup(5,\infty)", "C", "Yes", r"12\text{ cm}", "x^2+1")


def texts(count: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yields lengths and texts: each unit in a run of each length first, bare and in a statement, then mixes."""
    rng = random.Random(seed)
    frames = (
        "{}",
        "\\boxed{{{}}}",
        "The answer is 5{}apples",
        "We add. The answer is {}",
        "<answer>{}</answer>",
        "{}5",
    )
    made: list[tuple[int, str]] = []
    for length in LENGTHS:
        for i, unit in enumerate(UNITS):
            run = (unit * (length // len(unit) + 1))[:length]
            made += [(length, frames[(i + k) % len(frames)].format(run)) for k in range(3)]
    while len(made) < count:
        length = rng.choice(LENGTHS)
        parts = [u * rng.choice((1, 1, 2, 50, 500)) for u in rng.choices(UNITS, k=6)]
        mixed = "".join(rng.choices(parts, k=length // max(1, sum(map(len, parts)) // 6) + 1))[:length]
        made.append((length, rng.choice(frames).format(mixed)))
    yield from made[:count]


def main() -> None:
    """Judges all texts and prints the largest times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="Number of texts.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the mixes.")
    parser.add_argument("--limit_s", type=float, default=1.0, help="Times above it are listed, in seconds.")
    parser.add_argument("--only", default="", help="Name of the one verifier to measure; empty: all.")
    args = parser.parse_args()
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    gym_task = Task.judged_by("reasoning_gym", answer=entry["answer"], metadata=json.dumps(entry, default=str))
    pattern = Context(settings=RewardsConfig(format_pattern=r"<think>.*</think>\s*<answer>.*</answer>"))
    largest: dict[str, dict[int, float]] = collections.defaultdict(lambda: dict.fromkeys(LENGTHS, 0.0))
    slow: list[tuple[str, float, int, str, str]] = []
    judged = 0
    for i, (length, text) in enumerate(texts(args.count, args.seed)):
        gold = GOLDS[i % len(GOLDS)]
        response = Response(text=text, finish="stop" if i % 4 else "length", num_tokens=1)
        math_task = Task.judged_by("math", answer=gold)
        calls: dict[str, Callable[[], object]] = {
            "exact": lambda r=response, t=math_task: text_match.score_exact(r, t, Context()),
            "format": lambda r=response, t=math_task: text_match.score_format(r, t, pattern),
            "reasoning_gym": lambda r=response: gym.score(r, gym_task, Context()),
        }
        for where in ("conclusion", "text", "number"):
            task = Task.judged_by(
                "math", answer="5" if where == "number" else gold, metadata=json.dumps({"answer_in": where})
            )
            calls[f"math {where}"] = lambda r=response, t=task: math.score(r, t, Context())
        for name, call in calls.items():
            if args.only and name != args.only:
                continue
            faulthandler.dump_traceback_later(120, exit=True)
            began = time.process_time()
            call()
            took = time.process_time() - began
            if took > args.limit_s:
                print(name, length, round(took, 2), repr(gold), repr(text[:60]), file=sys.stderr, flush=True)
            faulthandler.cancel_dump_traceback_later()
            judged += 1
            largest[name][length] = max(largest[name][length], took)
            if took > args.limit_s:
                slow.append((name, round(took, 2), length, gold, text[:60]))
    rounded = {name: {str(n): round(s, 4) for n, s in by.items()} for name, by in largest.items()}
    print(
        json.dumps(
            {"texts": args.count, "judged": judged, "largest_s": rounded, "num_slow": len(slow), "slow": slow[:40]}
        )
    )


if __name__ == "__main__":
    main()
