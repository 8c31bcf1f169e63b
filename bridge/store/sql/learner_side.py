"""Store operations of a learner: leadership, announcements, the run card and reading groups."""

import contextlib
import threading
from collections.abc import Mapping

from bridge import codec
from bridge.store.sql.anchor_rows import AnchorRows
from bridge.store.sql.base import check_blob, check_lease, new_request_id
from bridge.store.sql.database import Database
from bridge.store.sql.group_rows import BlobCollector, GroupRows
from bridge.store.store_types import LearnerLivesError, StoredGroup
from bridge.weight_types import Announcement, RunCard

DROPPER = "whoever drops it"
"""Owner of a run that is being dropped (`bridge.store.admin`)."""


class LearnerStore(GroupRows, AnchorRows):
    """Store of one run, as its learner uses it.

    Every call is one transaction, or several that a restarted learner repeats. A process may be killed between any two
    transactions, and each group is still trained exactly once (docs/design/exactly_once.md).

    After `acquire_leadership`, every writing call raises SupersededLearnerError and writes nothing if another learner
    leads.
    """

    def __init__(self, database: Database, *, run: str, max_message_bytes: int = codec.MAX_BYTES) -> None:
        super().__init__(database, run=run, max_message_bytes=max_message_bytes)
        self._last_announced: Announcement | None = None
        """Newest announcement of this process."""
        self._announcing = threading.RLock()
        """Held while one is made: the last one that is made must be the newest."""
        self._num_breaks_met = 0
        """Number of connection breaks after which this learner has already checked for an older copy."""

    def acquire_leadership(self, owner: str, *, lease_s: float) -> int:
        """Becomes the run's only learner and returns its incarnation: the last one plus 1, or 0 for the first.

        Resumes a finished run. A learner at the same `owner` (machine and run folder) takes over immediately, because
        the run folder's lock proves that its predecessor has exited. Raises LearnerLivesError until the lease of a
        learner elsewhere expires.
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
                "the run is partly deleted: finish its deletion (python -m launch.tools.runs --drop=ID), and start "
                "another run"
            )
        if call != params["call"]:
            raise LearnerLivesError(
                f"the run has another learner, at {leader}, whose lease expires in {max(0.0, left_s):.0f} s "
                "unless renewed; stop that learner, or wait"
            )
        self._incarnation, self._led_after_seq = incarnation, last_seq
        if self._objects is not None and self._keeper is None:
            self._keeper = BlobCollector(self.delete_dropped, self.sweep_objects)
        return incarnation

    def renew_leadership(self, *, lease_s: float) -> None:
        """Extends the leader lease, even an expired one. Raises SupersededLearnerError if another learner took over."""
        check_lease(lease_s)
        self._change("UPDATE runs SET lead_expires_s = {now} + :lease_s WHERE run = :run", lease_s=lease_s)

    def release_leadership(self, *, timeout_s: float | None = None) -> None:
        """Releases leadership, so that a learner elsewhere need not wait; has no effect without leadership."""
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
        """Records that all steps are done, so that actors can exit. Idempotent."""
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
        """Repeats this learner's last announcement, which an older copy of the store lacks."""
        with self._announcing, contextlib.suppress(ValueError):  # a newer one may be of another learner
            if self._last_announced is not None:
                self.announce(self._last_announced)

    def announce(self, announcement: Announcement) -> None:
        """Announces a version, or more sources of it. Raises ValueError if it is older than the announced one."""
        with self._announcing:
            self._announce(announcement)

    def _announce(self, announcement: Announcement) -> None:
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
        """Records the step at which an incarnation began. Later steps of earlier incarnations are abandoned."""
        self._change(
            """INSERT INTO restores (run, incarnation, step) VALUES (:run, :incarnation, :step)
            ON CONFLICT (run, incarnation) DO UPDATE SET step = excluded.step""",
            incarnation=incarnation,
            step=step,
        )

    def restores(self) -> dict[int, int]:
        """Returns the step at which each incarnation began."""
        rows = self._read("SELECT incarnation, step FROM restores WHERE run = :run")
        return {incarnation: step for incarnation, step in rows}

    def put_run_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        """Replaces the run card and its files, which actors on other machines need; `blobs` maps hashes to contents."""
        self._mark_bucket()  # first, because actors with the card look for the mark
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

    def set_frontier_width(self, width: int | None) -> None:
        """Sets the groups that all actors serve together from now on; None: each claim's own width. Idempotent."""
        self._change("UPDATE runs SET frontier_width = :width WHERE run = :run", width=width)

    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        """Returns unacknowledged groups of a kind with numbers above `after_seq`, in order of arrival, without gaps.

        After a connection break (`num_breaks`), an older copy of the store may answer, in which group numbers belong to
        other groups. The leading learner's next call therefore renumbers all groups, and each reader receives them
        again. Raises ValueError if the limit is negative, or this learner's bucket is missing or rejects the request.
        """
        while True:
            num_breaks = self._database.num_breaks
            if self._incarnation is not None and num_breaks != self._num_breaks_met:
                self._read_on_an_older_copy()
                self._announce_again()
                self._num_breaks_met = num_breaks
            groups = self._read_page(after_seq=after_seq, limit=limit, kind=kind)
            if self._incarnation is None or self._database.num_breaks == num_breaks:
                return groups  # after a break during the read, the groups may be an older copy's
