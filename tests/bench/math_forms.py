"""Verdicts of `math` and of two other verifiers on forms of answers.

    python -m tests.bench.math_forms

The pairs of a gold answer and a response (`tests/actor/rewards/verifiers/math_forms.jsonl`) were judged by hand before
`math` was written for them. `library` is math-verify, `verify(parse(gold), parse(response))`; `library, $` has the gold
answer in `$`; `text` compares the last box as normalized text, as many trainers do by default. A false reward costs 10,
a missed right answer 1.
"""

import asyncio
import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import math_verify
from absl import app

from actor.rewards.types import Response
from actor.rewards.verifier_pool import COMMAND, VerifierError, VerifierPool
from bridge.rollout_types import Task
from tests.actor.rewards.verifiers import math_agreement, math_forms
from tests.bench.harness import page, result

COST_OF_FALSE_REWARD = 10
COLUMNS = {"verifier": "{name}", "false rewards": "{false_rewards}", "missed": "{missed}", "cost": "{cost}"}


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


JUDGES: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], list[int]]] = {
    "math": by_math,
    "library": by_library,
    "library, $": functools.partial(by_library, mark="$"),
    "text": by_text,
}


def by_kind(pairs: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Sequence[int]]) -> str:
    """Returns the table of false rewards + missed answers by kind of answer and verifier."""
    rows: list[dict[str, Any]] = []
    for kind, count in collections.Counter(one["kind"] for one in pairs).items():
        chosen = [i for i, one in enumerate(pairs) if one["kind"] == kind]
        found = {n: totals([pairs[i] for i in chosen], [said[i] for i in chosen]) for n, said in verdicts.items()}
        cells = {name: "{false_rewards} + {missed}".format(**total) for name, total in found.items()}
        rows.append({"kind": kind, "pairs": count, **cells})
    return page.table({name: f"{{{name}}}" for name in ("kind", "pairs", *verdicts)}, rows)


def wrong(pairs: Sequence[Mapping[str, Any]], verdicts: Sequence[int]) -> str:
    """Returns the table of the pairs that are judged wrongly."""
    rows = [
        {
            "pair": one["id"],
            "gold answer": math_agreement.code(one["gold"]),
            "response": math_agreement.code(one["response"]),
            "right": one["is_right"],
        }
        for one, verdict in zip(pairs, verdicts, strict=True)
        if verdict != int(one["is_right"])
    ]
    return page.table({name: f"{{{name}}}" for name in ("pair", "gold answer", "response", "right")}, rows)


def main(argv: list[str]) -> None:
    """Judges all pairs, writes the results, prints the JSON line."""
    del argv
    pairs = math_forms.pairs()
    verdicts = {name: judge(pairs) for name, judge in JUDGES.items()}
    found = {name: totals(pairs, said) for name, said in verdicts.items()}
    values = {f"{key}_{name.replace(', $', '_marked')}": n for name, t in found.items() for key, n in t.items()}
    result.finish(
        "math_forms",
        __doc__,
        values={"pairs": len(pairs), "wrong_pairs": sum(not one["is_right"] for one in pairs), **values},
        aims={"cost_math": result.at_most(min(found["library"]["cost"], found["text"]["cost"]), "the other verifiers")},
        rows=[{"name": name, **total} for name, total in found.items()],
        columns=COLUMNS,
        notes=[
            f"False rewards + missed answers, by kind:\n\n{by_kind(pairs, verdicts)}",
            f"Pairs that `math` judges wrongly:\n\n{wrong(pairs, verdicts['math'])}",
        ],
        beside="the verifiers alone",
    )


if __name__ == "__main__":
    app.run(main)
