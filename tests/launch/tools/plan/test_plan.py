"""The planner's command line, its input, the search and the pool of tickets."""

import dataclasses
import json
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.store.open import SqliteStore
from configs.sections import AdmissionConfig
from launch.tools.plan import profile as plan_profile
from launch.tools.plan import search as plan_search
from launch.tools.plan.plan_tables import helpers_line, plot_search
from launch.tools.plan.profile import HelperProfile, LearnerProfile
from launch.tools.plan.search import Grid, apply, search
from launch.tools.plan.sim.event_queue import Lag
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.sim.tickets import TicketPool, group_id
from launch.tools.plan.workload import LengthProfile, Lengths
from tests.bridge.factories import make_ticket
from tests.launch.commands import call_each
from tests.launch.tools.plan.setup import by_rounds, by_window, profile_of

pytestmark = pytest.mark.heavy

PROFILE = dataclasses.asdict(profile_of())


def plan(*args, path):
    path.write_text(json.dumps(PROFILE))
    command = [sys.executable, "-m", "launch.tools.plan", *args, f"--profile={path}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_line_prints_a_run_and_writes_its_numbers(tmp_path):
    out = tmp_path / "out.json"
    done = plan("--config=cgp:tiny", f"--json={out}", path=tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    assert "waiting ratio" in done.stdout
    numbers = json.loads(out.read_text())
    assert numbers["num_steps"] == 8  # four rounds of 32 groups, 16 an update
    assert len(numbers["rounds"]) == 4


def test_line_says_whether_helpers_pay():
    profile = profile_of(num_engines=2, helpers=HelperProfile(hand_over_s=1.0))
    config = by_rounds(R=4, U=4)
    helped, alone = (
        simulate(config, dataclasses.replace(profile, helpers=h), num_updates=4) for h in (profile.helpers, None)
    )
    ratio = f"({alone.step_s / helped.step_s:.2f} times as fast)"
    assert "chips pay: " in helpers_line(helped, alone) and ratio in helpers_line(helped, alone)
    assert "chips do not pay: " in helpers_line(alone, helped)


@pytest.mark.heavy
def test_command_line_searches_prints_and_plots(tmp_path):
    done = plan(
        "--config=pipelinerl:tiny",
        "--search",
        "--chips=4",
        "--max_lag=2",
        "--search_alpha=0,1",
        "--updates=6",
        f"--plot={tmp_path / 'plot.png'}",
        f"--json={tmp_path / 'out.json'}",
        path=tmp_path / "p.json",
    )
    assert done.returncode == 0, done.stderr
    assert "alpha 1" in done.stdout
    assert "closed formulas at lag 2: " in done.stdout and "conventional RL with 3 steps per round" in done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 3 * 3 * 2  # splits 1..3 of 4 chips, three engine sizes, two ratios
    assert all(r["choice"]["num_engines"] + r["choice"]["num_learner_chips"] == 4 for r in rows)


REFUSED = [
    (["--config=cgp"], None, "set --profile=FILE.json"),
    (["--config=cgp", "--profile=/nowhere.json"], None, "no profile '/nowhere.json'"),
    ([], {}, "--config: not set"),
    (["--config=cgp", "--chips=8"], {}, "--chips requires --search"),
    (["--config=cgp", "--plot=a.png"], {}, "--plot requires --search"),
    (["--config=cgp"], {"store": {"group_s": 1, "groups_s": 2}}, "has no field 'groups_s'"),
    (["--config=cgp"], {"store": {"group_s": -1}}, "store.group_s must be finite and >= 0"),
    (["--config=cgp"], {"network": {"weights_bytes": 0}}, "network.weights_bytes must be >= 1"),
    (["--config=cgp"], {"num_engine": 2}, "has no field 'num_engine'"),
    (["--config=cgp"], {"num_engines": 0}, "num_engines must be >= 1"),
    (["--config=cgp"], {"engine_by_size": {"1": PROFILE["engine"]}}, "engine_by_size: expected sizes >= 1 other than"),
    (["--config=cgp"], {"engine_by_size": {"2": {"speed": 1}}}, "engine_by_size has no field 'speed'"),
    (["--config=cgp"], {"learner": {"seconds_per_token": "slow"}}, "learner.seconds_per_token"),
    (["--config=cgp"], {"learner": {}}, "seconds_per_token"),
    (["--config=cgp", "--config.rounds.groups=3"], {}, "rounds has groups_per_round"),
    (["--config=cgp", "--search", "--search_alpha=1"], {}, "--search_alpha requires"),
    (["--config=pipelinerl", "--search", "--search_alpha=x"], {}, "--search_alpha: expected a list"),
    (["--config=pipelinerl", "--search", "--chips=1"], {}, "--chips=1 is too few"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """How each line of `REFUSED` ended, under the profile with its change."""
    lines = []
    for args, change, _ in REFUSED:
        path = tmp_path_factory.mktemp("profile") / "p.json"
        path.write_text(json.dumps(PROFILE | (change or {})))
        lines.append(args if change is None else [*args, f"--profile={path}"])
    return call_each("launch.tools.plan.cli", lines)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[says for _, _, says in REFUSED])
def test_command_line_refuses_in_one_line(refused, number):
    done = refused[number]
    assert done.code == 2 and done.out == ""
    (line,) = done.err.strip().splitlines()
    assert line.startswith("error: ") and REFUSED[number][2] in line


def test_command_line_says_what_gives_out_first_and_what_to_change(tmp_path):
    out = tmp_path / "out.json"
    profile = PROFILE | {"store": {"group_s": 1.0, "max_connections": 100}, "network": {"weights_bytes": 1000}}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    line = ["--config=cgp:tiny", f"--json={out}", f"--profile={tmp_path / 'p.json'}"]
    (done,) = call_each("launch.tools.plan.cli", [line])
    assert done.code == 0, done.err
    # A group is 8 x 101 tokens of 0.01 s: the learner takes 8.08 s for what takes the store 1 s.
    assert "first bottleneck: learner compute, at 0.124 groups/s" in done.out
    assert "remedy: more learner chips (num_learner_chips)" in done.out
    numbers = json.loads(out.read_text())
    shares = {p["name"]: p["share"] for p in numbers["parts"]}
    assert shares["store's connections"] == 0.14
    assert shares["store"] == pytest.approx(shares["learner compute"] / 8.08, rel=0.01)
    assert numbers["limit"]["part"]["name"] == "learner compute"


def test_profile_goes_through_json_unchanged():
    profile = profile_of(response_tokens=LengthProfile(kind="groups", groups=((1, 2), (3,))))
    assert plan_profile.from_dict(json.loads(json.dumps(dataclasses.asdict(profile)))) == profile


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(kind="lognormal"), "median"),
        (dict(kind="uniform"), "max_tokens"),
        (dict(kind="samples"), "samples"),
        (dict(kind="groups", groups=((),)), "groups"),
        (dict(kind="rollpacker", max_tokens=9, prompt_share=2.0), "prompt_share"),
    ],
)
def test_lengths_without_their_numbers_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        LengthProfile(**fields)


