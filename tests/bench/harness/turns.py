"""Order of measurements by which a drift of the machine's speed cancels out."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tests.bench.harness import machine

Case = TypeVar("Case")


def in_turns(cases: Sequence[Case], turns: int) -> Iterator[tuple[int, Case, float]]:
    """Yields (turn, case, MB/s of the machine before it): all cases once per turn, every second turn in reverse order.

    The same turn of two cases is a pair (`estimates.ratio`).
    """
    for turn in range(turns):
        for case in cases[:: -1 if turn % 2 else 1]:
            yield turn, case, machine.speed()
