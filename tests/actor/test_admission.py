import collections
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actor.admission import Admission, sequences_per_engine
from bridge.rollout_types import Ticket, Version
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    AdmissionConfig,
    EnvironmentsConfig,
    PromptsConfig,
    PublishConfig,
    RoundsConfig,
)
from tests.bridge.factories import make_ticket

V0, V1 = Version(incarnation=0, step=0), Version(incarnation=0, step=1)


def tickets(*orders: int, **fields) -> list[Ticket]:
    return [make_ticket(f"t{o}", order=o, **fields) for o in orders]


def pinned(*orders: int) -> list[Ticket]:
    return tickets(*orders, kind="eval", num_samples=1)


def ids(some: list[Ticket]) -> list[str]:
    return [t.id for t in some]


def finish(admission: Admission, ticket: Ticket) -> None:
    for _ in range(ticket.num_samples):
        admission.finish_sample(ticket.id)


def frontier(width: int, max_sequences: int = 64) -> Admission:
    return Admission("frontier", width=width, max_sequences=max_sequences, samples_per_group=2)


def test_frontier_on_the_papers_example_refills_with_the_next_lowest_order():
    # RolloutPipe section 3.3: F_w = 2, groups 1-6 arrived, F = {1, 2}; after group 1's K requests F = {2, 3}.
    admission = frontier(2)
    admission.offer(tickets(4, 2, 6, 1, 3, 5))
    first, _ = admission.admit(V0)
    assert ids(admission.in_service) == ["t1", "t2"]
    admission.finish_sample(first.id)
    assert admission.admit(V0) == []  # one of K requests has ended: still in service
    admission.finish_sample(first.id)
    assert ids(admission.admit(V0)) == ["t3"]
    assert ids(admission.in_service) == ["t2", "t3"]


def test_full_frontier_leaves_the_engines_room_to_evaluations_and_probes():
    admission = frontier(1, max_sequences=8)
    assert admission.num_to_claim() == 4
    admission.offer(tickets(1))
    admission.admit(V0)
    assert admission.num_to_claim() == 3
    admission.offer(tickets(2))  # waits for the frontier
    assert admission.admit(V0) == [] and admission.num_to_claim() == 2


def test_frontier_width_lowered_in_service_admits_nothing_until_it_fits():
    admission = frontier(3)
    admission.offer(tickets(1, 2, 3, 4))
    served = admission.admit(V0)
    admission.width = 1
    for ticket in served[:2]:
        finish(admission, ticket)
        assert admission.admit(V0) == []
    finish(admission, served[2])
    assert ids(admission.admit(V0)) == ["t4"]


def test_fifo_admits_while_the_engine_has_room():
    admission = Admission("fifo", max_sequences=5, samples_per_group=2)
    assert admission.num_to_claim() == 3
    admission.offer(tickets(1, 2, 3, 4))
    assert ids(admission.admit(V0)) == ["t1", "t2", "t3"]  # six requests: the engine stays full
    assert admission.num_to_claim() == 0
    admission.finish_sample("t2")
    assert admission.admit(V0) == []
    admission.finish_sample("t1")
    assert ids(admission.admit(V0)) == ["t4"]


def window(sequences=None, max_sequences=64, num_spare=1):
    return Admission(
        "window", max_sequences=max_sequences, samples_per_group=2, sequences=sequences, num_spare=num_spare
    )


def test_window_keeps_its_sequences_in_progress_and_a_ticket_in_hand():
    admission = window(sequences=4)
    assert admission.num_to_claim() == 3
    admission.offer(tickets(1, 2, 3))
    assert ids(admission.admit(V0)) == ["t1", "t2"]
    assert admission.num_to_claim() == 0
    admission.finish_sample("t2")  # as one ends, the next begins: a group's other request waits inside the engine
    assert ids(admission.admit(V0)) == ["t3"]
    assert admission.num_sequences == 5 and admission.num_to_claim() == 1