@pytest.mark.parametrize("max_tokens", [8192, 16384, 32768])
def test_rollpacker_lengths_have_the_papers_shape(max_tokens):
    profile = LengthProfile(kind="rollpacker", max_tokens=max_tokens)
    drawn = Lengths(profile, profile, seed=0)
    tokens = np.array([drawn.responses(p, 8) for p in range(4000)])
    # Figure 2: the longest response, of 16k, is 25 to 32 times the median one; the 75th percentile is 755 to 1.1k.
    assert 25 <= 16384 / np.median(tokens) <= 32
    assert 755 <= np.percentile(tokens, 75) <= 1100
    # One in a batch of 1024 is cut; here are 31.
    assert tokens.max() == max_tokens and 10 <= np.sum(tokens == max_tokens) <= 70
    # Prompts are consistently long or short: of the logarithm's variance 0.8 is between them, but for the tail.
    logs = np.log(tokens)
    assert logs.mean(axis=1).var() / logs.var() == pytest.approx(0.8 + 0.2 / 8, abs=0.03)


def test_rollpacker_lengths_under_a_short_maximum_are_cut_and_no_shorter_before_it():
    short, long = (LengthProfile(kind="rollpacker", max_tokens=n) for n in (700, 16384))
    of_short, of_long = ([Lengths(p, p, seed=1).responses(n, 8) for n in range(500)] for p in (short, long))
    assert np.max(of_short) == 700 and np.median(of_short) == pytest.approx(np.median(of_long))


