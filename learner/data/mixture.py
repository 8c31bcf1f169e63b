"""Which source the next problem is of: exact proportions over any stretch, also where the weights change on the way.

`grain.MapDataset.mix` rounds weights to whole numbers of which the smallest is 100 (3 : 7 becomes 100 : 233), and they
stand once it is made. Here a source with a share p of n problems has been asked for more than p n - 1 and less than
p n + 1, at every n: the schedule by earliest deadlines of periodic tasks that take a slot each (Pfair on one processor,
Baruah et al. 1996). All is whole numbers, so that a restored mixture goes on to the bit.
"""

import fractions
from collections.abc import Mapping
from typing import Any

from learner.data.shares import SCALE, in_parts


class Mixture:
    """Picks names in proportion to weights."""

    def __init__(self, names: list[str]) -> None:
        """Nobody was picked yet."""
        self._owed = dict.fromkeys(names, 0)
        """Picks that each name's share amounts to less those it had, in parts of `SCALE`; the sum is 0."""

    def pick(self, weights: Mapping[str, float]) -> str:
        """The next name; none whose weight is 0."""
        shares = in_parts(weights, SCALE)
        for name, share in shares.items():
            self._owed[name] += share
        asked = [name for name, share in shares.items() if share > 0]
        # Only who is owed something may be picked; while weights change, it may be that none of these is.
        owed = [name for name in asked if self._owed[name] > 0]
        picked = (
            min(owed, key=lambda name: (_picks_left(self._owed[name], shares[name]), -self._owed[name], name))
            if owed
            else max(asked, key=lambda name: (self._owed[name], name))
        )
        self._owed[picked] -= SCALE
        return picked

    def get_state(self) -> dict[str, Any]:
        """What each name is owed; JSON."""
        return {"owed": dict(self._owed)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called; begins anew if the names are others."""
        owed = state["owed"]
        self._owed = {name: owed[name] if owed.keys() == self._owed.keys() else 0 for name in self._owed}


def _picks_left(owed: int, share: int) -> fractions.Fraction:
    """After how many more picks of others a name would be owed a whole one: its deadline."""
    return fractions.Fraction(SCALE - owed, share)
