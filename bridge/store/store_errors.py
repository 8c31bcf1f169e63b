"""Errors of a store."""

PERMANENT = "for good: "
"""What the reason of a fence begins with that no probe will lift any more: its actor ends."""


class StoreLostError(TimeoutError):
    """The store could not be reached for longer than it was told to try."""


class LearnerLivesError(ValueError):
    """Another learner leads the run, and its lease has not ended."""


class StoreWentBackError(StoreLostError):
    """The store is a copy from before this learner began to lead: it must start again, from its checkpoint."""


class SupersededLearnerError(RuntimeError):
    """Another learner leads the run now: this one is of an older incarnation, and must end."""

    @classmethod
    def of(cls, incarnation: int, leading: object) -> "SupersededLearnerError | StoreWentBackError":
        """The error of a learner of `incarnation`, when `leading` is the one that leads."""
        if int(f"{leading}") < incarnation:
            return StoreWentBackError(
                f"the store went back: it knows incarnation {leading} of the learner, this one is {incarnation}; start "
                "again to go on from the last checkpoint (docs/store_care.md)"
            )
        return cls(f"another learner leads this run now: its incarnation is {leading}, this one's {incarnation}")


class UnfitGroupError(ValueError):
    """A group does not answer the ticket that has its id: another prompt may have taken the place of the one it had."""


class NameTakenError(ValueError):
    """Another actor, elsewhere, has this name."""

    def __init__(self, name: str, location: str, *, beat_s: float) -> None:
        """`beat_s` is the time of its last heartbeat, by the store's clock."""
        super().__init__(f"a live actor of this run has the name {name}, at {location}; give another --name")
        self.beat_s = beat_s


class FencedError(RuntimeError):
    """This actor may not serve: what it generated did not match the learner's weights."""
