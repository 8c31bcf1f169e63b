"""Several actors on one real store: eq. 5-6 over all engines, under random completions and deaths."""

import collections
import contextlib
import random
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actor.admission import Admission, Policy
from bridge.rollout_types import Version
from bridge.store.claim import Offer, choose, fair_share, spread
from tests.bridge.factories import make_group, make_ticket

SERVED = Version(incarnation=0, step=0)
STATES = ("open", "mine", "theirs", "served", "expired", "mine, expired", "served, expired")
"""A ticket's, as the actor "me" sees it."""


class Cluster:
    """Actors as their loop is: claim what could start, admit, tell the store what has been served."""

    def __init__(self, store, num_actors, *, policy: Policy = "frontier", width, tickets_per_group, max_sequences=4):
        self.store, self.width, self.policy = store, width, policy
        self.make = lambda: Admission(
            policy,
            width=width,
            max_sequences=max_sequences,
            samples_per_group=2,
            tickets_per_group=tickets_per_group,
        )
        self.actors = {f"a{i}": self.make() for i in range(num_actors)}
        self.held = {name: {} for name in self.actors}
        self.served = {name: [] for name in self.actors}

    def claim(self, name):
        admission, served = self.actors[name], self.served[name]
        admission.rebalance({4: len(self.actors)})
        tickets = self.store.claim(
            name,
            limit=admission.num_to_claim(),
            lease_s=100,
            width=self.width if self.policy == "frontier" else None,
            among=len(self.actors),
            part=admission.samples_per_engine,
            served=served,
        )
        served.clear()
        self.held[name] |= {t.id: t for t in tickets}
        admission.offer(tickets)
        admission.admit(SERVED)
        return tickets

    def end_a_request(self, name, ticket):
        """One request ends; with the ticket's last one its group goes to the store, or waits for its rewards."""
        if self.actors[name].finish_sample(ticket.id):
            self.served[name].append(ticket.id)
            return True
        return False

    def die(self, name):
        """Killed and started again; the leases run out at once."""
        self.store.release(name, list(self.held[name]))
        self.actors[name], self.held[name], self.served[name] = self.make(), {}, []

    def orders_untold(self, claiming):
        """Of tickets whose end the store is not told of yet; the one that claims tells it."""
        return {
            self.held[n][i].order for n, ids in self.served.items() if n != claiming for i in ids if i in self.held[n]
        }

    def orders_in_service(self):
        return {t.order for a in self.actors.values() for t in a.in_service if t.kind == "train"}