def test_lengths_of_a_problem_are_the_same_whenever_asked():
    profile = LengthProfile(kind="lognormal", median=100, sigma=1, prompt_share=0.5)
    a, b = Lengths(profile, profile, seed=3), Lengths(profile, profile, seed=3)
    assert [a.responses(p, 4) for p in (0, 1, 2)] == [b.responses(p, 4) for p in (2, 1, 0)][::-1]
    assert a.responses(1, 4) != a.responses(1, 4, attempt=1)


def test_replayed_groups_have_their_lengths():
    profile = LengthProfile(kind="groups", groups=((1, 2), (3, 4)))
    drawn = Lengths(profile, profile, seed=0)
    assert [drawn.responses(p, 3) for p in range(3)] == [[1, 2, 1], [3, 4, 3], [1, 2, 1]]


def test_lag_percentiles_weigh_what_there_is_of_each():
    lag = Lag.of({0: 94, 3: 2, 7: 4})
    assert (lag.mean, lag.p95, lag.max) == (pytest.approx(0.34), 3, 7)
    assert Lag.of({}) == Lag(mean=0, p95=0, max=0)


class _Store:
    """The real store, asked as actors ask it: every engine is an actor, and a single request has its own ticket."""

    def __init__(self, folder, *, num_engines, width):
        self._store = SqliteStore(f"{folder}/store.sqlite")
        self._among, self._width = num_engines, width

    def put(self, tickets):
        self._store.put_tickets(tickets)

    def claim(self, engine, limit, part=None, served=()):
        actor = f"engine-{engine}"
        tickets = self._store.claim(
            actor, limit=limit, lease_s=1e6, width=self._width, among=self._among, part=part, served=list(served)
        )
        return [t.id for t in tickets]

    def withdraw(self, id_):
        self._store.withdraw([id_])

    def close(self):
        self._store.close()


@given(
    width=st.one_of(st.none(), st.integers(1, 4)),
    num_engines=st.integers(1, 4),
    part=st.none() | st.integers(1, 2),
    orders=st.permutations(range(30)),
    moves=st.lists(
        st.tuples(st.sampled_from(["put", "put", "claim", "claim", "serve", "withdraw"]), st.integers(0, 99)),
        min_size=15,
        max_size=60,
    ),
)
def test_pool_hands_out_what_the_store_would(width, num_engines, part, orders, moves):
    with tempfile.TemporaryDirectory() as folder:
        store = _Store(folder, num_engines=num_engines, width=width)
        pool = TicketPool(num_engines=num_engines, width=width, by_sample=True)
        waiting, held, orders = [], {}, list(orders)
        for what, n in moves:
            if what == "put" and orders:  # not always the highest order yet: a group may be offered again
                order = orders.pop()
                ticket = make_ticket(f"t{order}", order=order, num_samples=1, num_requests=1 + n % 3)
                ids = pool.part_ids(ticket)
                store.put(dataclasses.replace(ticket, id=i, num_requests=1) for i in ids)
                pool.put(ticket)
                waiting += ids
            elif what == "claim":
                engine, limit = n % num_engines, n // num_engines % 8
                wanted = store.claim(engine, limit, part)
                assert [t.id for t in pool.claim(engine, limit, part)] == wanted
                waiting = [i for i in waiting if i not in wanted]
                held |= dict.fromkeys(wanted, engine)
            elif what == "serve" and held:
                id_ = sorted(held)[n % len(held)]
                engine = held.pop(id_)
                store.claim(engine, 0, served=[id_])
                assert pool.end(id_) == engine
                assert pool.end(id_) is None
            elif what == "withdraw" and (waiting or held):
                id_ = sorted([*waiting, *held])[n % (len(waiting) + len(held))]
                store.withdraw(id_)
                assert pool.end(id_) == held.pop(id_, None)
                waiting = [i for i in waiting if i != id_]
            assert pool.has_offer == any_is_in_the_frontier(width, waiting, held)
        store.close()


