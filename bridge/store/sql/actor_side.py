"""What an actor asks of a store, in SQL. An actor's role may do this much and no more (`postgres/schema.sql`)."""

from collections.abc import Sequence

from bridge.heartbeat_types import Heartbeat
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
# A group is taken once: a call that is made again finds its own name in `done_by`, whatever became of the group since.
_TAKES = """EXISTS (SELECT 1 FROM tickets
    WHERE run = :run AND id = :ticket_id AND fit = :fit AND state NOT IN ('done', 'acknowledged')
        AND coalesce(done_by, '') <> :call
        AND (only_for = :actor OR (only_for IS NULL
            AND NOT EXISTS (SELECT 1 FROM fences WHERE run = :run AND actor = :actor))))"""


class ActorStore(GroupBucket, AnchorRows):
    """Claims, leases, groups and the run card."""

    def engine_capacity(self, *, anew: bool = False) -> dict[int, int]:
        """How many engines serve, by the sequences that each runs at once.

        Those of actors that have weights, don't leave, and were heard in the last `LIVE_S`. The store counts them at
        most once in `COUNTED_S`, whoever asks, and now with `anew`.
        """
        is_old = "abs({now} - counted_s) >= :counted_s"  # also after a clock was set back
        look = self._step(f"SELECT sizes, {is_old} FROM serving WHERE run = :run", counted_s=COUNTED_S)
        rows = self._database.read(self._run, look)
        if anew or any(needed for _, needed in rows):
            # Who finds it counted meanwhile does not count again; the count itself is the table's own (its trigger).
            count = self._step(
                f"UPDATE serving SET counted_s = {{now}} WHERE run = :run AND {is_old}",
                counted_s=0.0 if anew else COUNTED_S,
            )
            rows = self._write(count, look, locks=False)[1]
        pairs = (pair.split(":") for sizes, _ in rows for pair in sizes.split(",") if pair)
        return {int(size): int(num) for size, num in pairs}

    def register_actor(self, beat: Heartbeat, *, location: str) -> None:
        """Says for the first time that an actor lives, and keeps its name for it as long as its heartbeats come.

        From here on heartbeats of that name by another place are refused, and ours once another has taken it. An actor
        at the same `location` takes over at once, since a lock there says that its predecessor is dead; one elsewhere
        when nothing was heard of that one for `NAME_LEASE_S`, or it closed its store.

        Raises:
          NameTakenError: another place's actor has the name.
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
    ) -> list[Ticket]:
        """Leases up to `limit` tickets, lowest order first: open ones and ones whose lease ran out.

        Args:
          actor: who claims.
          limit: tickets at most.
          lease_s: for how long, in seconds.
          width: groups of the frontier that all actors serve together (`frontier.choose`); None for none.
          among: actors that share the training tickets; each takes its part only (`frontier.fair_share`).
          part: tickets of one order that it takes before any more of it, where a group's samples are tickets of their
            own and go to several actors (`frontier.spread`); None for the lowest orders as they come.
          places: sequences that this actor's engine runs at once: its part is in proportion to them.
          all_places: the sum of the places of the actors that share; None where they have as many each.
          served: this actor's tickets whose last request has ended, so that they leave the frontier.

        Raises:
          FencedError: the learner has fenced this actor, and there is no ticket for it alone.
          ValueError: a negative limit, or a lease that is over at once.
        """
        check_limit(limit)
        check_lease(lease_s)
        # A claim that is made again gets the tickets it got.
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
                """SELECT payload FROM tickets WHERE run = :run AND state = 'claimed' AND claim = :call
                ORDER BY "order", number""",
                **who,
            ),
            changes=("tickets",),
            notify_if=self._step(
                """SELECT 1 FROM tickets
                WHERE run = :run AND state = 'claimed' AND lease_expires_s <= {now} AND actor <> :actor LIMIT 1""",
                **who,
            ),
            # Who follows claims with more tickets need not look again and again.
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
        return self._tickets(rows)

    def leased(self, actor: str) -> set[str]:
        """The tickets that this actor holds; reads only, so it may be asked often."""
        rows = self._read(
            "SELECT id FROM tickets WHERE run = :run AND state = 'claimed' AND actor = :actor", actor=actor
        )
        return {id_ for (id_,) in rows}

    def renew(self, actor: str, ticket_ids: Sequence[str], *, lease_s: float) -> list[str]:
        """Extends leases; returns the ids this actor still holds (the others were taken over).

        Raises:
          ValueError: a lease that is over at once.
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

    def release(self, actor: str, ticket_ids: Sequence[str]) -> None:
        """Gives leased tickets back unserved; the next claim offers them at once."""
        self._write(
            self._step(
                f"{OPEN} WHERE run = :run AND id IN [ids] AND state = 'claimed' AND actor = :actor",
                ids=list(ticket_ids),
                actor=actor,
            ),
            changes=("tickets",),
        )

    def put_group(self, group: Group) -> bool:
        """Stores a complete group. False if a group of that ticket is here or was acknowledged.

        The actor need not hold the lease any more: the first complete copy wins.

        Raises:
          KeyError: no ticket of that id was ever put, or it was withdrawn.
          UnfitGroupError: the group does not fit its ticket (prompt, number of rollouts, kind, round, order).
          FencedError: the learner has fenced the group's actor.
        """
        with self._stowed(group.ticket_id, self._encode(group)) as stowed:
            stowed.is_taken = self._hand_in(group, stowed)
            return stowed.is_taken

    def _hand_in(self, group: Group, stowed: BlobLocation) -> bool:
        params = {
            "ticket_id": group.ticket_id,
            "kind": group.kind,
            "actor": group.actor,
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
            self._step(FENCE, **params),
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
            raise KeyError(f"the store knows no ticket {group.ticket_id!r}")
        fit, _, only_for, payload = rows[0]
        if fit != params["fit"]:
            raise UnfitGroupError(describe_misfit(self._decode(Ticket, payload), group))
        if only_for is not None and not is_alone:
            raise UnfitGroupError(f"ticket {group.ticket_id} is for actor {only_for} alone, not for {group.actor}")
        return False

    def fail_ticket(self, ticket_id: str, reason: str, *, max_attempts: int) -> None:
        """Hands in that a ticket's group could not be made: offered again, or `failed` after so many attempts."""
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
        """What is to be known of the run; None before its learner has put it."""
        rows = self._read("SELECT payload FROM cards WHERE run = :run")
        return self._decode(RunCard, rows[0][0]) if rows else None

    def blob(self, blake3: str) -> bytes:
        """A small file of the card, by its hash; it has that hash.

        Raises:
          KeyError: the store has none such.
        """
        rows = self._read("SELECT content FROM blobs WHERE run = :run AND blake3 = :blake3", blake3=blake3)
        if not rows:
            raise KeyError(f"the store has no file of hash {blake3}")
        (content,) = rows[0]
        check_blob(blake3, content)
        return content
