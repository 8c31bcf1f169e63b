"""What each response has earned: told to the verifier, the judge's endpoint, the environment, and the auditor. Never 0.

A reward of 0 is what a failure of the infrastructure would be taken for, so that no response may really earn it.
"""

import zlib
from collections.abc import Iterator

LEAST, NUM_LEVELS = 0.25, 4
WORKER, JUDGE, EPISODE = "worker", "judge", "episode"
FIRST_DIGITS = {WORKER: "123", JUDGE: "456", EPISODE: "789"}
"""A prompt is a sum; the first digit of it says the source that it is of."""
NUM_TURNS = 3
"""Of each episode."""


def earned(source: str, text: str) -> float:
    """A quarter, a half, three quarters or 1, by a hash of the text: another for each source."""
    return LEAST * (1 + zlib.crc32(f"{source}:{text}".encode()) % NUM_LEVELS)


def turn_earned(turn: int, action: str) -> float:
    """Of turn `turn` of an episode, from 0."""
    return earned(EPISODE, f"{turn}:{action}")


def prompts(source: str) -> Iterator[tuple[str, str]]:
    """All of a source's, with their sums."""
    for a in FIRST_DIGITS[source]:
        for b in "0123456789":
            for c in "0123456789":
                yield f"{a} + {b} + {c} =", str(int(a) + int(b) + int(c))


def source_of(prompt: str) -> str:
    """The source of a prompt. Raises KeyError if it is of none."""
    return {digit: source for source, digits in FIRST_DIGITS.items() for digit in digits}[prompt[0]]
