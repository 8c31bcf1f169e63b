"""What the bench of rewards serves: tasks, answers and lengths, all functions of their numbers and of nothing else."""

import dataclasses
import hashlib
import json
import math
from typing import Literal

from actor.sandbox.inside.case import IDLE_FACTOR
from bridge.rollout_types import Task
from tests.bench.rig.lengths import Lengths

Kind = Literal["right", "wrong", "hang"]

T_MIN_S, T_MAX_S, FACTOR = 2.0, 30.0, 1.5
"""RollPacker, section 4.3."""
HANG_SHARE = 0.05
"""RollPacker, section 4.3 and Figure 7(a): around 5% hit the timeout of 30 s."""
SAMPLES = 8
"""R_0 (section 6)."""
PERIOD = ("short", "short", "short", "short", "long")
"""Figures 4 and 13: four short rounds, then a long one."""
MAX_TOKENS = 8192
"""Of Qwen2.5-7B/8k, which Figure 13(c) is of."""
P75_TOKENS = 900.0
"""Section 2.2: the 75th percentile is between 755 and 1.1k tokens."""
SHORT_MAX_OVER_P75 = 16384 / 8.9 / P75_TOKENS
"""Section 3: tail batching makes the longest response of a short round up to 8.9 times shorter, of 16k tokens."""
TOKENS_PER_S = 60.0
"""Of one sequence, however many run. Ours: no figure of the paper has it. The faster, the more rewards count."""
RIGHT_SHARE = 0.5
"""Of the answers that don't hang. Ours, like what follows."""
CASES = 3
CASE_S = (0.05, 2.0)
"""How long a test case of a task runs: log-uniform between these, by task. It sleeps, and so do the hanging ones, as
this machine has two cores where the paper's had hundreds; only what starts and ends programs costs cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is served."""

    prompts: int
    period: tuple[str, ...] = PERIOD
    epochs: int = 2
    """In the second all tasks have been seen, and most have an anchor."""
    speed: float
    """All times are divided by it: of tokens, test cases and timeouts. Sandboxes are as slow as they are."""
    workers: int
    """More than answers that hang at one time, so that nothing waits for a worker."""

    @property
    def sleep_speed(self) -> float:
        """Divisor of timeouts: the programs here sleep, and idle time counts for a part."""
        return self.speed * IDLE_FACTOR


WHOLE = Size(prompts=32, speed=2.0, workers=24)
SMALL = Size(prompts=2, period=("short", "short"), epochs=1, speed=8.0, workers=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A size, and its draws."""

    size: Size
    seed: int = 0

    def lengths(self, round_: int) -> Lengths:
        """Of a round's responses."""
        if self.size.period[round_] == "short":
            # Clipped where the longest response of such a round is.
            return Lengths(
                kind="lognormal",
                max_tokens=round(P75_TOKENS * SHORT_MAX_OVER_P75),
                median=P75_TOKENS / math.exp(0.6745 * math.hypot(0.2, 0.3)),
                prompt_sigma=0.2,
                sample_sigma=0.3,
                seed=self.seed,
            )
        return Lengths(
            kind="lognormal", max_tokens=MAX_TOKENS, median=MAX_TOKENS / 2, prompt_sigma=0.4, sample_sigma=0.3,
            seed=self.seed,
        )  # fmt: skip

    def case_s(self, round_: int, prompt: int) -> float:
        """How long each test case of a task runs, in seconds of this bench."""
        low, high = CASE_S
        return low * (high / low) ** self._draw("case", round_, prompt) / self.size.speed

    def kind(self, epoch: int, round_: int, prompt: int, sample: int) -> Kind:
        """What an answer is like."""
        drawn = self._draw("kind", epoch, round_, prompt, sample)
        if drawn < HANG_SHARE:
            return "hang"
        return "right" if drawn < HANG_SHARE + RIGHT_SHARE * (1 - HANG_SHARE) else "wrong"

    def task(self, round_: int, prompt: int, *, has_solution: bool) -> Task:
        """Sums of two numbers; another task of the same form for each prompt, with a program of its own or without."""
        numbers = [(round_, prompt + 1), (prompt + 1, 7), (prompt + 1, 11)][:CASES]
        tests = [{"input": f"{a} {b}\n", "output": f"{a + b}\n"} for a, b in numbers]
        metadata = {"tests": tests, "code_in": "text"}
        if has_solution:
            metadata["solution"] = self._program(round_, prompt, "+")
        return Task.judged_by("code", answer="", metadata=json.dumps(metadata))

    def answer(self, epoch: int, round_: int, prompt: int, sample: int) -> str:
        """The program that a response is."""
        kind = self.kind(epoch, round_, prompt, sample)
        if kind == "hang":
            return "import time\nwhile True: time.sleep(1)\n"
        return self._program(round_, prompt, "+" if kind == "right" else "-")

    def _program(self, round_: int, prompt: int, sign: str) -> str:
        wait = self.case_s(round_, prompt)
        return f"import time\na, b = map(int, input().split())\ntime.sleep({wait:.4f})\nprint(a {sign} b)\n"

    def _draw(self, *names: object) -> float:
        digest = hashlib.blake2b(repr((self.seed, *names)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64
