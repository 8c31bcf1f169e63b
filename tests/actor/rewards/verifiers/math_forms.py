r"""Forms of answers that models and data sets have, judged by hand before `math` was changed for them.

A line of `math_forms.jsonl` is a gold answer with responses that are right and wrong: whole responses, or (`boxed`)
texts that stand in a `\boxed{}`. A verdict is that of a careful reader who knows the gold answer alone: an answer that
is not surely the same is wrong. Percentages may leave out their sign, and units may be left out, as
docs/math_equivalence.md says.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("math_forms.jsonl")


def boxed(text: str) -> str:
    """Returns a response that states a text in a box."""
    return rf"Hence the result is $\boxed{{{text}}}$."


def pairs() -> list[dict[str, Any]]:
    """Returns the pairs in the format of `math_agreement.golden`, each with an id of its own."""
    made: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        form = json.loads(line)
        kind = form["kind"]
        for is_right, texts in ((True, form["right"]), (False, form["wrong"])):
            for text in texts:
                counts[kind] = counts.get(kind, 0) + 1
                response = boxed(text) if form["boxed"] else text
                one = {"id": f"{kind}-{counts[kind]}", "kind": kind, "gold": form["gold"], "response": response}
                made.append(one | {"finish": "stop", "is_right": is_right})
    return made
