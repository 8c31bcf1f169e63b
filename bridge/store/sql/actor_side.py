"""Store operations of an actor, in SQL. An actor's database role permits exactly these (`postgres/grants.sql`)."""

from collections.abc import Sequence

from absl import logging

from bridge.heartbeat_types import Heartbeat
from bridge.progress_types import ClaimedTicket, TicketProgress
from bridge.rollout_types import Group, Ticket
from bridge.store.claim import CLAIM
from bridge.store.sql.anchor_rows import AnchorRows
from bridge.store.sql.base import (
    FENCE,
    OPEN,
    check_blob,
    check_lease,
    check_limit,
    describe_misfit,
    new_request_id,
    ticket_digest,
)
from bridge.store.sql.database import NO_LIMIT
from bridge.store.sql.group_rows import BlobLocation, GroupBucket
from bridge.store.store_types import COUNTED_S, FencedError, UnfitGroupError
from bridge.weight_types import RunCard

_MAX_REASON_CHARS = 1000
# A group is accepted once. A repeated call finds its own id in `done_by`, whatever happened to the group since.
_TAKES = """EXISTS (SELECT 1 FROM tickets
    WHERE run = :run AND id = :ticket_id AND fit = :fit AND state NOT IN ('done', 'acknowledged')
        AND coalesce(done_by, '') <> :call
        AND (only_for = :actor OR (only_for IS NULL
            AND NOT EXISTS (SELECT 1 FROM fences WHERE run = :run AND actor IN [actors]))))"""


