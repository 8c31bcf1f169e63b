"""The store: where tickets, complete groups and heartbeats meet.

Every call is one transaction; a process may be killed between any two of them, and each group is trained exactly once
(docs/exactly_once.md). `sample_tickets.SampleTickets` stands between a learner and any implementation.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol, get_args

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Ticket, Version
from bridge.weight_types import Announcement, RunCard

Topic = Literal["groups", "tickets", "claims", "weights", "run"]
"""What a process may wait for: complete groups; tickets offered, withdrawn or taken over; training tickets claimed;
announced weights; that the run is finished."""
TOPICS: tuple[Topic, ...] = get_args(Topic)

Mark = Mapping[Topic, int]
"""How often each topic had changed, as far as this process had heard, at one moment (`mark`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group and its place in the order of arrival."""

    seq: int
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """That a run's learner has done all its steps; one that only died says nothing."""

    version: Version
    """Of the last weights."""
    time_s: float
    """When, by the store's clock."""


class SharedStore(Protocol):
    """What learner and actors both ask of a store.

    Whatever fails on the way to a store elsewhere is tried again, with backoff, for as long as the store was told to;
    then `StoreLostError`. A call whose connection was lost in its middle may be made again: nothing is doubled by it.
    """

    def mark(self) -> Mark:
        """Where the store's changes stand now; taken before reading, so that `wait` misses nothing read since."""
        ...

    def wait(self, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        """Returns when something of `topics` may have changed since `mark`, at the latest after `timeout_s`."""
        ...

    def heartbeat(self, beat: Heartbeat) -> None:
        """Records that a process lives."""
        ...

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of every process, by the process's name; times are the store's, not the processes'."""
        ...

    def now_s(self) -> float:
        """The store's clock, in Unix seconds: what leases and heartbeats are counted by."""
        ...

    def announced(self) -> Announcement | None:
        """The version announced last; None before the first."""
        ...

    def fenced(self, actor: str) -> str | None:
        """Why an actor is fenced; None if it isn't."""
        ...

    def finished(self) -> Finished | None:
        """Whether the run is finished, and how; None: it goes on, or a learner has taken it up again."""
        ...

    def close(self) -> None:
        """Lets go of the store; its contents stay."""
        ...


class LearnerStore(SharedStore, Protocol):
    """What the learner asks of a store.

    A ticket is `open`, `claimed` (leased by one actor), `done` (its group is here) or `acknowledged`
    (its group was trained and the checkpoint that says so is on disk).

    From `lead` on every call that writes raises `SupersededLearnerError` once another learner leads the run: what it
    would have written is not.
    """

    def acquire_leadership(self, owner: str, *, lease_s: float) -> int:
        """Becomes the run's one learner; returns its incarnation, one higher than the last; the first is 0.

        A run that was finished goes on from here. A learner at the same `owner` (machine and run folder) takes over at
        once, since the run folder's lock says that its predecessor is dead; one elsewhere waits for the lease to end.

        Raises:
          LearnerLivesError: the lease of a learner elsewhere has not ended.
        """
        ...

    def renew_leadership(self, *, lease_s: float) -> None:
        """Extends the lead from now on; also one whose lease ran out, as long as nobody else took it.

        Raises:
          SupersededLearnerError: somebody did.
        """
        ...

    def release_leadership(self) -> None:
        """Ends the lead, so that a learner elsewhere need not wait; none is fine."""
        ...

    def finish(self, step: int) -> None:
        """Says that all steps are done: nobody need serve the run any more. Again is fine, and changes nothing."""
        ...

    def announce(self, announcement: Announcement) -> None:
        """Tells the actors of a version; again, when there are more places to fetch it from.

        Raises:
          ValueError: it is older than the one announced.
        """
        ...

    def put_run_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        """Puts what actors elsewhere need to know of the run, in place of what was there; `blobs` by their hashes."""
        ...

    def put_tickets(self, tickets: Iterable[Ticket], *, only_for: str | None = None) -> int:
        """Offers tickets; ids the store already knows are left alone. Returns how many were new.

        With `only_for` only that actor may claim them and put their groups, also while it is fenced: probes by which it
        may show that it is clean again.
        """
        ...

    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        """Unacknowledged groups of a kind in order of arrival, from the first after `after_seq`; none is missed.

        After a break (`num_breaks`) a leading learner's next call gives all groups higher numbers, so that each reader
        gets them again: the server that answers now may be an older copy, in which their numbers belong to others.

        Raises:
          ValueError: a negative limit; or this learner's own bucket is not there any more, or refuses us.
        """
        ...

    @property
    def num_breaks(self) -> int:
        """Times that the way to the store broke.

        After one the store may be a standby or a restored backup, without the last tickets and groups: a learner offers
        its open tickets again.
        """
        ...

    def num_reissued(self) -> int:
        """Tickets offered again, in all; costs the same however many tickets the run has."""
        ...

    @property
    def num_unreadable(self) -> int:
        """Groups that `read_groups` found to be none, or not what their rows say; their tickets were offered again."""
        ...

    @property
    def lost_in_a_row(self) -> dict[str, int]:
        """Groups that were to be in the bucket and weren't, or not as they were put, by actor since its last that was.

        Only those that came since this process leads the run: earlier ones may lie in another learner's bucket.
        Whoever has dealt with an actor takes it out.
        """
        ...

    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        """Forgets these groups' data; the newest ids stay known (`KEPT_ORDERS`), so a late copy is refused.

        Older ones are only counted: a late copy of such a group is of no ticket.
        """
        ...

    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> int:
        """Drops these tickets' groups, if any, and offers the tickets again. Returns how many.

        Whatever state a ticket is in, acknowledged included; unknown ids are left out. Where single samples are tickets
        (`sample_tickets`), only those go that began on weights before the learner step `older_than`.
        """
        ...

    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        """Forgets tickets that nobody needs any more, wherever they are, and their groups."""
        ...

    def withdraw_pinned(self) -> None:
        """Forgets all evaluation and probe tickets, and their groups: nobody waits for them any more."""
        ...

    def roll_back(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        """Goes back to a checkpoint: what was open then and acknowledged since is offered again; returns how many.

        Tickets issued after it are forgotten, since the learner issues the same ones anew when it gets there;
        but one whose group is here, made by weights of no later step, stays: it need not be generated again.
        `open_ids` were open at the checkpoint's `step`, and `next_order` was to be issued next.
        """
        ...

    def fence(self, actor: str, reason: str) -> None:
        """Refuses this actor's claims and groups from now on; what it holds or made goes to others.

        Its groups that are not acknowledged yet are dropped.
        """
        ...

    def unfence(self, actor: str) -> None:
        """Lets an actor claim and put again."""
        ...

    def fenced_actors(self) -> set[str]:
        """The names of all fenced actors."""
        ...

    def failed(self) -> dict[str, str]:
        """Tickets that nobody could make a group for, and why."""
        ...

    def num_unclaimed(self) -> int:
        """Training tickets that no actor has claimed: what actors with room may begin at once."""
        ...

    def counts(self) -> dict[str, int]:
        """Tickets by state: open, claimed, done, acknowledged, failed; also reissued (a running total)."""
        ...

    def all_anchors(
        self, *, after: str = "", limit: int, timeout_s: float | None = None
    ) -> dict[str, tuple[float, ...]]:
        """A page of `limit` tasks of what `ActorStore.anchors` gives, by key, from the first behind `after`.

        None is left out while actors raise some. `timeout_s` bounds the wait for a store that is away.

        Raises:
          ValueError: a negative limit.
        """
        ...

    def put_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        """What `ActorStore.raise_anchors` does, by a learner that has them from its checkpoint."""
        ...

    def record_restore(self, incarnation: int, step: int) -> None:
        """Records the step that a learner's incarnation began at: later ones of those before it are abandoned."""
        ...

    def restores(self) -> dict[int, int]:
        """Incarnation -> the step it began at."""
        ...


class ActorStore(SharedStore, Protocol):
    """What an actor asks of a store. Its role in the database may do this much and no more."""

    def engine_capacity(self, *, anew: bool = False) -> dict[int, int]:
        """How many engines serve, by the sequences that each runs at once.

        Those of actors that have weights, don't leave, and were heard in the last `LIVE_S`. The store counts them at
        most once in `COUNTED_S`, whoever asks, and now with `anew`.
        """
        ...

    def register_actor(self, beat: Heartbeat, *, location: str) -> None:
        """Says for the first time that an actor lives, and keeps its name for it as long as its heartbeats come.

        From here on heartbeats of that name by another place are refused, and ours once another has taken it. An actor
        at the same `location` takes over at once, since a lock there says that its predecessor is dead; one elsewhere
        when nothing was heard of that one for `NAME_LEASE_S`, or it closed its store.

        Raises:
          NameTakenError: another place's actor has the name.
        """
        ...

    def run_card(self) -> RunCard | None:
        """What is to be known of the run; None before its learner has put it."""
        ...

    def blob(self, blake3: str) -> bytes:
        """A small file of the card, by its hash; it has that hash.

        Raises:
          KeyError: the store has none such.
        """
        ...

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
        ...

    def leased(self, actor: str) -> set[str]:
        """The tickets that this actor holds; reads only, so it may be asked often."""
        ...

    def renew(self, actor: str, ticket_ids: Sequence[str], *, lease_s: float) -> list[str]:
        """Extends leases; returns the ids this actor still holds (the others were taken over).

        Raises:
          ValueError: a lease that is over at once.
        """
        ...

    def release(self, actor: str, ticket_ids: Sequence[str]) -> None:
        """Gives leased tickets back unserved; the next claim offers them at once."""
        ...

    def put_group(self, group: Group) -> bool:
        """Stores a complete group. False if a group of that ticket is here or was acknowledged.

        The actor need not hold the lease any more: the first complete copy wins.

        Raises:
          KeyError: no ticket of that id was ever put, or it was withdrawn.
          UnfitGroupError: the group does not fit its ticket (prompt, number of rollouts, kind, round, order).
          FencedError: the learner has fenced the group's actor.
        """
        ...

    def anchors(self, keys: Collection[str]) -> dict[str, tuple[float, ...]]:
        """T_anchor of RollPacker, section 4.3: how long the longest correct run of each test case took so far.

        Seconds, to a millisecond, by test case; by the key of a task. Tasks without one are left out, and cases of
        which none is known come after the last: they have no number.
        """
        ...

    def raise_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        """Raises anchors (seconds by test case, by the key of a task) to those given where these are larger.

        So it may be called again, in any order, and by all actors at once. Nobody can make an anchor smaller; who
        makes one too large lengthens that case's timeout, at most to T_max.

        Raises:
          ValueError: a key of more than `MAX_TASK_KEY_BYTES`, no test case or more than `MAX_CASES`, or a time that is
            none, below 0 or above `MAX_CASE_S`; nothing is written then.
        """
        ...

    def fail_ticket(self, ticket_id: str, reason: str, *, max_attempts: int) -> None:
        """Hands in that a ticket's group could not be made: offered again, or `failed` after so many attempts."""
        ...


class GroupStore(LearnerStore, ActorStore, Protocol):
    """What every store does, whatever is behind it."""


MAX_TASK_KEY_BYTES = 64
MAX_CASES = 2**12
"""Test cases of one task that have anchors; also in `postgres/schema.sql`, as are the bytes of a key."""
MAX_CASE_S = 99_999.999
"""Of an anchor: eight digits of milliseconds, more than a day."""
LIVE_S = 10.0
"""An actor that has said nothing for so long counts for no engine: five of its heartbeats."""
COUNTED_S = 1.0
"""For so long what was counted of the engines is taken as it is."""
NAME_LEASE_S = 10.0
"""For so long after its last heartbeat an actor keeps its name."""
