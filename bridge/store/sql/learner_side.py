"""Leadership of a run, what its leader announces, and the groups that it reads."""

import contextlib
from collections.abc import Mapping

from bridge.store.sql.anchor_rows import AnchorRows
from bridge.store.sql.base import check_blob, check_lease, new_request_id
from bridge.store.sql.group_rows import BlobCollector, GroupRows
from bridge.store.store_types import LearnerLivesError, StoredGroup
from bridge.weight_types import Announcement, RunCard

DROPPER = "whoever drops it"
"""Leads a run that is being dropped (`bridge.store.admin`), until nothing of it is left."""


class LearnerStore(GroupRows, AnchorRows):
    """A run as its learner uses it.

    Every call is one transaction; a process may be killed between any two of them, and each group is trained exactly
    once (docs/exactly_once.md).

    From `acquire_leadership` on every call that writes raises `SupersededLearnerError` once another learner leads the
    run: what it would have written is not.
    """

    _last_announced: Announcement | None = None
    """The newest announcement of this process."""
    _num_breaks_met = 0
    """Breaks of the way to the database after which this learner has looked for an older copy."""

    def acquire_leadership(self, owner: str, *, lease_s: float) -> int:
        """Becomes the run's one learner; returns its incarnation, one higher than the last; the first is 0.

        A run that was finished goes on from here. A learner at the same `owner` (machine and run folder) takes over at
        once, since the run folder's lock says that its predecessor is dead; one elsewhere waits for the lease to end.

        Raises:
          LearnerLivesError: the lease of a learner elsewhere has not ended.
        """
        check_lease(lease_s)
        params = {"holder": owner, "lease_s": lease_s, "call": new_request_id()}
        _, rows = self._write(
            self._step(
                """UPDATE runs SET incarnation = incarnation + 1, holder = :holder, lead_by = :call,
                lead_expires_s = {now} + :lease_s, finished_step = NULL, finished_s = NULL
                WHERE run = :run AND coalesce(lead_by, '') <> :call
                    AND (holder IS NULL OR holder = :holder OR lead_expires_s <= {now})""",
                **params,
            ),
            self._step(
                "SELECT incarnation, lead_by, holder, lead_expires_s - {now}, last_seq FROM runs WHERE run = :run"
            ),
        )
        incarnation, call, leader, left_s, last_seq = rows[0]
        if leader == DROPPER and call != params["call"]:
            raise LearnerLivesError(
                f"the run is led by {DROPPER}, and parts of it are gone: drop it again to the end "
                "(launch.tools.runs --drop), and begin another"
            )
        if call != params["call"]:
            raise LearnerLivesError(
                f"the run has a learner already, at {leader}; it leads for another "
                f"{max(0.0, left_s):.0f} s unless it says that it lives: stop it, or wait"
            )
        self._incarnation, self._led_after_seq = incarnation, last_seq
        if self._objects is not None and self._keeper is None:
            self._keeper = BlobCollector(self.delete_dropped, self.sweep_objects)
        return incarnation

    def renew_leadership(self, *, lease_s: float) -> None:
        """Extends the lead from now on; also one whose lease ran out, as long as nobody else took it.

        Raises:
          SupersededLearnerError: somebody did.
        """
        check_lease(lease_s)
        self._change("UPDATE runs SET lead_expires_s = {now} + :lease_s WHERE run = :run", lease_s=lease_s)

    def release_leadership(self, *, timeout_s: float | None = None) -> None:
        """Ends the lead, so that a learner elsewhere need not wait; none is fine."""
        if self._incarnation is not None:
            self._write(
                self._step(
                    """UPDATE runs SET holder = NULL, lead_expires_s = NULL
                    WHERE run = :run AND incarnation = :incarnation""",
                    incarnation=self._incarnation,
                ),
                timeout_s=timeout_s,
            )

    def finish(self, step: int) -> None:
        """Says that all steps are done: nobody need serve the run any more. Again is fine, and changes nothing."""
        self._write(
            self._step(
                """UPDATE runs SET finished_step = :step, finished_s = {now}
                WHERE run = :run AND coalesce(finished_step, -1) <> :step""",
                step=step,
            ),
            guarded=True,
            changes=("run",),
        )

    def _announce_again(self) -> None:
        """Puts this learner's last announcement, which a copy of the store without the last commits lacks."""
        if self._last_announced is not None:
            with contextlib.suppress(ValueError):  # another thread announced a newer one meanwhile
                self.announce(self._last_announced)

    def announce(self, announcement: Announcement) -> None:
        """Tells the actors of a version; again, when there are more places to fetch it from.

        Raises:
          ValueError: it is older than the one announced.
        """
        version = announcement.manifest.version
        params = {"incarnation": version.incarnation, "step": version.step, "call": new_request_id()}
        _, rows = self._write(
            self._step(
                """INSERT INTO announcements (run, incarnation, step, call, payload)
                VALUES (:run, :incarnation, :step, :call, :payload)
                ON CONFLICT (run) DO UPDATE SET incarnation = excluded.incarnation, step = excluded.step,
                    call = excluded.call, payload = excluded.payload
                WHERE (announcements.incarnation, announcements.step) <= (excluded.incarnation, excluded.step)""",
                payload=self._encode(announcement),
                **params,
            ),
            self._step("SELECT incarnation, step, call FROM announcements WHERE run = :run"),
            guarded=True,
            changes=("weights",),
        )
        if rows[0][2] == params["call"]:
            self._last_announced = announcement
        else:
            raise ValueError(f"version {version} is older than {rows[0][0]}:{rows[0][1]}, which was announced")

    def record_restore(self, incarnation: int, step: int) -> None:
        """Records the step that a learner's incarnation began at: later ones of those before it are abandoned."""
        self._change(
            """INSERT INTO restores (run, incarnation, step) VALUES (:run, :incarnation, :step)
            ON CONFLICT (run, incarnation) DO UPDATE SET step = excluded.step""",
            incarnation=incarnation,
            step=step,
        )

    def restores(self) -> dict[int, int]:
        """Incarnation -> the step it began at."""
        rows = self._read("SELECT incarnation, step FROM restores WHERE run = :run")
        return {incarnation: step for incarnation, step in rows}

    def put_run_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        """Puts what actors elsewhere need to know of the run, in place of what was there; `blobs` by their hashes."""
        self._mark_bucket()  # first: who has the card looks for the mark
        for hash_, content in blobs.items():
            check_blob(hash_, content)
        put = "INSERT INTO blobs (run, blake3, content) VALUES (:run, :blake3, :content) ON CONFLICT DO NOTHING"
        self._write(
            self._step(
                """INSERT INTO cards (run, payload) VALUES (:run, :payload)
                ON CONFLICT (run) DO UPDATE SET payload = excluded.payload""",
                payload=self._encode(card),
            ),
            self._step("DELETE FROM blobs WHERE run = :run AND NOT blake3 IN [kept]", kept=list(blobs)),
            before_lock=[self._step(put, blake3=h, content=c) for h, c in blobs.items()],
            guarded=True,
        )

    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        """Unacknowledged groups of a kind in order of arrival, from the first after `after_seq`; none is missed.

        After a break (`num_breaks`) a leading learner's next call gives all groups higher numbers, so that each reader
        gets them again: the server that answers now may be an older copy, in which their numbers belong to others.

        Raises:
          ValueError: a negative limit; or this learner's own bucket is not there any more, or refuses us.
        """
        while True:
            num_breaks = self._database.num_breaks
            if self._incarnation is not None and num_breaks != self._num_breaks_met:
                self._read_on_an_older_copy()
                self._announce_again()
                self._num_breaks_met = num_breaks
            groups = self._read_page(after_seq=after_seq, limit=limit, kind=kind)
            if self._incarnation is None or self._database.num_breaks == num_breaks:
                return groups  # else the way broke in the middle, and these may be an older copy's
