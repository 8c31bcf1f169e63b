"""Who leads a run: one learner at a time. What an earlier one still writes is refused."""

import contextlib

from typing_extensions import override

from bridge.published import Announcement
from bridge.store.protocol import LearnerLivesError, LearnerStore
from bridge.store.sql.shared import SqlShared, check_lease, new_call

DROPPER = "whoever drops it"
"""Leads a run that is being dropped (`bridge.store.runs`), until nothing of it is left."""


class SqlLead(SqlShared, LearnerStore):
    """Lead and end of a run, the versions that its holder announces, the steps that earlier holders went back to."""

    _last_announced: Announcement | None = None
    """The newest announcement of this process."""

    @override
    def lead(self, holder: str, *, lease_s: float) -> int:
        check_lease(lease_s)
        params = {"holder": holder, "lease_s": lease_s, "call": new_call()}
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
                "(launch.runs --drop), and begin another"
            )
        if call != params["call"]:
            raise LearnerLivesError(
                f"the run has a learner already, at {leader}; it leads for another "
                f"{max(0.0, left_s):.0f} s unless it says that it lives: stop it, or wait"
            )
        self._incarnation, self._led_after_seq = incarnation, last_seq
        return incarnation

    @override
    def keep_lead(self, *, lease_s: float) -> None:
        check_lease(lease_s)
        self._change("UPDATE runs SET lead_expires_s = {now} + :lease_s WHERE run = :run", lease_s=lease_s)

    @override
    def resign(self) -> None:
        self._resign()

    def _resign(self, *, patience_s: float | None = None) -> None:
        if self._incarnation is not None:
            self._write(
                self._step(
                    """UPDATE runs SET holder = NULL, lead_expires_s = NULL
                    WHERE run = :run AND incarnation = :incarnation""",
                    incarnation=self._incarnation,
                ),
                patience_s=patience_s,
            )

    @override
    def finish(self, step: int) -> None:
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

    @override
    def announce(self, announcement: Announcement) -> None:
        version = announcement.manifest.version
        params = {"incarnation": version.incarnation, "step": version.step, "call": new_call()}
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

    @override
    def record_restore(self, incarnation: int, step: int) -> None:
        self._change(
            """INSERT INTO restores (run, incarnation, step) VALUES (:run, :incarnation, :step)
            ON CONFLICT (run, incarnation) DO UPDATE SET step = excluded.step""",
            incarnation=incarnation,
            step=step,
        )

    @override
    def restores(self) -> dict[int, int]:
        rows = self._read("SELECT incarnation, step FROM restores WHERE run = :run")
        return {incarnation: step for incarnation, step in rows}