def any_is_in_the_frontier(width, waiting, held):
    """Whether some ticket could be claimed if shares were no matter, worked out from the ids."""

    def order(id_):
        return int(group_id(id_)[1:])

    serving = {order(i) for i in held}
    return any(width is None or order(i) in serving or len(serving) < width for i in waiting)


@pytest.mark.heavy
def test_search_finds_the_split_that_balances_generation_and_training(tmp_path):
    # A token costs an engine 1/64 s and the learner 1/32 s: of 9 chips 3 generate, 6 train; then both are busy.
    engine = dataclasses.replace(profile_of().engine, running=(64.0,), tokens_per_s=(64.0,))
    profile = profile_of(engine=engine, learner=LearnerProfile(seconds_per_token=2 / 64 * 100 / 101))
    # All responses are of one length, so groups come in waves: the learner's queue must hold one.
    config = by_window(U=16, admission=dict(width=256, queue_groups=256))
    grid = Grid(num_chips=9, engines=(1, 2, 3, 4, 6, 8), widths=(256,), max_num_seqs=(64,))
    found = search(config, profile, grid, max_lag=None, num_updates=30, warmup_updates=40)
    assert found[0].choice.num_engines == 3
    assert found[0].outcome.tokens_per_s == pytest.approx(3 * 64, rel=0.05)
    plot_search(found, tmp_path / "plot.png", max_lag=4)
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_search_tries_engines_of_all_sizes_in_the_chips_that_there_are():
    """Two chips hold more sequences than twice one's, at three times the speed."""
    small = dataclasses.replace(profile_of().engine, running=(1.0,), tokens_per_s=(100.0,), max_num_seqs=8)
    large = dataclasses.replace(small, tokens_per_s=(300.0,), max_num_seqs=64)
    profile = profile_of(
        engine=small, engine_by_size={2: large, 9: large}, learner=LearnerProfile(seconds_per_token=1e-6)
    )
    found = search(by_rounds(), profile, Grid(num_chips=5), max_lag=None, num_updates=4)
    tried = {(t.choice.chips_per_engine, t.choice.num_engines, t.choice.num_learner_chips) for t in found}
    assert tried == {(1, 1, 4), (1, 2, 3), (1, 3, 2), (1, 4, 1), (2, 1, 3), (2, 2, 1)}
    assert (found[0].choice.chips_per_engine, found[0].choice.num_engines) == (2, 2)
    _, hardware = apply(by_rounds(), profile, found[0].choice)
    assert hardware.engine.tokens_per_s == (300.0,) and hardware.chips_per_engine == 2
    assert hardware.num_chips == 5


def test_search_puts_what_keeps_the_bound_first():
    config = by_window(U=2, admission=dict(width=8))
    profile = profile_of(learner=LearnerProfile(seconds_per_token=0.05))
    grid = Grid(num_chips=2, async_ratios=(0.0, 1.0, 4.0), max_num_seqs=(64,))
    found = search(config, profile, grid, max_lag=1, num_updates=20, warmup_updates=10)
    assert [t.within_bound for t in found] == [True, True, False]
    assert [t.choice.async_ratio for t in found] == [1.0, 0.0, 4.0]
    assert all(t.outcome.group_lag.max <= 1 for t in found[:2])