@pytest.mark.heavy
@given(
    width=st.integers(1, 4),
    num_actors=st.integers(1, 3),
    num_groups=st.integers(1, 8),
    by_sample=st.booleans(),
    seed=st.integers(0, 10**6),
)
@example(width=1, num_actors=2, num_groups=7, by_sample=True, seed=2)
def test_one_frontier_over_all_engines(engine, tmp_path_factory, width, num_actors, num_groups, by_sample, seed):
    rng = random.Random(seed)
    parts = 2 if by_sample else 1
    tickets = [
        make_ticket(f"{o}.{i}", order=o, num_samples=2 // parts) for o in range(num_groups) for i in range(parts)
    ]
    with contextlib.closing(engine.new_place(tmp_path_factory.mktemp("store")).open()) as store:
        store.put_tickets(tickets)
        cluster = Cluster(store, num_actors, width=width, tickets_per_group=parts)
        emitted: list[str] = []
        undone = {t.id: t.order for t in tickets}  # not serving-complete
        for _ in range(2000):
            if len(emitted) == len(tickets):
                break
            name = rng.choice(sorted(cluster.actors))
            # After a death an earlier group may be undone again; one that the store takes for running goes on.
            before = cluster.orders_in_service() | cluster.orders_untold(name)
            claimed = cluster.claim(name)
            for ticket in claimed:
                # Eq. 6: of the F_w lowest orders that are not serving-complete.
                assert ticket.order in before or ticket.order in sorted(set(undone.values()))[:width]
            assert len(cluster.orders_in_service()) <= width
            running = [(n, t) for n in sorted(cluster.actors) for t in cluster.actors[n].in_service]
            if running and rng.randrange(10):
                name, ticket = rng.choice(running)
                if cluster.end_a_request(name, ticket):
                    del undone[ticket.id]
                    if rng.random() < 0.5:
                        assert store.put_group(make_group(ticket, actor=name))
                        emitted.append(ticket.id)
                        del cluster.held[name][ticket.id]
            elif rng.random() < 0.5:
                name = rng.choice(sorted(cluster.actors))
                undone |= {i: t.order for i, t in cluster.held[name].items()}
                cluster.die(name)
            else:  # rewards become known
                for name, held in cluster.held.items():
                    for id_ in [i for i in held if i not in undone]:
                        assert store.put_group(make_group(held.pop(id_), actor=name))
                        emitted.append(id_)
        assert sorted(emitted) == sorted(t.id for t in tickets)


@pytest.mark.heavy
@settings(max_examples=20)
@given(num_actors=st.integers(2, 5), num_tickets=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_actors_share_what_there_is_whoever_asks_first(engine, tmp_path_factory, num_actors, num_tickets, seed):
    with contextlib.closing(engine.new_place(tmp_path_factory.mktemp("store")).open()) as store:
        store.put_tickets(make_ticket(str(n), order=n) for n in range(num_tickets))
        cluster = Cluster(store, num_actors, policy="fifo", width=0, tickets_per_group=1, max_sequences=1000)
        for name in random.Random(seed).sample(sorted(cluster.actors), num_actors):
            cluster.claim(name)
        counts = [len(held) for held in cluster.held.values()]
        assert sum(counts) == num_tickets and max(counts) - min(counts) <= -(-num_tickets // num_actors)
        assert max(counts) == -(-num_tickets // num_actors)


ORDERS = st.integers(-2, 4)


@pytest.mark.heavy
@given(
    tickets=st.lists(
        st.tuples(ORDERS, st.sampled_from(["train", "train", "train", "eval"]), st.sampled_from(STATES)), max_size=12
    ),
    limit=st.integers(0, 6),
    width=st.none() | st.integers(0, 4),
    among=st.integers(0, 3),
    part=st.none() | st.integers(1, 2),
    places=st.sampled_from([(1, None), (1, 3), (3, 4), (256, 288), (5, 2)]),
)
@example(
    tickets=[(0, "train", "open")] * 3 + [(1, "train", "open")], limit=2, width=None, among=1, part=1, places=(1, None)
)
@example(
    tickets=[(0, "train", "mine")] + [(0, "train", "open")] * 2, limit=1, width=None, among=1, part=1, places=(1, None)
)
@example(tickets=[(n, "train", "open") for n in range(9)], limit=9, width=None, among=2, part=None, places=(256, 288))
def test_claim_is_what_the_pure_definition_chooses(
    engine, tmp_path_factory, tickets, limit, width, among, part, places
):
    """The oracle: `frontier.choose`, `spread` and `fair_share`, over the same tickets kept in a list."""
    place = engine.new_place(tmp_path_factory.mktemp("store"))
    with contextlib.closing(place.open()) as store:
        rows = [(str(n), order, kind, state) for n, (order, kind, state) in enumerate(tickets)]
        store.put_tickets(make_ticket(i, order=order, kind=kind) for i, order, kind, _ in rows)
        store.fence("f", "why")
        store.put_tickets([make_ticket("f-alone", order=-9, kind="probe")], only_for="f")
        put_in_states(store, place.clock, rows)
        shares = dict(among=among, part=part, places=places[0], all_places=places[1])
        got = [t.id for t in store.claim("me", limit=limit, lease_s=60, width=width, **shares)]

    by_order = sorted(rows, key=lambda r: (r[1], int(r[0])))
    is_unserved = [r for r in by_order if r[2] == "train" and r[3] != "served"]
    frontier = sorted({r[1] for r in is_unserved})[:width]
    parts = [r for r in is_unserved if r[1] in frontier]
    mine = sum(r[3] == "mine" for r in parts)
    offers = [Offer(i, o, k == "train") for i, o, k, s in by_order if s == "open" or s.endswith("expired")]
    if part is not None:
        held = collections.Counter(o for _, o, k, s in rows if k == "train" and s == "mine")
        offers = spread(offers, part=part, held=held, num_groups=limit if width is None else None)
    want = choose(
        offers,
        limit=limit,
        max_train=fair_share(len(parts), mine=mine, among=among, places=places[0], all_places=places[1])
        if among > 1
        else None,
        width=width,
        in_service={o for _, o, k, s in rows if k == "train" and s in ("mine", "theirs")},
    )
    assert got == [i for i, *_ in by_order if i in want]  # lowest order first, whatever was chosen first


def test_what_a_dead_actor_had_served_and_not_handed_in_is_shared_by_those_that_live(engine, tmp_path):
    place = engine.new_place(tmp_path)
    with contextlib.closing(place.open()) as store:
        store.put_tickets(make_ticket(str(n), order=n) for n in range(5))
        store.claim("dead", limit=5, lease_s=1.0)
        store.claim("dead", limit=0, lease_s=1.0, served=[str(n) for n in range(5)])
        place.clock.now_s += 2.0
        assert [len(store.claim(name, limit=9, lease_s=100, among=3)) for name in ("a", "b", "a")] == [2, 2, 0]
        assert len(store.claim("c", limit=9, lease_s=100, among=2)) == 1


def put_in_states(store, clock, rows):
    """Claims tickets as "me" and "they", some for a lease that then runs out, and tells that some were served."""
    holders = {s: "me" if s.startswith("mine") else "they" for s in STATES}
    short = {i for i, *_, s in rows if s.endswith("expired")}
    for lease_s in (1.0, 100.0):
        everything = {i: s for i, *_, s in rows if s != "open" and (i in short) == (lease_s == 1.0)}
        for owner in ("me", "they"):
            claimed = {t.id for t in store.claim(owner, limit=100, lease_s=lease_s)}
            store.release(owner, sorted(claimed - {i for i, s in everything.items() if holders[s] == owner}))
        if lease_s == 1.0:
            clock.now_s += 0.5
    store.claim("they", limit=0, lease_s=1.0, served=[i for i, *_, s in rows if s.startswith("served")])
    clock.now_s += 0.5


@pytest.mark.parametrize("by_sample", [False, True])
def test_width_of_the_run_replaces_that_of_claims_until_it_is_none(engine, tmp_path, by_sample):
    with contextlib.closing(engine.new_place(tmp_path).open()) as store:
        store.acquire_leadership("here", lease_s=60)
        parts = 2 if by_sample else 1
        store.put_tickets(make_ticket(f"{o}.{i}", order=o) for o in range(6) for i in range(parts))

        def claim(name, **fields):
            return [t.order for t in store.claim(name, limit=100, lease_s=100, **({"width": 9} | fields))]

        store.set_frontier_width(2)
        assert claim("a", among=2) == [0] * parts  # one of two groups
        assert claim("b", among=2) == [1] * parts
        assert claim("b", among=2) == claim("a") == []
        served = [f"0.{i}" for i in range(parts)]
        assert claim("a", served=served) == [2] * parts
        store.set_frontier_width(3)
        assert claim("a") == [3] * parts
        store.set_frontier_width(None)
        assert claim("b", width=4) == [4] * parts
        assert claim("b") == [5] * parts


def test_choose_takes_pinned_ones_whatever_the_frontier():
    offers = [Offer("e", -5, False), Offer("a", 0, True), Offer("b", 1, True), Offer("c", 2, True)]
    assert choose(offers, limit=9) == ["e", "a", "b", "c"]
    assert choose(offers, limit=2) == ["e", "a"]
    assert choose(offers, limit=9, max_train=1) == ["e", "a"]
    assert choose(offers, limit=9, width=2, in_service={7}) == ["e", "a"]
    assert choose(offers, limit=9, width=2, in_service={1, 7}) == ["e", "b"]


def test_spread_puts_what_is_over_a_part_last_and_looks_through_so_many_groups():
    offers = [Offer("e", -5, False)] + [Offer(f"{o}.{i}", o, True) for o in range(3) for i in range(2)]

    def ids(**fields):
        return [o.id for o in spread(offers, part=1, **fields)]

    assert ids(held={}, num_groups=None) == ["e", "0.0", "1.0", "2.0", "0.1", "1.1", "2.1"]
    assert ids(held={1: 1}, num_groups=2) == ["e", "0.0", "0.1", "1.0", "1.1"]
    assert ids(held={0: 1}, num_groups=1) == ["e", "0.0", "0.1"]  # of the lowest order all the same


@pytest.mark.heavy
@settings(max_examples=20)
@given(num_actors=st.integers(2, 5), num_groups=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_each_group_is_spread_over_all_actors_by_one_claim_each(engine, tmp_path_factory, num_actors, num_groups, seed):
    size = 2 * num_actors
    with contextlib.closing(engine.new_place(tmp_path_factory.mktemp("store")).open()) as store:
        store.put_tickets(
            make_ticket(f"{o}.{i}", order=o, num_samples=1) for o in range(num_groups) for i in range(size)
        )
        for name in random.Random(seed).sample(range(num_actors), num_actors):
            tickets = store.claim(str(name), limit=100, lease_s=100, among=num_actors, part=2)
            assert sorted(t.order for t in tickets) == sorted([*range(num_groups)] * 2)


@pytest.mark.parametrize(
    ("total", "mine", "among", "share"), [(10, 0, 2, 5), (10, 5, 2, 0), (3, 0, 2, 2), (0, 0, 3, 0)]
)
def test_fair_share(total, mine, among, share):
    assert fair_share(total, mine=mine, among=among) == share


@pytest.mark.parametrize(
    ("total", "mine", "places", "all_places", "share"),
    [
        (32, 0, 256, 288, 29),
        (32, 0, 32, 288, 4),
        (32, 3, 32, 288, 1),
        (5, 0, 1, 1, 5),
        (5, 0, 9, 4, 5),
        (0, 0, 2, 4, 0),
    ],
)
def test_fair_share_is_by_places(total, mine, places, all_places, share):
    assert fair_share(total, mine=mine, among=2, places=places, all_places=all_places) == share


@pytest.mark.heavy
@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=5), num_tickets=st.integers(1, 40), seed=st.integers(0, 99)
)
@example(sizes=[256, 32], num_tickets=32, seed=0)
@example(sizes=[256, 32, 32, 32], num_tickets=32, seed=1)
@example(sizes=[300, 1], num_tickets=40, seed=2)
def test_unequal_engines_take_parts_in_proportion_whoever_asks_first(
    engine, tmp_path_factory, sizes, num_tickets, seed
):
    """Parts as fractions are the oracle: none has a ticket more than its part rounded up, and none is left over."""
    with contextlib.closing(engine.new_place(tmp_path_factory.mktemp("store")).open()) as store:
        store.put_tickets(make_ticket(str(n), order=n) for n in range(num_tickets))
        counts = {}
        for number in random.Random(seed).sample(range(len(sizes)), len(sizes)):
            admission = Admission("fifo", max_sequences=sizes[number], samples_per_group=1)
            admission.rebalance(collections.Counter(sizes))
            tickets = store.claim(
                str(number),
                limit=num_tickets,
                lease_s=100,
                among=admission.num_engines,
                places=admission.capacity,
                all_places=admission.all_places,
            )
            counts[number] = len(tickets)
        for number, size in enumerate(sizes):
            assert counts[number] < Fraction(num_tickets * size, sum(sizes)) + 1
        assert sum(counts.values()) == num_tickets


@pytest.mark.parametrize("sizes", [(256, 256), (256, 32), (32, 256), (256, 16), (256, 32, 32, 32)])
def test_unequal_engines_need_no_second_turn_where_all_fits_at_once(engine, tmp_path, sizes):
    """32 groups of 8 responses that take as long each: as many places as there are responses serve them in one turn."""
    with contextlib.closing(engine.new_place(tmp_path).open()) as store:
        store.put_tickets(make_ticket(str(n), order=n, num_samples=8) for n in range(32))
        admitted = 0
        for number, size in enumerate(sizes):
            admission = Admission("fifo", max_sequences=size, samples_per_group=8)
            admission.rebalance(collections.Counter(sizes))
            limit = admission.num_to_claim()
            shares = dict(among=admission.num_engines, places=admission.capacity, all_places=admission.all_places)
            admission.offer(store.claim(str(number), limit=limit, lease_s=100, **shares))
            admitted += len(admission.admit(SERVED))
            assert admission.num_sequences <= size
        assert admitted == 32