@pytest.mark.parametrize(("admission", "num_spare"), [(dict(), 1), (dict(async_ratio=1.0), 0)])
def test_window_under_a_lag_bound_keeps_no_ticket_from_other_engines(admission, num_spare):
    config = Config(
        preset="test",
        admission=AdmissionConfig(policy="window", width=4, **admission),
        publish=PublishConfig(when="every"),
    )
    engine = Admission.of(config, max_sequences=1024)
    engine.rebalance({1024: 2})
    assert engine.num_to_claim() == 2 + num_spare


def test_window_is_bounded_by_the_engine():
    small = window(sequences=16, max_sequences=2)
    assert small.num_to_claim() == 2
    small.offer(tickets(1, 2))
    assert ids(small.admit(V0)) == ["t1"]


def test_window_is_shared_with_the_other_engines():
    admission = window(sequences=6)
    admission.rebalance({64: 3})
    admission.offer(tickets(1, 2, 3))
    assert ids(admission.admit(V0)) == ["t1"]
    admission.rebalance({64: 2})
    assert ids(admission.admit(V0)) == ["t2"]


@pytest.mark.parametrize(
    ("policy", "fields"), [("fifo", {}), ("frontier", dict(width=4)), ("window", dict(sequences=64))]
)
def test_single_samples_are_claimed_by_a_part_of_each_group_for_all_the_room_there_is(policy, fields):
    admission = Admission(policy, max_sequences=8, samples_per_group=6, tickets_per_group=6, **fields)
    assert admission.samples_per_engine is None  # alone it takes them as they come
    room = admission.num_to_claim()
    admission.rebalance({8: 4})
    assert admission.samples_per_engine == 2  # 6 samples over 4 engines
    assert admission.num_to_claim() == room >= 8  # in one claim
    admission.rebalance({8: 1, 16: 2})
    assert admission.samples_per_engine == 2 and admission.all_places == 40  # 8 places of 40: ceil(6 / 5)
    admission.rebalance({8: 1, 40: 1})
    assert admission.samples_per_engine == 1
    whole = Admission(policy, max_sequences=8, samples_per_group=2, **fields)
    whole.rebalance({8: 4})
    assert whole.samples_per_engine is None and whole.num_to_claim() > 2


@pytest.mark.parametrize(
    ("total", "sizes", "want"),
    [
        (64, [64, 64], [32, 32]),
        (64, [16, 64], [16, 48]),
        (65, [64, 64], [33, 33]),
        (10, [4, 4, 4], [4, 4, 4]),
        (99, [8, 16], [8, 16]),
        (12, [1, 2, 64, 64], [1, 2, 5, 5]),
        (5, [64], [5]),
    ],
)
def test_parts_of_a_window_fill_small_engines_and_leave_the_rest_to_large_ones(total, sizes, want):
    part = sequences_per_engine(total, collections.Counter(sizes))
    assert [min(part, size) for size in sizes] == want


@pytest.mark.parametrize("policy", ["fifo", "frontier", "window"])
def test_pinned_tickets_go_first_and_take_no_slot(policy):
    admission = Admission(policy, width=1, max_sequences=3, samples_per_group=2)
    admission.offer([*tickets(0, 1), *pinned(-5, -9)])
    assert ids(admission.admit(V0)) == ["t-9", "t-5", "t0"]
    finish(admission, pinned(-9)[0])
    finish(admission, pinned(-5)[0])
    # In service is t0 alone: the frontier is full, the engine of three is not.
    assert ids(admission.admit(V0)) == ([] if policy == "frontier" else ["t1"])


def test_pinned_tickets_beside_a_full_window_take_the_engines_room():
    admission = window(sequences=2, max_sequences=4)
    admission.offer([*tickets(0, 1), *pinned(-3, -2, -1)])
    assert ids(admission.admit(V0)) == ["t-3", "t-2", "t-1", "t0"]
    for one in pinned(-3, -2, -1):
        finish(admission, one)
    assert admission.num_free == 0


