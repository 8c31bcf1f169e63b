"""Reader and terminal view of sample files.

The text in the files comes from a model, an environment or a dataset, and is untrusted.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from configs.run_folder import RunFolder

FORMAT = 1


class ScoreEntry(msgspec.Struct, frozen=True):
    """Score of one verifier."""

    value: float
    verdict: str = ""


class ResponsePart(msgspec.Struct, frozen=True):
    """Text of one turn, by the policy or its environment."""

    text: str
    by: str = "policy"


class ResponseLine(msgspec.Struct, frozen=True):
    """A response in a samples file."""

    reward: float
    finish: str = ""
    tokens: int = 0
    observed_tokens: int = 0
    text: str = ""
    turns: list[ResponsePart] = []
    num_parts: int = 0
    """Number of turns in the episode; `turns` may have fewer."""
    scores: dict[str, ScoreEntry] = {}
    turn_rewards: list[float] = []
    min_version: int | None = None
    max_version: int | None = None
    lag: float | None = None
    lag_max: int | None = None
    advantage: float | None = None
    turn_advantages: list[float] = []
    actor: str = ""

    @property
    def parts(self) -> list[ResponsePart]:
        """Turns of the response in order; a response without turns counts as one."""
        return self.turns or [ResponsePart(text=self.text)]


class GroupLine(msgspec.Struct, frozen=True):
    """A line of a samples file: a group with all or some of its responses."""

    format: int
    kind: str
    step: int
    responses: list[ResponseLine]
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
class SampleEntry:
    """Response with its group."""

    group: GroupLine
    response: ResponseLine
    index: int
    """Index among the stored responses of the group, from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a run folder."""

    groups: list[GroupLine]
    """Groups in file order; a repeated evaluation replaces the earlier one."""
    num_unreadable: int

    def __iter__(self) -> Iterator[SampleEntry]:
        return (SampleEntry(group, r, i) for group in self.groups for i, r in enumerate(group.responses))

    @property
    def num_responses(self) -> int:
        """Number of stored responses."""
        return sum(len(group.responses) for group in self.groups)


def read_samples(folder: pathlib.Path) -> Samples:
    """Reads the samples of a run folder; empty if there are none.

    An incomplete last line, of a running or killed run, is skipped. Raises ValueError for a newer format.
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
    """Decodes a line; None if invalid. Falls back to `json` for what msgspec rejects, such as lone surrogates."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return decoder.decode(line)
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.convert(json.loads(line), GroupLine)
    return None


_CONTROL = {i: 0x2400 + i for i in range(0x20) if chr(i) not in "\n\t"} | {0x7F: 0x2421}
_HIDDEN = re.compile(r"[\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]")


def visible(text: str) -> str:
    r"""Returns the text with control characters as pictures (ESC as ␛), or as numbers if they have none (`‹U+202E›`).

    Newlines and tabs stay. Bidirectional overrides and lone surrogates count as control characters.
    """
    text = text.replace("\r\n", "\n").translate(_CONTROL)
    return _HIDDEN.sub(lambda found: f"‹U+{ord(found[0]):04X}›", text)


_MAX_LINES = 40
_MAX_CHARS = 2000
"""Maximum characters of a text that are shown; --full shows all."""
_AROUND = 4
"""Divisor: if the match is in the hidden middle, 1/4 of the maximum is shown around it."""
_FOUND = "black on yellow"


def show(
    console: Console, samples: Sequence[SampleEntry], *, full: bool = False, grep: re.Pattern[str] | None = None
) -> None:
    """Prints samples and highlights matches of `grep`; a prompt equal to the previous one is not repeated."""
    before: GroupLine | None = None
    for sample in samples:
        group = sample.group
        _show_title(console, title(group))
        if before is None or before.prompt != group.prompt:
            _show_prompt(console, group, full, grep)
        _show_response(console, sample.response, full, grep)
        before = group


def show_pairs(console: Console, found: Sequence[tuple[SampleEntry, SampleEntry]], *, full: bool = False) -> None:
    """Prints problems with their first and last responses."""
    for first, last in found:
        problem = first.group.prompt_id or first.group.ticket
        _show_title(console, visible(f"eval {first.group.set}, problem of {problem}"))
        _show_prompt(console, first.group, full, None)
        for sample in (first, last):
            _show_line(console, Text(f"step {sample.group.step}", style="bold"))
            _show_response(console, sample.response, full, None)


def title(group: GroupLine) -> str:
    """Returns the title of a group."""
    where = f"eval {group.set}" if group.kind == "eval" else f"round {group.round}"
    named = [f"step {group.step}", where, *([group.source] if group.source else []), f"ticket {group.ticket}"]
    return visible(" · ".join(named))


def facts(response: ResponseLine) -> str:
    """Returns the numbers of a response in one line."""
    parts = [f"reward {response.reward:.3g}"]
    parts += [f"{name} {s.value:.3g} {s.verdict}".rstrip() for name, s in response.scores.items()]
    if response.turn_rewards:
        parts.append("by turn " + " ".join(f"{r:.3g}" for r in response.turn_rewards))
    if response.advantage is not None:
        parts.append(f"advantage {response.advantage:+.3g}")
    if response.turn_advantages:
        parts.append("by turn " + " ".join(f"{a:+.3g}" for a in response.turn_advantages))
    if response.lag is not None:
        parts.append(f"lag {response.lag:.3g} (max {response.lag_max})")
    if response.min_version is not None:
        same = response.min_version == response.max_version
        versions = f"{response.min_version}" if same else f"{response.min_version}-{response.max_version}"
        parts.append(f"weights {versions}")
    parts += [f"{response.tokens} tokens", f"finish {response.finish}"]
    return visible(" · ".join(parts + [response.actor] * bool(response.actor)))


def shortened(text: str, grep: re.Pattern[str] | None = None) -> str:
    """Shortens a text with many lines or characters in its middle, but keeps the first match of `grep`."""
    text = "".join(_kept(text, _MAX_CHARS, "characters", " ", _place(text, grep)))
    lines = text.split("\n")
    found = _place(text, grep)
    line = None if found is None else text.count("\n", 0, found)
    return "\n".join(_kept(lines, _MAX_LINES, "lines", "", line))


def _kept(parts: Sequence[str], most: int, unit: str, gap: str, found: int | None) -> list[str]:
    """Returns the first and last parts, and those around `found`, with a note per omitted range."""
    if len(parts) <= most + 1:
        return list(parts)
    half = most // 2
    ranges = [(0, half), (len(parts) - half, len(parts))]
    if found is not None and half <= found < len(parts) - half:
        start, end = max(half, found - most // _AROUND // 2), min(len(parts) - half, found + most // _AROUND // 2)
        ranges.insert(1, (start, end))
    kept = list(parts[:half])
    for (_, before), (start, end) in itertools.pairwise(ranges):
        if start > before:
            kept.append(f"{gap}[... {start - before} {unit}, see --full ...]{gap}")
        kept += parts[start:end]
    return kept


def _place(text: str, grep: re.Pattern[str] | None) -> int | None:
    found = grep.search(text) if grep is not None else None
    return None if found is None else found.start()


def _show_title(console: Console, text: str) -> None:
    if console.is_terminal:
        console.print(Rule(Text(text, style="bold"), align="left", style="dim"))
    else:
        _show_line(console, Text(f"── {text}"))


def _show_line(console: Console, text: Text) -> None:
    """Prints a line; without a terminal, as in a pipe, it is not wrapped."""
    console.print(text, soft_wrap=not console.is_terminal)


def _show_prompt(console: Console, group: GroupLine, full: bool, grep: re.Pattern[str] | None) -> None:
    answer = f"   answer: {_in_a_line(group.answer)}" if group.answer else ""
    _show_line(console, Text(visible(f"prompt{answer}"), style="dim"))
    _show_text(console, group.prompt, "", full, grep)


def _show_response(console: Console, response: ResponseLine, full: bool, grep: re.Pattern[str] | None) -> None:
    colour = "green" if response.reward > 0 else "red"
    _show_line(console, Text(facts(response), style=colour))
    for part in response.parts:
        is_policy = part.by == "policy"
        if not is_policy:
            _show_line(console, Text(visible(part.by), style="dim"))
        _show_text(console, part.text, "cyan" if is_policy else "", full, grep)
    if response.num_parts > len(response.parts):
        left_out = response.num_parts - len(response.parts)
        _show_line(console, Text(f"({left_out} turns between are not stored)", style="dim"))


def _show_text(console: Console, text: str, style: str, full: bool, grep: re.Pattern[str] | None) -> None:
    seen = visible(text)
    shown = Text(seen if full else shortened(seen, grep), style=style, overflow="fold")
    if grep is not None:
        shown.highlight_regex(grep, _FOUND)
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, 2)))
        return
    for line in shown.split("\n", allow_blank=True):
        _show_line(console, Text("  ").append_text(line) if line else line)


def _in_a_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else f"{flat[:57]}..."


SORTS: dict[str, Callable[[SampleEntry], float]] = {
    "step": lambda sample: sample.group.step,
    "reward": lambda sample: sample.response.reward,
    "lag": lambda sample: -1.0 if sample.response.lag is None else sample.response.lag,  # evaluations have no lag
    "length": lambda sample: sample.response.tokens,
}
"""Keys by the value of --sort."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """Selection of samples."""

    sort: str = "step"
    """Sort key, one of `SORTS`, descending."""
    reverse: bool = False
    grep: re.Pattern[str] | None = None
    """Pattern that the prompt or the response must contain."""
    steps: tuple[int, int] | None = None
    """First and last step, inclusive."""
    is_eval: bool | None = None
    """True: only evaluations; False: only training; None: both."""
    limit: int = 10


def choose(samples: Iterable[SampleEntry], query: Query) -> tuple[list[SampleEntry], int]:
    """Returns the selected samples and their number before the limit; ties are newest first."""
    found = [s for s in samples if _fits(s, query)]
    found.reverse()
    found.sort(key=SORTS[query.sort], reverse=not query.reverse)
    return found[: query.limit], len(found)


def pairs(samples: Iterable[SampleEntry], *, limit: int) -> list[tuple[SampleEntry, SampleEntry]]:
    """Returns `limit` problems with their responses at the first and the last evaluation.

    Problems are identified by prompt id, because their position in a set may change; files without prompt ids use the
    position. The selection does not depend on rewards.
    """
    of_problem: dict[tuple[str, str], list[SampleEntry]] = {}
    for sample in samples:
        group = sample.group
        if group.kind == "eval" and sample.index == 0:
            of_problem.setdefault((group.set, group.prompt_id or f"number {group.order}"), []).append(sample)
    by_step = [sorted(of, key=lambda s: s.group.step) for of in of_problem.values()]
    found = [(of[0], of[-1]) for of in by_step if of[0].group.step < of[-1].group.step]
    return sorted(found, key=lambda pair: (pair[0].group.set, pair[0].group.order))[:limit]


def as_json(sample: SampleEntry) -> dict[str, Any]:
    """Returns a sample in the format of `--json`: its group's fields, with one `response`."""
    fields: dict[str, Any] = msgspec.to_builtins(sample.group)
    del fields["responses"]
    return {**fields, "index": sample.index, "response": msgspec.to_builtins(sample.response)}


def parse_steps(text: str) -> tuple[int, int]:
    """Parses `40` or `40-60`; raises ValueError if the text has another format."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise ValueError(f"--step must be a step or a range, as in 40 or 40-60, got {text!r}")
    return first, last


def _fits(sample: SampleEntry, query: Query) -> bool:
    group = sample.group
    if query.is_eval is not None and query.is_eval != (group.kind == "eval"):
        return False
    if query.steps is not None and not query.steps[0] <= group.step <= query.steps[1]:
        return False
    if query.grep is None:
        return True
    return any(query.grep.search(text) for text in (group.prompt, *(p.text for p in sample.response.parts)))
