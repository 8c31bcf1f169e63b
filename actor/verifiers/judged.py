"""What a verifier is told of a response, and what it says of it."""

from typing import Literal

import msgspec

from bridge.types import Finish

Verdict = Literal["ok", "wrong", "timeout", "hang"]
"""ok: it earned something; wrong: it earned nothing; timeout: the answer's own code ran out of time, which is wrong
(RollPacker section 4.3); hang: the verifier itself hung on the answer's text, each time it was tried: wrong, too, and
counted apart."""


class Response(msgspec.Struct, frozen=True):
    """One response, as text."""

    text: str
    finish: Finish
    num_tokens: int


class Score(msgspec.Struct, frozen=True):
    """What a verifier gives a response, before any weight."""

    value: float
    verdict: Verdict
    case_s: tuple[float, ...] = ()
    """Seconds of each test case that ran and was passed, by index."""