def test_search_with_nothing_within_the_bound_ranks_by_lag():
    config = by_window(U=2, admission=dict(width=8))
    grid = Grid(num_chips=2, async_ratios=(2.0, 0.5, 1.0), max_num_seqs=(64,))
    found = search(config, profile_of(), grid, max_lag=0, num_updates=20, warmup_updates=10)
    assert not any(t.within_bound for t in found)
    lags = [t.outcome.group_lag.max for t in found]
    assert lags == sorted(lags) and lags[0] < lags[-1]
    # Generation is what takes long, so the faster ones are those with more lag.
    assert found[0].outcome.samples_per_s < found[-1].outcome.samples_per_s


def test_search_leaves_out_ratios_that_the_lag_bound_makes_equal():
    config = by_window(U=2, rounds=dict(max_lag_steps=2), admission=dict(width=8))
    choices = Grid(num_chips=2, max_num_seqs=(64,)).choices(config, profile_of())
    assert [c.async_ratio for c in choices] == [0.0, 0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="4 is above rounds.max_lag_steps=2"):
        list(Grid(num_chips=2, async_ratios=(1.0, 4.0)).choices(config, profile_of()))


@pytest.mark.parametrize(("every", "ratios"), [(2, [0.5, 1.0, 2.0, 4.0, 8.0]), (4, [4.0, 8.0]), (20, [19.0])])
def test_search_leaves_out_ratios_below_the_lag_right_before_a_publish(every, ratios):
    config, profile = by_window(every_n_steps=every), profile_of()
    choices = list(Grid(num_chips=2, max_num_seqs=(64,)).choices(config, profile))
    assert [apply(config, profile, choice)[0].admission.async_ratio for choice in choices] == ratios


def test_search_warms_each_choice_up_for_its_own_window(monkeypatch):
    asked = {}

    def spy(config, profile, *, num_updates, warmup_updates, seed):
        asked[config.admission_width] = warmup_updates
        return simulate(config, profile, num_updates=num_updates, warmup_updates=0, seed=seed)

    monkeypatch.setattr(plan_search, "simulate", spy)
    config = by_window(U=2, admission=dict(width=8))
    grid = Grid(num_chips=2, widths=(4, 20), max_num_seqs=(64,))
    search(config, profile_of(), grid, max_lag=None, num_updates=2)
    assert asked == {4: 6, 20: 22}  # twice the width and the backlog, in updates of two groups


def test_search_puts_more_tokens_a_second_before_more_samples(monkeypatch):
    # The second choice leaves the long responses behind: more samples a second, and fewer tokens.
    real = simulate(by_window(U=2, admission=dict(width=8)), profile_of(), num_updates=4)
    rates = {0.0: (10.0, 1000.0), 1.0: (20.0, 900.0)}

    def rated(config, profile, **_):
        samples_per_s, tokens_per_s = rates[config.admission.async_ratio]
        return dataclasses.replace(real, samples_per_s=samples_per_s, tokens_per_s=tokens_per_s)

    monkeypatch.setattr(plan_search, "simulate", rated)
    grid = Grid(num_chips=2, async_ratios=(1.0, 0.0), max_num_seqs=(64,))
    found = search(by_window(U=2, admission=dict(width=8)), profile_of(), grid, max_lag=None, num_updates=4)
    assert [t.choice.async_ratio for t in found] == [0.0, 1.0]


def test_a_choice_replaces_the_width_by_the_ratio():
    config = by_window(U=2, admission=dict(width=8))
    (choice,) = Grid(num_chips=2, async_ratios=(1.0,), max_num_seqs=(8,)).choices(config, profile_of())
    changed, profile = apply(config, profile_of(), choice)
    assert changed.admission == AdmissionConfig(policy="window", async_ratio=1.0)
    assert changed.admission_width == 4
    assert profile.engine.max_num_seqs == 8


def test_grid_refuses_what_the_config_has_no_use_for():
    with pytest.raises(ValueError, match="search_width has no effect"):
        list(Grid(num_chips=4, widths=(2,)).choices(by_rounds(), profile_of()))
    with pytest.raises(ValueError, match="search_engines"):
        list(Grid(num_chips=4, engines=(4,)).choices(by_rounds(), profile_of()))
