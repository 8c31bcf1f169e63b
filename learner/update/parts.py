"""What of a group is packed as one, and into which row: whole sequences, or several behind the prompt they share."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bridge.types import Group
from configs.sections import PackingConfig

LEAST_SHARED = 3
"""Tokens of a prompt that is shared: without its last one it has two, as each segment of a row at least
(`learner/update/segments.py`)."""


class Part(NamedTuple):
    """Rollouts of a group that are packed as one."""

    rollouts: Sequence[int]
    """Their places in the group."""
    shares: bool
    """Whether their prompt is there once, and its last token before each of them (`learner/update/packing.py`)."""
    size: int
    """Tokens of the row that it takes."""


def parts(group: Group, packing: PackingConfig) -> Iterator[Part]:
    """A group's rollouts in their order: one by one, or with `packing.share_prompts` as many as fit a row."""
    prompt = group.prompt_tokens.size
    most = packing.max_row_sequences - 1
    if not packing.share_prompts or prompt < LEAST_SHARED or most < 1:
        for i, rollout in enumerate(group.rollouts):
            yield Part([i], False, prompt + rollout.tokens.size)
        return
    together: list[int] = []
    size = prompt - 1
    for i, rollout in enumerate(group.rollouts):
        takes = 1 + rollout.tokens.size
        if together and (len(together) == most or size + takes > packing.row_tokens):
            yield Part(together, True, size)
            together, size = [], prompt - 1
        together.append(i)
        size += takes
    yield Part(together, True, size)


def first_fit_decreasing(
    lengths: Sequence[int], packing: PackingConfig, *, num_segments: Sequence[int] | None = None
) -> list[list[int]]:
    """Puts each length, longest first, into the first row with room; returns the indices in each row.

    A row has room for row_tokens tokens and max_row_sequences segments, of which each length is one, or `num_segments`.

    Equal lengths keep their order, so the same groups always pack alike.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        takes = 1 if num_segments is None else num_segments[i]
        row = next((r for r, (free, left) in enumerate(room) if lengths[i] <= free and takes <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append((packing.row_tokens, packing.max_row_sequences))
        rows[row].append(i)
        free, left = room[row]
        room[row] = free - lengths[i], left - takes
    return rows
