"""One part of a run: what it is asked for against what it can take."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """At some pace of the run."""

    name: str
    load: float
    capacity: float
    unit: str
    remedy: str
    """What to change when it gives out."""
    made_of: tuple[tuple[str, float], ...] = ()
    """Parts of the load, by what makes it."""

    @property
    def share(self) -> float:
        """Load over capacity: from 1 on it gives out."""
        return self.load / self.capacity

    @property
    def mostly(self) -> str:
        """What makes most of its load; nothing where that is all one."""
        return max(self.made_of, key=lambda item: item[1])[0] if self.made_of else ""

    @property
    def full_name(self) -> str:
        """With what makes most of its load."""
        return f"{self.name}: {self.mostly}" if self.made_of else self.name