def test_pinned_tickets_on_a_full_engine_wait():
    admission = frontier(1, max_sequences=2)
    admission.offer([*tickets(0), *pinned(-3, -2, -1)])
    assert ids(admission.admit(V0)) == ["t-3", "t-2"]
    admission.finish_sample("t-3")
    assert ids(admission.admit(V0)) == ["t-1", "t0"]  # the frontier itself asks for no room


def test_admit_without_weights_admits_nothing():
    admission = frontier(2)
    admission.offer(tickets(1))
    assert admission.admit(None) == []
    assert ids(admission.waiting) == ["t1"]


def test_tickets_for_newer_weights_wait_and_block_nobody():
    admission = frontier(2, max_sequences=4)
    admission.offer([*tickets(1, min_version=V1), *tickets(2, 3)])
    assert ids(admission.admit(V0)) == ["t2", "t3"]
    finish(admission, tickets(2)[0])
    assert ids(admission.admit(V0)) == []
    assert admission.num_to_claim() == 0  # the one in hand has the slot when its weights are here
    assert ids(admission.admit(V1)) == ["t1"]


def test_min_version_of_an_abandoned_future_is_met_by_a_higher_incarnation():
    admission = frontier(1)
    admission.offer(tickets(1, min_version=Version(incarnation=0, step=57)))
    assert ids(admission.admit(Version(incarnation=1, step=50))) == ["t1"]


def test_offer_twice_is_refused():
    admission = frontier(1)
    admission.offer(tickets(1, 2))
    admission.admit(V0)
    for ticket in tickets(1, 2):
        with pytest.raises(ValueError, match="offered twice"):
            admission.offer([ticket])


def test_frontier_of_which_only_the_store_has_the_width_claims_and_admits_as_fifo_does():
    claims = []
    for admission in (frontier(0, 5), Admission("fifo", max_sequences=5, samples_per_group=2)):
        claims.append([admission.num_to_claim()])
        admission.offer(tickets(1, 2, 3, 4))
        admitted = admission.admit(V0)
        claims[-1] += [ids(admitted), admission.num_to_claim(), admission.finish_sample("t1"), admission.num_to_claim()]
    assert claims[0] == claims[1] == [3, ["t1", "t2", "t3"], 0, False, 0]


def test_remove_frees_the_slot():
    admission = frontier(1)
    admission.offer(tickets(1, 2))
    admission.admit(V0)
    admission.remove("t1")
    admission.remove("nobody")
    assert ids(admission.admit(V0)) == ["t2"]
    with pytest.raises(KeyError):
        admission.finish_sample("t1")


@pytest.mark.parametrize("bounds", [{"width": 1, "max_sequences": 0}, {"width": -1, "max_sequences": 4}])
def test_bounds_below_one_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds"):
        Admission("frontier", samples_per_group=2, **bounds)


@settings(deadline=None)
@given(
    width=st.integers(1, 5),
    num_samples=st.integers(1, 4),
    orders=st.lists(st.integers(0, 1000), min_size=1, max_size=25, unique=True),
    data=st.data(),
)
def test_frontier_under_random_arrivals_and_completions_is_equation_5(width, num_samples, orders, data):
    """The oracle: F is the F_w lowest orders of O, where a group once in F stays until it has completed.

    Tickets arrive in the store's order (lowest first among those known), requests end at random.
    """
    admission = Admission("frontier", width=width, max_sequences=10_000, samples_per_group=num_samples)
    not_arrived = [make_ticket(f"t{o}", order=o, num_samples=num_samples) for o in orders]
    left = {t.id: num_samples for t in not_arrived}
    arrived: list[Ticket] = []
    in_f: set[str] = set()
    completed: list[str] = []
    while len(completed) < len(orders):
        if not_arrived and (not in_f or data.draw(st.booleans(), label="arrive")):
            some = not_arrived[: data.draw(st.integers(1, len(not_arrived)), label="number")]
            not_arrived = not_arrived[len(some) :]
            arrived += some
            admission.offer(some)
        deferred = sorted((t for t in arrived if t.id not in in_f and left[t.id]), key=lambda t: t.order)
        want = [t.id for t in deferred[: width - len(in_f)]]
        assert ids(admission.admit(V0)) == want
        in_f |= set(want)
        assert set(ids(admission.in_service)) == in_f
        assert len(in_f) <= width
        if in_f:
            one = data.draw(st.sampled_from(sorted(in_f)), label="ends")
            admission.finish_sample(one)
            left[one] -= 1
            if not left[one]:
                in_f.remove(one)
                completed.append(one)
    assert sorted(completed) == sorted(t.id for t in arrived)
    assert admission.waiting == admission.in_service == []