class ActorStore(GroupBucket, AnchorRows):
    """Store of one run, as an actor uses it: claims, leases, groups and the run card."""

    def engine_capacity(self, *, anew: bool = False) -> dict[int, int]:
        """Returns the number of serving engines by the sequences that each runs concurrently.

        Counts actors that have weights, are not shutting down, and sent a heartbeat in the last `LIVE_S` seconds. The
        store caches the count for `COUNTED_S` seconds, unless `anew` is True.
        """
        is_old = "abs({now} - counted_s) >= :counted_s"  # also after a clock was set back
        look = self._step(f"SELECT sizes, {is_old} FROM serving WHERE run = :run", counted_s=COUNTED_S)
        rows = self._database.read(self._run, look)
        if anew or any(needed for _, needed in rows):
            # The condition prevents a second count by a concurrent caller. The table's trigger counts.
            count = self._step(
                f"UPDATE serving SET counted_s = {{now}} WHERE run = :run AND {is_old}",
                counted_s=0.0 if anew else COUNTED_S,
            )
            rows = self._write(count, look, locks=False)[1]
        pairs = (pair.split(":") for sizes, _ in rows for pair in sizes.split(",") if pair)
        return {int(size): int(num) for size, num in pairs}

    def register_actor(self, beat: Heartbeat, *, location: str) -> None:
        """Sends an actor's first heartbeat and keeps its name as long as heartbeats arrive.

        Afterwards the name's heartbeats from other locations are rejected, and so are this actor's once another took
        the name. An actor at the same `location` takes the name immediately, because a lock there proves that its
        predecessor has exited. An actor elsewhere takes it after `NAME_LEASE_S` seconds without a heartbeat, or when
        the predecessor closed its store. Raises NameTakenError if an actor at another location has the name.
        """
        self._beat(beat, location)
        self._places[beat.process] = location

    def _give_names_back(self, *, timeout_s: float) -> None:
        for name, place in self._places.items():
            self._write(
                self._step(
                    """UPDATE heartbeats SET holder = '', time_s = {now}, places = NULL
                    WHERE run = :run AND process = :name AND holder = :place""",
                    name=name,
                    place=place,
                ),
                locks=False,
                timeout_s=timeout_s,
            )

    def claim(
        self,
        actor: str,
        *,
        limit: int,
        lease_s: float,
        width: int | None = None,
        among: int = 1,
        part: int | None = None,
        places: int = 1,
        all_places: int | None = None,
        served: Sequence[str] = (),
    ) -> list[ClaimedTicket]:
        """Leases up to `limit` tickets, lowest order first: open tickets and tickets with expired leases.

        Args:
          width: groups of the frontier that all actors serve together (`claim.choose`); None: no frontier. A width of
            the run (`LearnerStore.set_frontier_width`) replaces it.
          among: number of actors that share the training tickets; each takes only its part (`claim.fair_share`).
          part: tickets of one order that the actor takes before any beyond the part (`claim.spread`). For groups whose
            samples are separate tickets, spread over actors. None: lowest orders first.
          places: sequences that this actor's engine runs concurrently; its part is proportional to them.
          all_places: sum of `places` over the sharing actors; None: all have equal `places`.
          served: this actor's tickets whose last request has finished, so that they leave the frontier.

        Raises:
          FencedError: the actor is fenced, and no ticket is reserved for it.
          ValueError: the limit is negative, or the lease expires immediately.
        """
        check_limit(limit)
        check_lease(lease_s)
        # A repeated claim returns the tickets of its first run.
        who = {"actor": actor, "call": new_request_id()}
        _, _, fences, rows = self._write(
            self._step(
                """UPDATE tickets SET served = 1
                WHERE run = :run AND id IN [served] AND state = 'claimed' AND actor = :actor""",
                served=list(served),
                **who,
            ),
            self._step(
                CLAIM,
                limit=limit,
                lease_s=lease_s,
                width=NO_LIMIT if width is None else width,
                num_train_offers=limit if width is None and part is None else NO_LIMIT,
                num_groups=limit if width is None and part is not None else NO_LIMIT,
                among=max(1, among),
                places=places,
                all_places=max(1, among) * places if all_places is None else max(places, all_places),
                no_limit=NO_LIMIT,
                part=NO_LIMIT if part is None else part,
                **who,
            ),
            self._step(
                FENCE
                + """ AND NOT EXISTS (SELECT 1 FROM tickets
                    WHERE run = :run AND only_for = :actor AND state IN ('open', 'claimed'))""",
                **who,
            ),
            self._step(
                """SELECT id, tickets.payload, progress.ticket_id IS NOT NULL FROM tickets LEFT JOIN progress
                    ON progress.run = tickets.run AND progress.ticket_id = tickets.id
                WHERE tickets.run = :run AND state = 'claimed' AND claim = :call
                ORDER BY "order", number""",
                **who,
            ),
            changes=("tickets",),
            notify_if=self._step(
                """SELECT 1 FROM tickets WHERE run = :run AND state = 'claimed' AND actor <> :actor
                    AND lease_expires_s <= {now}
                UNION ALL SELECT 1 FROM tickets WHERE run = :run AND state = 'claimed' AND actor = :actor
                    AND id IN [served] AND served = 0 AND :limit = 0 LIMIT 1""",
                served=list(served),
                limit=limit,
                **who,
            ),
            # A process that follows claims with more tickets can wait instead of polling.
            told_after={
                "claims": self._step(
                    """SELECT 1 FROM tickets
                    WHERE run = :run AND state = 'claimed' AND claim = :call AND kind = 'train' LIMIT 1""",
                    **who,
                )
            },
        )
        if fences and not rows:
            raise FencedError(f"actor {actor} is fenced: {fences[0][0]}")
        return [
            ClaimedTicket.of(self._decode(Ticket, payload), self._progress(id_) if has_progress else None)
            for id_, payload, has_progress in rows
        ]

    def _progress(self, ticket_id: str) -> TicketProgress | None:
        """Reads a ticket's progress, outside the claim's transaction: it may be large."""
        rows = self._read("SELECT payload FROM progress WHERE run = :run AND ticket_id = :id", id=ticket_id)
        try:
            return self._decode(TicketProgress, rows[0][0]) if rows else None
        except ValueError as e:  # another actor wrote it
            logging.error("progress ignored, ticket starts from its prompt ticket=%s reason=%s", ticket_id, e)
            return None

    def leased(self, actor: str) -> set[str]:
        """Returns the tickets that this actor holds. Only reads, so it may be called often."""
        rows = self._read(
            "SELECT id FROM tickets WHERE run = :run AND state = 'claimed' AND actor = :actor", actor=actor
        )
        return {id_ for (id_,) in rows}

    def renew(self, actor: str, ticket_ids: Sequence[str], *, lease_s: float) -> list[str]:
        """Extends leases; returns the ids that this actor still holds. The others were taken over.

        Raises ValueError if the lease expires immediately.
        """
        check_lease(lease_s)
        held = "WHERE run = :run AND id IN [ids] AND state = 'claimed' AND actor = :actor"
        params = {"ids": list(ticket_ids), "actor": actor, "lease_s": lease_s}
        _, rows = self._write(
            self._step(f"UPDATE tickets SET lease_expires_s = {{now}} + :lease_s {held}", **params),
            self._step(f"SELECT id FROM tickets {held}", **params),
        )
        still = {id_ for (id_,) in rows}
        return [i for i in ticket_ids if i in still]

    def hand_over(self, actor: str, progress: TicketProgress) -> None:
        """Releases a leased ticket with what was sampled of it, which its next claim receives.

        The progress is kept until the ticket is served, withdrawn, or offered anew by the learner: reissued, rolled
        back, or after a fence of one of its actors. Raises ValueError if the progress is too large for a message.
        """
        params = {"id": progress.ticket_id, "actor": actor, "call": new_request_id()}
        mine = "run = :run AND id = :id AND state = 'claimed' AND actor = :actor"
        self._write(
            self._step(f"{OPEN}, claim = :call WHERE {mine}", **params),
            # The learner may have withdrawn the ticket or offered it anew since the insertion, and another have it now.
            self._step(
                """DELETE FROM progress WHERE run = :run AND ticket_id = :id AND call = :call
                AND NOT EXISTS (SELECT 1 FROM tickets
                    WHERE run = :run AND id = :id AND state = 'open' AND claim = :call)""",
                **params,
            ),
            before_lock=[
                self._step(
                    f"""INSERT INTO progress (run, ticket_id, actors, payload, call)
                    SELECT run, id, :actors, :payload, :call FROM tickets WHERE {mine}
                    ON CONFLICT (run, ticket_id) DO UPDATE
                        SET actors = excluded.actors, payload = excluded.payload, call = excluded.call""",
                    actors="&".join(progress.actors),
                    payload=self._encode(progress),
                    **params,
                )
            ],
            changes=("tickets",),
        )

    def release(self, actor: str, ticket_ids: Sequence[str]) -> None:
        """Releases leased tickets unserved, so that the next claim can take them."""
        self._write(
            self._step(
                f"{OPEN} WHERE run = :run AND id IN [ids] AND state = 'claimed' AND actor = :actor",
                ids=list(ticket_ids),
                actor=actor,
            ),
            changes=("tickets",),
        )

    def put_group(self, group: Group) -> bool:
        """Stores a complete group. Returns False if the ticket's group was already stored or acknowledged.

        The actor need not hold the lease any more: the first complete copy wins.

        Raises:
          KeyError: the ticket was never put, or was withdrawn.
          UnfitGroupError: the group does not match its ticket (prompt, number of rollouts, kind, round, order).
          FencedError: the group's actor is fenced.
        """
        with self._stowed(group.ticket_id, self._encode(group)) as stowed:
            stowed.is_taken = self._hand_in(group, stowed)
            return stowed.is_taken

    def _hand_in(self, group: Group, stowed: BlobLocation) -> bool:
        params = {
            "ticket_id": group.ticket_id,
            "kind": group.kind,
            "actor": group.actor,
            "actors": sorted(group.actors),
            "max_step": group.max_step,
            "fit": ticket_digest(group),
            "call": new_request_id(),
        }
        *_, fences, rows = self._write(
            self._step(f"UPDATE runs SET last_seq = last_seq + 1 WHERE run = :run AND {_TAKES}", **params),
            self._step(
                f"""INSERT INTO groups (run, seq, ticket_id, kind, actor, max_step, call)
                SELECT run, last_seq, :ticket_id, :kind, :actor, :max_step, :call FROM runs
                WHERE run = :run AND {_TAKES}""",
                **params,
            ),
            self._step(
                f"""UPDATE tickets SET state = 'done', actor = :actor, lease_expires_s = NULL, done_by = :call
                WHERE run = :run AND id = :ticket_id AND {_TAKES}""",
                **params,
            ),
            self._step(
                """DELETE FROM payloads WHERE run = :run AND call = :call
                AND NOT EXISTS (SELECT 1 FROM groups WHERE run = :run AND call = :call)""",
                **params,
            ),
            self._step("SELECT reason FROM fences WHERE run = :run AND actor IN [actors]", **params),
            self._step(
                """SELECT fit, done_by, only_for, CASE WHEN fit <> :fit THEN payload END FROM tickets
                WHERE run = :run AND id = :ticket_id""",
                **params,
            ),
            before_lock=[
                self._step(
                    """INSERT INTO payloads (run, call, payload, object) VALUES (:run, :call, :payload, :object)
                    ON CONFLICT DO NOTHING""",
                    call=params["call"],
                    payload=stowed.payload,
                    object=stowed.object,
                )
            ],
            changes=("groups",),
        )
        if rows and rows[0][1] == params["call"]:
            return True
        is_alone = bool(rows) and rows[0][2] == group.actor
        if fences and not is_alone:
            raise FencedError(f"actor {group.actor} is fenced: {fences[0][0]}")
        if not rows:
            raise KeyError(f"ticket {group.ticket_id!r} is not in the store")
        fit, _, only_for, payload = rows[0]
        if fit != params["fit"]:
            raise UnfitGroupError(describe_misfit(self._decode(Ticket, payload), group))
        if only_for is not None and not is_alone:
            raise UnfitGroupError(
                f"ticket {group.ticket_id} is reserved for actor {only_for}, got a group of {group.actor}"
            )
        return False

    def fail_ticket(self, ticket_id: str, reason: str, *, max_attempts: int) -> None:
        """Reports a failed group. Its ticket is offered again, or `failed` after `max_attempts` attempts."""
        params = {
            "id": ticket_id,
            "reason": reason[:_MAX_REASON_CHARS].replace("\0", ""),
            "max_attempts": max_attempts,
            "call": new_request_id(),
        }
        mine = "run = :run AND id = :id AND state = 'claimed' AND coalesce(given_up_by, '') <> :call"
        self._write(
            self._step(
                f"""UPDATE runs SET reissued = reissued + 1 WHERE run = :run
                AND EXISTS (SELECT 1 FROM tickets WHERE {mine} AND attempts + 1 < :max_attempts)""",
                **params,
            ),
            self._step(
                f"""UPDATE tickets SET attempts = attempts + 1, failure = :reason, actor = NULL, lease_expires_s = NULL,
                given_up_by = :call, state = CASE WHEN attempts + 1 >= :max_attempts THEN 'failed' ELSE 'open' END
                WHERE {mine}""",
                **params,
            ),
            changes=("tickets",),
        )

    def run_card(self) -> RunCard | None:
        """Returns the run card; None before the learner has put it."""
        rows = self._read("SELECT payload FROM cards WHERE run = :run")
        return self._decode(RunCard, rows[0][0]) if rows else None

    def blob(self, blake3: str) -> bytes:
        """Returns a small file of the run card by its hash, which is verified. Raises KeyError if it is unknown."""
        rows = self._read("SELECT content FROM blobs WHERE run = :run AND blake3 = :blake3", blake3=blake3)
        if not rows:
            raise KeyError(f"file of hash {blake3} is not in the store")
        (content,) = rows[0]
        check_blob(blake3, content)
        return content
