"""What the learner does while it waits for others: it hears when to stop, and looks after actors that are fenced."""

import dataclasses
from collections.abc import Callable

from bridge.store.protocol import LearnerStore
from bridge.types import Group, Version
from learner.commands import Score
from learner.heart import Heart
from learner.publish.parity import max_abs_dlogprob
from learner.publish.pinned import PROBE_TOKENS, probe_problems
from learner.publish.readmission import Readmission
from learner.run import Run
from learner.schedule.ticket_books import training_sampling


class Waiting:
    """Handed to whatever waits; what needs the whole run joins it once there is one."""

    def __init__(self, heart: Heart) -> None:
        """Nothing is looked after yet."""
        self._heart = heart
        self.looks: list[Callable[[], None]] = []
        """None of them waits itself."""

    def check(self) -> None:
        """Called on every look that found nothing.

        Raises:
          What `Heart.check` does.
        """
        self._heart.check()
        self.look()

    def look(self) -> None:
        """Called between two micro-batches."""
        for look in self.looks:
            look()


MAX_LOST_IN_A_ROW = 8
"""Groups of an actor that are missing in the bucket without one that is there between them."""


class LostGroups:
    """Keeps out actors whose large groups never reach the bucket; their tickets go to others."""

    def __init__(self, store: LearnerStore, *, bucket: str, keep_out: Callable[[str, str], None]) -> None:
        """`keep_out` fences an actor for good, for a reason."""
        self._store, self._bucket, self._keep_out = store, bucket, keep_out

    def look(self) -> None:
        """Called while the learner waits, and between two micro-batches."""
        for actor, num in list(self._store.lost_in_a_row.items()):
            if num >= MAX_LOST_IN_A_ROW:
                del self._store.lost_in_a_row[actor]
                self._keep_out(
                    actor,
                    f"none of its last {num} large groups is in {self._bucket or 'a bucket, and the run has none'}; "
                    "give its machine and the learner's one store.bucket (s3://, gs://, a shared folder), and start it "
                    "again under another name",
                )


def readmission_of(run: Run, store: LearnerStore) -> Readmission:
    """Probes by the published weights, scored by the learner's own as long as those are the same.

    `store` is the one that actors use: there probes are whole, also where the samples of other groups are tickets.
    """
    sampling = training_sampling(run.config, run.tokenizer.stop_token_ids)

    def published() -> Version | None:
        announced = run.publisher.announced
        return announced if announced is not None and announced.step == run.step else None

    def score(group: Group) -> float:
        run.heart.worked()
        return max_abs_dlogprob(lambda batch: run.do(Score(batch)), group, run.stream.packing)

    return Readmission(
        store,
        run.stream,
        problems=probe_problems(run.held_out),
        sampling=dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS)),
        published=published,
        score=score,
        bound=run.config.parity_bound,
    )