@dataclasses.dataclass
class Store:
    """Deferred tickets, handed out lowest order first."""

    deferred: list[Ticket]

    def claim(self, limit: int) -> list[Ticket]:
        self.deferred.sort(key=lambda t: t.order)
        taken, self.deferred = self.deferred[:limit], self.deferred[limit:]
        return taken


@settings(deadline=None)
@given(
    policy=st.sampled_from(["fifo", "frontier", "window"]),
    width=st.integers(1, 4),
    max_sequences=st.integers(1, 9),
    kinds=st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=25),
    data=st.data(),
)
def test_claiming_what_is_asked_for_serves_every_ticket_once(policy, width, max_sequences, kinds, data):
    """With evaluations, tickets for newer weights and random completions: nothing lost, nothing twice."""
    store = Store(
        [
            make_ticket(
                f"t{i}",
                order=i if is_train else i - 1000,
                kind="train" if is_train else "eval",
                num_samples=2 if is_train else 1,
                min_version=Version(incarnation=0, step=step),
            )
            for i, (is_train, step) in enumerate(kinds)
        ]
    )
    admission = Admission(policy, width=width, max_sequences=max_sequences, samples_per_group=2)
    started: list[Ticket] = []
    step = 0
    for _ in range(10_000):
        version = Version(incarnation=0, step=step)
        admission.offer(store.claim(admission.num_to_claim()))
        new = admission.admit(version)
        assert all(t.min_version <= version for t in new)
        started += new
        trains = [t for t in admission.in_service if t.kind == "train"]
        assert policy != "frontier" or len(trains) <= width
        # A group may begin in the last free place.
        assert policy == "frontier" or admission.num_sequences <= max_sequences + 1
        running = admission.in_service
        if running:
            admission.finish_sample(data.draw(st.sampled_from([t.id for t in running])))
        elif store.deferred or admission.waiting:
            assert step < 2, "stuck"
            step += 1
        else:
            break
    assert sorted(t.id for t in started) == sorted(f"t{i}" for i in range(len(kinds)))


@pytest.mark.parametrize(("environment", "in_flight"), [("guess", 12), ("", 4)])
def test_episodes_in_their_environments_leave_the_engines_places_to_more(environment, in_flight):
    prompts = PromptsConfig(environment=environment) if environment else PromptsConfig()
    config = Config(
        preset="p",
        actor=ActorConfig(max_num_seqs=4),
        admission=AdmissionConfig(policy="fifo"),
        environments=EnvironmentsConfig(max_in_flight=12),
        prompts=prompts,
        rounds=RoundsConfig(samples_per_group=2),
    )
    admission = Admission.of(config)
    assert admission.capacity == in_flight and admission.num_to_claim() == in_flight // 2
    admission.offer(tickets(*range(9), num_samples=2))
    admission.admit(V0)
    assert admission.num_sequences == in_flight and admission.num_to_claim() == 0


def test_bound_on_episodes_below_the_engines_is_none():
    config = Config(
        preset="p", environments=EnvironmentsConfig(max_in_flight=1), prompts=PromptsConfig(environment="guess")
    )
    assert Admission.of(config).capacity == config.actor.max_num_seqs


def test_several_engines_share_a_window_by_the_episodes_that_each_has_at_once():
    admission = Admission("window", max_sequences=4, samples_per_group=2, sequences=20, max_in_flight=16)
    admission.rebalance({16: 2})
    assert admission.num_free == 10
