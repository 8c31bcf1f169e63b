"""Holds `math` and math-verify as it is against the golden pairs, and writes docs/math_equivalence.md's table.

`python -m tests.actor.rewards.verifiers.math_agreement`; takes minutes, as the library hangs on some.
"""

import asyncio
import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from actor.rewards.types import Response
from actor.rewards.verifier_pool import COMMAND, HangError, VerifierError, VerifierPool
from bridge.rollout_types import Task

FILE = Path(__file__).with_name("math_pairs.jsonl")
PAGE = Path(__file__).resolve().parents[4] / "docs" / "math_equivalence.md"
BEGIN, END = "<!-- made by tests/actor/rewards/verifiers/math_agreement.py -->\n", "<!-- end -->\n"
LIBRARY_COMMAND = (sys.executable, "-m", "tests.actor.rewards.verifiers.library_worker")
MAY_HANG = "hang"
"""The kind of pairs on which a computer algebra system may work for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdicts:
    """By a pair's id: 1.0, 0.0, or None where the worker had to be killed."""

    of_pairs: dict[str, float | None]

    def agrees(self, one: dict[str, Any]) -> bool:
        """With what is right; whoever hangs gives no verdict, which agrees with nothing."""
        return self.of_pairs[one["id"]] == float(one["is_right"])


def golden() -> list[dict[str, Any]]:
    """Returns the pairs: a gold answer, a response, how that ended, and whether it is right.

    Neither a verifier nor computer algebra is asked: a verdict follows from exact arithmetic, or is set by hand, with
    the reason (`why`) where it isn't plain. `limitation` says why `math` gives the other verdict.
    """
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def judge(
    pairs: Iterable[dict[str, Any]], *, verifier: str = "math", command: Sequence[str] = (), timeout_s: float
) -> Verdicts:
    """Each pair's verdict, from a worker that is killed when it hangs; VerifierError if one fails in another way."""

    async def body() -> dict[str, float | None]:
        pool = VerifierPool(num_workers=1, timeout_s=timeout_s, retries=0, command=command or COMMAND)
        verdicts: dict[str, float | None] = {}
        try:
            for one in pairs:
                try:
                    task = Task.judged_by(verifier, answer=one["gold"])
                    response = Response(text=one["response"], finish=one["finish"], num_tokens=1)
                    verdicts[one["id"]] = (await pool.score(verifier, response, task)).value
                except HangError:
                    verdicts[one["id"]] = None
                except VerifierError as e:
                    raise VerifierError(f"{one['id']}: {e}") from e
        finally:
            await pool.close()
        return verdicts

    return Verdicts(of_pairs=asyncio.run(body()))


def table(pairs: Sequence[dict[str, Any]], ours: Verdicts, library: Verdicts, bare: Verdicts) -> str:
    """The shares by kind, and each pair on which the library says otherwise than we want."""
    kinds = collections.Counter(one["kind"] for one in pairs)
    rows = ["| Kind | Pairs | `math` | math-verify | math-verify, reference without `$` |", "|---|---|---|---|---|"]
    for kind, count in kinds.items():
        right = [sum(v.agrees(one) for one in pairs if one["kind"] == kind) for v in (ours, library, bare)]
        rows.append(f"| {kind} | {count} | {right[0]} | {right[1]} | {right[2]} |")
    totals = [sum(map(v.agrees, pairs)) for v in (ours, library, bare)]
    shares = [f"{n} ({100 * n / len(pairs):.1f}%)" for n in totals]
    rows.append(f"| all | {len(pairs)} | {' | '.join(shares)} |")
    rows += [
        "",
        "| Pair | Reference answer | Response | Correct? | math-verify | `math` |",
        "|---|---|---|---|---|---|",
    ]
    for one in pairs:
        if not (library.agrees(one) and ours.agrees(one)):
            said = [_said(v.of_pairs[one["id"]]) for v in (library, ours)]
            why = one.get("why") or one.get("limitation")
            is_right = ("yes" if one["is_right"] else "no") + (f": {why}" if why else "")
            cells = [one["id"], code(one["gold"]), code(one["response"]), is_right, *said]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _said(verdict: float | None) -> str:
    return "hangs" if verdict is None else "right" if verdict else "wrong"


def code(text: str) -> str:
    """Returns a text as HTML code, on one line and shortened."""
    short = text if len(text) <= 60 else f"{text[:40]} ... ({len(text)} characters)"
    escaped = short.encode("unicode_escape").decode().replace("\\\\", "\\").replace("|", "&#124;").replace("`", "'")
    return f"<code>{escaped.replace('<', '&lt;').replace('$', '&#36;').replace('*', '&#42;')}</code>"


def main() -> None:
    pairs = golden()
    ours = judge(pairs, timeout_s=30.0)
    # Its own two deadlines, of five seconds each, end sooner where they end at all.
    library = judge(pairs, verifier="library", command=LIBRARY_COMMAND, timeout_s=15.0)
    bare = judge(pairs, verifier="library_bare", command=LIBRARY_COMMAND, timeout_s=15.0)
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(head + BEGIN + table(pairs, ours, library, bare) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
