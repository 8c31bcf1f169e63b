"""Compares the verdicts of `math` with two other verifiers on `tests/actor/rewards/verifiers/math_forms.jsonl`.

`python -m tests.bench.math_forms --label after` judges all pairs and stores the verdicts of `math` under that label in
tests/bench/results/math_forms.json, beside those of math-verify and of a verifier by normalized text. It writes
math_forms.md there and prints one JSON line with the totals. A false reward costs 10, a missed right answer 1.
"""

import argparse
import asyncio
import collections
import functools
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import math_verify

from actor.rewards.types import Response
from actor.rewards.verifier_pool import COMMAND, VerifierError, VerifierPool
from bridge.rollout_types import Task
from tests.actor.rewards.verifiers import math_agreement, math_forms

RESULTS = Path(__file__).with_name("results") / "math_forms.json"
COST_OF_FALSE_REWARD = 10


def by_library(pairs: Sequence[Mapping[str, Any]], mark: str = "") -> list[int]:
    """Returns the verdicts of math-verify with its own time limits; `mark`: written on both sides of a gold answer."""
    parse = math_verify.parse
    return [int(math_verify.verify(parse(mark + p["gold"] + mark), parse(p["response"]))) for p in pairs]


def by_text(pairs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the verdicts of a verifier as RL trainers have by default: the last box, normalized, must be the text."""
    return [int(_normalized(_last_box(one["response"])) == _normalized(one["gold"])) for one in pairs]


def by_math(pairs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the verdicts of `math`, in a worker that is killed when it hangs; an error gives no reward."""

    async def body() -> list[int]:
        pool = VerifierPool(num_workers=1, timeout_s=20.0, retries=0, command=COMMAND)
        verdicts: list[int] = []
        try:
            for one in pairs:
                response = Response(text=one["response"], finish=one["finish"], num_tokens=1)
                try:
                    score = await pool.score("math", response, Task.judged_by("math", answer=one["gold"]))
                    verdicts.append(int(score.value))
                except VerifierError:
                    verdicts.append(0)
        finally:
            await pool.close()
        return verdicts

    return asyncio.run(body())


def totals(pairs: Sequence[Mapping[str, Any]], verdicts: Sequence[int]) -> dict[str, int]:
    """Returns the numbers of false rewards and of missed right answers, and their cost."""
    false_rewards = sum(v and not one["is_right"] for one, v in zip(pairs, verdicts, strict=True))
    missed = sum(one["is_right"] and not v for one, v in zip(pairs, verdicts, strict=True))
    return {"false_rewards": false_rewards, "missed": missed, "cost": COST_OF_FALSE_REWARD * false_rewards + missed}


def _last_box(response: str) -> str:
    start = response.rfind("\\boxed{")
    if start < 0:
        return response.strip().splitlines()[-1] if response.strip() else ""
    depth = 0
    for at in range(start + 6, len(response)):
        depth += (response[at] == "{") - (response[at] == "}")
        if depth == 0:
            return response[start + 7 : at]
    return ""


def _normalized(text: str) -> str:
    text = re.sub(r"\\(?:left|right|text\{[^}]*\}$|[!,;: ])|\\?[$%]|\^\\circ|\^\{\\circ\}|\s", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^(\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    return re.sub(r"^[a-z]=", "", text).rstrip(".")


def page(pairs: Sequence[Mapping[str, Any]], stored: Mapping[str, Any]) -> str:
    """Returns the page: cost by verifier, false rewards and misses by kind, and the pairs on which verdicts differ."""
    names = list(stored["verdicts"])
    num_wrong = sum(not one["is_right"] for one in pairs)
    rows = [
        "# Verdicts on forms of answers",
        "",
        f"{len(pairs)} pairs (tests/actor/rewards/verifiers/math_forms.jsonl), {num_wrong} wrong, judged by hand",
        f"before `math` was changed. `before` and `after` are `math` (commits: {stored['commits']}). `library` is",
        "math-verify, `verify(parse(gold), parse(response))`; `library, $` has the gold answer in `$`; `text`",
        "compares the last box as normalized text. Made by `python -m tests.bench.math_forms`. A false reward",
        "costs 10, a missed right answer 1.",
        "",
    ]
    rows += ["| verifier | false rewards | missed | cost |", "|---|---|---|---|"]
    for name in names:
        rows.append("| {} | {false_rewards} | {missed} | {cost} |".format(name, **stored["totals"][name]))
    rows += ["", "False rewards + missed, by kind:", ""]
    rows += [f"| kind | pairs | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for kind, count in collections.Counter(one["kind"] for one in pairs).items():
        chosen = [i for i, one in enumerate(pairs) if one["kind"] == kind]
        cells = []
        for name in names:
            t = totals([pairs[i] for i in chosen], [stored["verdicts"][name][i] for i in chosen])
            cells.append(f"{t['false_rewards']} + {t['missed']}")
        rows.append(f"| {kind} | {count} | {' | '.join(cells)} |")
    rows += ["", "Pairs on which not all are right (1: reward):", ""]
    rows += [
        f"| pair | gold answer | response | right | {' | '.join(names)} |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for i, one in enumerate(pairs):
        said = [stored["verdicts"][name][i] for name in names]
        if any(v != int(one["is_right"]) for v in said):
            cells = [one["id"], *map(math_agreement.code, (one["gold"], one["response"])), int(one["is_right"]), *said]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Judges, stores and prints the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="after", help="Name of the verdicts of `math`: before or after.")
    label = parser.parse_args().label
    pairs = math_forms.pairs()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"commits": {}, "verdicts": {}}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    stored["commits"][label] = commit.stdout.strip()
    judges: dict[str, Callable[[Sequence[Mapping[str, Any]]], list[int]]] = {label: by_math}
    judges |= {"library": by_library, "library, $": functools.partial(by_library, mark="$"), "text": by_text}
    stored["verdicts"] |= {name: judge(pairs) for name, judge in judges.items()}
    stored["totals"] = {name: totals(pairs, verdicts) for name, verdicts in stored["verdicts"].items()}
    RESULTS.write_text(json.dumps(stored) + "\n")
    RESULTS.with_suffix(".md").write_text(page(pairs, stored))
    print(json.dumps(stored["totals"]))


if __name__ == "__main__":
    main()
