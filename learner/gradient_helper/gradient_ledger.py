"""Ledger of an update's micro-batches: whose sum of gradients each one is in. Pure.

A partial gradient is what a helper has summed since it took the parameters. It is merged into the update whole, or lost
whole: then its micro-batches wait again. So every micro-batch is in the update's gradient exactly once, whichever
helper dies.
"""

import dataclasses
from collections.abc import Sequence

OWN = "learner"
"""Name of the learner's own sum, into which it adds immediately."""


class LedgerError(RuntimeError):
    """Raised if a partial gradient is not the sum of the micro-batches that were assigned to it."""


@dataclasses.dataclass
class GradientLedger:
    """Micro-batches of one update, numbered from 0 in the order of `add`.

    `assign`, `check` and `merge` raise LedgerError for a partial gradient that was merged or lost before.
    """

    _denominators: list[float] = dataclasses.field(default_factory=list[float])
    _waiting: list[int] = dataclasses.field(default_factory=list[int])
    _assigned: dict[str, list[int]] = dataclasses.field(default_factory=dict[str, list[int]])
    _merged: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict[str, tuple[int, ...]])
    _lost: set[str] = dataclasses.field(default_factory=set[str])

    @property
    def has_waiting(self) -> bool:
        """True if a micro-batch is not assigned."""
        return bool(self._waiting)

    @property
    def is_complete(self) -> bool:
        """True if all micro-batches are in the update's gradient."""
        return not self._waiting and not self._assigned

    @property
    def denominator(self) -> float:
        """Divisor of the update's sum: that of all its micro-batches."""
        return sum(self._denominators)

    def add(self, denominator: float) -> int:
        """Adds a micro-batch with its share of the divisor; returns its number."""
        self._denominators.append(denominator)
        self._waiting.append(len(self._denominators) - 1)
        return self._waiting[-1]

    def assign(self, part: str) -> int | None:
        """Assigns the first waiting micro-batch to a partial gradient; returns its number, None if none waits."""
        self._check_open(part)
        if not self._waiting:
            return None
        number = self._waiting.pop(0)
        if part == OWN:
            self._merged[OWN] = (*self._merged.get(OWN, ()), number)
        else:
            self._assigned.setdefault(part, []).append(number)
        return number

    def of(self, part: str) -> tuple[int, ...]:
        """Returns the micro-batches that are assigned to a partial gradient."""
        return tuple(self._assigned.get(part, ()))

    def check(self, part: str, numbers: Sequence[int], denominator: float) -> None:
        """Raises LedgerError if a partial gradient is not the sum of its micro-batches; call it before `merge`."""
        self._check_open(part)
        assigned = self._assigned.get(part, [])
        if list(numbers) != assigned or not self.is_sum(denominator, assigned):
            raise LedgerError(
                f"partial gradient {part}: expected micro-batches {assigned} with denominator "
                f"{sum(self._denominators[number] for number in assigned)}, got {list(numbers)} with {denominator}"
            )

    def is_sum(self, denominator: float, numbers: Sequence[int] | None = None) -> bool:
        """Returns True if a divisor, added up in float32, is that of these micro-batches; None: of all.

        Each addition rounds by at most 2^-24; sums of whole numbers are exact up to 2^24.
        """
        parts = self._denominators if numbers is None else [self._denominators[number] for number in numbers]
        return abs(denominator - sum(parts)) <= max(len(parts), 16) * 2.0**-24 * sum(parts)

    def merge(self, part: str) -> tuple[int, ...]:
        """Records that a partial gradient was added to the update's; returns its micro-batches."""
        self._check_open(part)
        self._merged[part] = tuple(self._assigned.pop(part, ()))
        return self._merged[part]

    def lose(self, part: str) -> tuple[int, ...]:
        """Gives a partial gradient up: its micro-batches wait again, first. Returns them."""
        lost = self._assigned.pop(part, [])
        self._waiting = lost + self._waiting
        self._lost.add(part)
        return tuple(lost)

    def clear(self) -> None:
        """Forgets all micro-batches, after the update or when it is discarded; open partial gradients are lost."""
        self._lost |= self._assigned.keys() | self._merged.keys() - {OWN}
        self._denominators, self._waiting, self._assigned, self._merged = [], [], {}, {}

    def _check_open(self, part: str) -> None:
        if part in self._lost or (part in self._merged and part != OWN):
            raise LedgerError(f"partial gradient {part} is {'lost' if part in self._lost else 'merged'}")
