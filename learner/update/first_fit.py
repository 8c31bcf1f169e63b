"""First-fit-decreasing bin packing of sequences into rows."""

from collections.abc import Sequence

from configs.sections import PackingConfig


def first_fit_decreasing(
    lengths: Sequence[int], packing: PackingConfig, *, num_segments: Sequence[int] | None = None
) -> list[list[int]]:
    """Puts each length, longest first, into the first row with space; returns the indices in each row.

    A row holds `row_tokens` tokens and `max_row_sequences` segments. A length takes one segment, or its `num_segments`.
    Equal lengths keep their order, so packing is deterministic.
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
