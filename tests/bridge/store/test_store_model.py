"""The store against a model in plain dictionaries, under random calls in random order."""

import dataclasses
import pathlib
import tempfile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from bridge.rollout_types import Ticket
from bridge.store.store_types import FencedError
from tests.bridge.factories import make_group, make_progress, make_ticket
from tests.bridge.store.engines import Engine

IDS = st.sampled_from([f"t{i}" for i in range(6)])
ID_LISTS = st.lists(IDS, max_size=4)
ACTORS = st.sampled_from(["x", "y", "z"])
LEASES_S = st.integers(1, 5)


@dataclasses.dataclass
class Entry:
    ticket: Ticket
    state: str = "open"
    actor: str = ""
    expires_s: float = 0.0
    progress: tuple[str, ...] = ()
    """Actors of its progress."""


class StoreMachine(RuleBasedStateMachine):
    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.place = self.engine.new_place(pathlib.Path(self.folder.name))
        self.clock = self.place.clock
        self.store = self.place.open()
        self.entries: dict[str, Entry] = {}  # in the order in which they were put
        self.arrivals: list[tuple[str, float]] = []  # (ticket id, number) of the groups held, as they came
        self.num_arrived = 0
        self.fences: set[str] = set()
        self.num_reissued = 0
        self.num_incarnations = 0
        self.seqs: dict[int, float] = {}  # every seq ever seen, and which arrival it was

    def teardown(self) -> None:
        self.store.close()
        self.place.close()
        self.folder.cleanup()

    @initialize(order=st.integers(-2, 2))
    def some_tickets_are_there(self, order):
        self.put_tickets_with(["t2", "t0", "t1"], order)

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.place.open()

    @rule(ids=ID_LISTS, order=st.integers(-2, 2))
    def put_tickets(self, ids, order):
        self.put_tickets_with(ids, order)

    def put_tickets_with(self, ids, order):
        new = [i for i in dict.fromkeys(ids) if i not in self.entries]
        assert self.store.put_tickets([make_ticket(i, order=order) for i in ids]) == len(new)
        self.entries |= {i: Entry(make_ticket(i, order=order)) for i in new}

    @rule(actor=ACTORS, limit=st.integers(0, 4), lease_s=LEASES_S)
    def claim(self, actor, limit, lease_s):
        if actor in self.fences:
            with pytest.raises(FencedError):
                self.store.claim(actor, limit=limit, lease_s=lease_s)
            return
        offered = [
            e
            for e in self.entries.values()
            if e.state == "open" or (e.state == "claimed" and e.expires_s <= self.clock.now_s)
        ]
        want = sorted(offered, key=lambda e: e.ticket.order)[:limit]  # stable: ties as they were put
        got = self.store.claim(actor, limit=limit, lease_s=lease_s)
        assert [(t.id, t.order) for t in got] == [(e.ticket.id, e.ticket.order) for e in want]
        assert [t.progress.actors if t.progress else () for t in got] == [e.progress for e in want]
        for e in want:
            e.state, e.actor, e.expires_s = "claimed", actor, self.clock.now_s + lease_s

    @rule(actor=ACTORS, ids=st.lists(IDS, max_size=4, unique=True), lease_s=LEASES_S)
    def renew(self, actor, ids, lease_s):
        held = [i for i in ids if self.holds(actor, i)]
        assert self.store.renew(actor, ids, lease_s=lease_s) == held
        for i in held:
            self.entries[i].expires_s = self.clock.now_s + lease_s

    @rule(actor=ACTORS, ids=ID_LISTS)
    def release(self, actor, ids):
        self.store.release(actor, ids)
        for i in ids:
            if self.holds(actor, i):
                self.entries[i].state = "open"

    @rule(actor=ACTORS, id_=IDS, by=st.sampled_from([(), ("y",), ("z",)]))
    def hand_over(self, actor, id_, by):
        actors = tuple(dict.fromkeys((*by, actor)))
        self.store.hand_over(actor, make_progress(id_, actors=actors))
        if self.holds(actor, id_):
            self.entries[id_].state, self.entries[id_].progress = "open", actors

    @rule(actor=ACTORS, id_=IDS)
    def put_group(self, actor, id_):
        entry = self.entries.get(id_)
        ticket = entry.ticket if entry else make_ticket(id_)
        group = make_group(ticket, actor=actor, finished_s=float(self.num_arrived))
        if actor in self.fences:
            with pytest.raises(FencedError):
                self.store.put_group(group)
        elif entry is None:
            with pytest.raises(KeyError):
                self.store.put_group(group)
        else:
            is_first = entry.state in ("open", "claimed")
            assert self.store.put_group(group) is is_first
            if is_first:
                entry.state, entry.actor, entry.progress = "done", actor, ()
                self.arrivals.append((id_, group.finished_s))
                self.num_arrived += 1

    @rule(ids=ID_LISTS)
    def acknowledge(self, ids):
        self.store.acknowledge(ids)
        self.forget_groups(ids)
        for i in ids:
            if i in self.entries:
                self.entries[i].state, self.entries[i].progress = "acknowledged", ()

    @rule(ids=ID_LISTS)
    def reissue(self, ids):
        known = {i for i in ids if i in self.entries}
        assert self.store.reissue(ids) == len(known)
        self.num_reissued += len(known)
        self.forget_groups(ids)
        for i in known:
            self.entries[i].state, self.entries[i].progress = "open", ()

    @rule(ids=ID_LISTS)
    def withdraw(self, ids):
        self.store.withdraw(ids)
        self.forget_groups(ids)
        for i in ids:
            self.entries.pop(i, None)

    @rule(actor=st.just("z"))
    def fence(self, actor):
        self.store.fence(actor, "why")
        self.fences.add(actor)
        for e in self.entries.values():
            if (e.state in ("claimed", "done") and e.actor == actor) or (e.state == "claimed" and actor in e.progress):
                e.state = "open"
                self.arrivals = [a for a in self.arrivals if a[0] != e.ticket.id]

            if actor in e.progress:
                e.progress = ()

    @rule()
    def acquire_leadership(self):
        assert self.store.acquire_leadership("here", lease_s=1) == self.num_incarnations
        self.num_incarnations += 1

    @rule(limit=st.integers(0, 3), skip=st.integers(0, 3))
    def read_a_page(self, limit, skip):
        everything = self.store.read_groups(after_seq=0, limit=100)
        after_seq = everything[skip - 1].seq if 0 < skip <= len(everything) else 0
        page = self.store.read_groups(after_seq=after_seq, limit=limit)
        want = [s for s in everything if s.seq > after_seq][:limit]
        assert [s.seq for s in page] == [s.seq for s in want]

    @invariant()
    def groups_are_the_models_in_order_of_arrival(self):
        stored = self.store.read_groups(after_seq=0, limit=100)
        assert [(s.group.ticket_id, s.group.finished_s) for s in stored] == self.arrivals
        seqs = [s.seq for s in stored]
        assert seqs == sorted(set(seqs))
        for s in stored:  # a seq means one arrival for ever; a new one is above all before it
            if s.seq not in self.seqs:
                assert s.seq > max(self.seqs, default=0)
            assert self.seqs.setdefault(s.seq, s.group.finished_s) == s.group.finished_s

    @invariant()
    def counts_are_the_models(self):
        want: dict[str, int] = dict.fromkeys(("open", "claimed", "done", "acknowledged", "failed"), 0)
        for e in self.entries.values():
            want[e.state] += 1
        assert self.store.counts() == want | {"reissued": self.num_reissued}

    def holds(self, actor: str, id_: str) -> bool:
        entry = self.entries.get(id_)
        return entry is not None and entry.state == "claimed" and entry.actor == actor

    def forget_groups(self, ids: list[str]) -> None:
        self.arrivals = [a for a in self.arrivals if a[0] not in ids]


@pytest.mark.heavy
def test_store_is_the_models_under_random_calls(engine):
    machine = type("Machine", (StoreMachine,), {"engine": engine})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))
