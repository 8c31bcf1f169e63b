"""Samples in a terminal of any width; colours only where it is one."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from launch.samples.read import GroupLine, Part, Response, Sample
from launch.samples.text import visible

_MAX_LINES = 40
_MAX_CHARS = 2000
"""Of a text that are shown; --full shows all."""


def show(console: Console, samples: Sequence[Sample], *, full: bool = False) -> None:
    """Prints samples; a prompt that follows itself is not repeated."""
    before: GroupLine | None = None
    for sample in samples:
        group = sample.group
        console.print(Rule(Text(title(group), style="bold"), align="left", style="dim"))
        if before is None or before.prompt != group.prompt:
            _show_prompt(console, group, full)
        _show_response(console, sample.response, full)
        before = group


def show_pairs(console: Console, found: Sequence[tuple[Sample, Sample]], *, full: bool = False) -> None:
    """Prints problems as they were answered first and last."""
    for first, last in found:
        console.print(Rule(Text(f"eval {first.group.set}, problem of {numbers(first)}", style="bold"), align="left"))
        _show_prompt(console, first.group, full)
        for sample in (first, last):
            console.print(Text(f"step {sample.group.step}", style="bold"))
            _show_response(console, sample.response, full)


def title(group: GroupLine) -> str:
    """Which group it is, in a few words."""
    where = f"eval {group.set}" if group.kind == "eval" else f"round {group.round}"
    named = [f"step {group.step}", where, *([group.source] if group.source else []), f"ticket {group.ticket}"]
    return visible(" · ".join(named))


def facts(response: Response) -> str:
    """What is known of a response, in one line of numbers with their names."""
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


def numbers(sample: Sample) -> str:
    """The prompt's id, by which the same problem is found again."""
    return visible(sample.group.prompt_id or sample.group.ticket)


def _show_prompt(console: Console, group: GroupLine, full: bool) -> None:
    answer = f"   answer: {_in_a_line(group.answer)}" if group.answer else ""
    console.print(Text(visible(f"prompt{answer}"), style="dim"))
    _show_text(console, group.prompt, "", full)


def _show_response(console: Console, response: Response, full: bool) -> None:
    colour = "green" if response.reward > 0 else "red"
    console.print(Text(facts(response), style=colour))
    for part in response.parts:
        if part.by != "policy":
            console.print(Text(visible(part.by), style="dim"))
        _show_text(console, part.text, "cyan" if _is_policy(part) else "", full)
    if response.num_parts > len(response.parts):
        console.print(Text(f"({response.num_parts - len(response.parts)} turns between are not kept)", style="dim"))


def _show_text(console: Console, text: str, style: str, full: bool) -> None:
    shown = visible(text) if full else shortened(visible(text))
    console.print(Padding(Text(shown, style=style, overflow="fold"), (0, 0, 0, 2)))


def shortened(text: str) -> str:
    """A text of many lines, or characters, without its middle."""
    if len(text) > _MAX_CHARS:
        half = _MAX_CHARS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters, see --full ...] {text[-half:]}"
    lines = text.split("\n")
    rest = len(lines) - _MAX_LINES
    if rest > 1:
        lines = lines[: _MAX_LINES // 2] + [f"[... {rest} lines, see --full ...]"] + lines[-_MAX_LINES // 2 :]
    return "\n".join(lines)


def _in_a_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else f"{flat[:57]}..."


def _is_policy(part: Part) -> bool:
    return part.by == "policy"
