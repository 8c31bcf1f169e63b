"""Reads samples.jsonl (`learner.samples`): a `Sample` is one response, with its group around it.

What the lines say was written by a model, an environment or a data set; nothing of it is trusted.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator

import msgspec

from configs.run_folder import RunFolder

FORMAT = 1


class Score(msgspec.Struct, frozen=True):
    """What a verifier gave."""

    value: float
    verdict: str = ""


class Part(msgspec.Struct, frozen=True):
    """What the policy, or its environment, said without the other between."""

    text: str
    by: str = "policy"


class Response(msgspec.Struct, frozen=True):
    """A response as its line has it."""

    reward: float
    finish: str = ""
    tokens: int = 0
    observed_tokens: int = 0
    text: str = ""
    turns: list[Part] = []
    num_parts: int = 0
    """Parts that the episode had; `turns` may have fewer."""
    scores: dict[str, Score] = {}
    turn_rewards: list[float] = []
    min_version: int | None = None
    max_version: int | None = None
    lag: float | None = None
    lag_max: int | None = None
    advantage: float | None = None
    turn_advantages: list[float] = []
    actor: str = ""

    @property
    def parts(self) -> list[Part]:
        """Who said what, in order."""
        return self.turns or [Part(text=self.text)]


class GroupLine(msgspec.Struct, frozen=True):
    """A line: a group, or what is kept of it."""

    format: int
    kind: str
    step: int
    responses: list[Response]
    prompt: str = ""
    set: str = ""
    round: int = 0
    order: int = 0
    ticket: str = ""
    prompt_id: str = ""
    source: str = ""
    environment: str = ""
    answer: str = ""
    metadata: str = ""
    prompt_tokens: int = 0
    num_responses: int = 0
    incarnation: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One response."""

    group: GroupLine
    response: Response
    index: int
    """Among the responses of its group that are kept, from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """What a run folder has."""

    groups: list[GroupLine]
    """In the order in which they were written; an evaluation that was made again replaces the first."""
    num_unreadable: int
    """Lines that say nothing of the kind."""

    def __iter__(self) -> Iterator[Sample]:
        return (Sample(group, r, i) for group in self.groups for i, r in enumerate(group.responses))

    @property
    def num_responses(self) -> int:
        """Kept ones."""
        return sum(len(group.responses) for group in self.groups)


def read_samples(folder: pathlib.Path) -> Samples:
    """The samples of a run folder; none where it has none.

    A torn last line, of a run that is being written or was killed, is left out.

    Raises:
      ValueError: a line is of a newer format.
    """
    file = RunFolder(folder).samples
    groups: dict[tuple[str, str, int, int], GroupLine] = {}
    if not file.is_file():
        return Samples([], 0)
    decoder = msgspec.json.Decoder(GroupLine)
    num_unreadable = 0
    with open(file, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            group = _decoded(line, decoder)
            if group is None:
                num_unreadable += 1
                continue
            if group.format > FORMAT:
                raise ValueError(f"{file} has samples of format {group.format}, this Sluice reads up to {FORMAT}")
            groups[(group.kind, group.set, group.step, group.order)] = group
    return Samples(list(groups.values()), num_unreadable)


def _decoded(line: bytes, decoder: msgspec.json.Decoder[GroupLine]) -> GroupLine | None:
    """A line; None of what is none. What msgspec is too strict for, as half a surrogate pair, Python's own reads."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return decoder.decode(line)
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.convert(json.loads(line), GroupLine)
    return None
