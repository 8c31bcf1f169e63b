import itertools
import json

import pytest

from launch.tools.report.run_data import json_for_script, read_run
from launch.tools.report.timeline_events import (
    Event,
    ProcessLifetime,
    known_of,
    processes,
    read_process,
    supervisor_message,
)
from launch.tools.report.timeline_rounds import choose_rounds, find_faults, find_rounds, open_round
from launch.tools.report.timeline_spans import KINDS, MAX_OF_TRACK, RoundTimeline, read_rounds
from tests.launch.tools.report.folder import START_S, STEP_S, make_folder


def span(name, start, end, tid=0, **args):
    return Event(name=name, ph="X", ts=start * 1e6, dur=(end - start) * 1e6, tid=tid, args=args)


def instant(name, at, **args):
    return Event(name=name, ph="i", ts=at * 1e6, args=args)


def updates(*ends, first=1):
    return [span("apply", end - 0.1, end, step=first + i) for i, end in enumerate(ends)]


def test_a_round_goes_from_its_first_ticket_to_its_weights_being_out():
    learner = [
        instant("restored", 0, incarnation=0), instant("issue", 1, step=0), *updates(5, 7),
        span("publish", 7, 8, tid=1, step=2), instant("issue", 9, step=2), instant("issue", 10, step=2),
        *updates(12, 15, first=3),
        span("publish", 15, 15.5, tid=1, step=4), *updates(20, first=5),
    ]  # fmt: skip
    got = find_rounds(sorted(learner, key=lambda e: e.ts), updates_per_round=2, by_rounds=True)
    assert [(r.number, r.first_step, r.last_step, r.begin_s, r.end_s) for r in got] == [
        (0, 1, 2, 1, 8),
        (1, 3, 4, 9, 15.5),
    ]


def test_a_window_has_no_first_ticket_so_a_round_follows_the_one_before():
    learner = [instant("issue", 1, step=0), *updates(5, 7, 9, 12), instant("issue", 6, step=1)]
    got = find_rounds(sorted(learner, key=lambda e: e.ts), updates_per_round=2, by_rounds=False)
    assert [(r.begin_s, r.end_s) for r in got] == [(1, 7), (7, 12)]


def test_a_round_that_was_trained_again_is_the_last_one():
    learner = [
        instant("restored", 0),
        instant("issue", 1, step=0),
        *updates(5),
        instant("issue", 6, step=1),
        *updates(8, first=2),
    ]
    learner += [instant("restored", 20, incarnation=1), instant("issue", 21, step=1), *updates(25, first=2)]
    got = find_rounds(sorted(learner, key=lambda e: e.ts), updates_per_round=1, by_rounds=True)
    assert [(r.number, r.begin_s, r.end_s) for r in got] == [(0, 1, 5), (1, 21, 25)]


def test_chosen_rounds_have_both_ends_and_the_slowest():
    ends = [10.0 * i + (5.0 if i == 57 else 0.0) for i in range(1, 101)]
    rounds = find_rounds(updates(*ends), updates_per_round=1, by_rounds=False)
    chosen = choose_rounds(rounds, 16)
    assert len(chosen) == 16 and chosen[0] == rounds[0] and chosen[-1] == rounds[-1]
    assert max(rounds, key=lambda r: r.duration_s) in chosen
    assert choose_rounds(rounds[:5], 16) == rounds[:5]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("timeline") / "run", steps=12, killed=True)


def rounds_of(folder):
    learner = sorted(read_process(folder, "learner"), key=lambda e: e.ts)
    return find_rounds(learner, updates_per_round=2, by_rounds=True)


def read(folder, rounds):
    supervisor = read_process(folder, "supervisor")
    timeline = RoundTimeline(rounds, run_end_s=START_S + 30, known=known_of(supervisor))
    return timeline, {name: timeline.add(name, read_process(folder, name)) for name in processes(folder)}


def test_every_process_has_a_track_in_every_round_with_what_it_did(killed):
    rounds = rounds_of(killed)
    assert [(r.first_step, r.last_step) for r in rounds] == [(1 + 2 * i, 2 + 2 * i) for i in range(6)]
    timeline, _ = read(killed, rounds)
    for i in range(len(rounds)):
        got = timeline.drawn(i)
        assert [t["name"] for t in got["tracks"]] == ["learner", "actor-0", "actor-1"]
        left, right, top, bottom, kind, text = got["spans"]
        of_track = {
            t["name"]: {
                KINDS[k] for k, a, b in zip(kind, top, bottom, strict=True) if t["y0"] <= a and b <= t["y1"] + 1e-6
            }
            for t in got["tracks"]
        }
        assert {"train", "optimizer step", "publish", "idle"} <= of_track["learner"]
        assert {"rollout", "reward", "pause"} <= of_track["actor-1"]
        assert all(a <= b for a, b in zip(left, right, strict=True)) and len(text) == len(left)
        assert max(right) < got["seconds"] * 1.2 and min(left) > -got["seconds"] * 0.2


def test_a_killed_actors_track_ends_where_it_died_and_says_so(killed):
    rounds = rounds_of(killed)
    timeline, _ = read(killed, rounds)
    died_s = START_S + STEP_S * 6 + 1.0
    index = next(i for i, r in enumerate(rounds) if r.begin_s <= died_s <= r.end_s)
    got = timeline.drawn(index)
    alive = {t["name"]: t["alive"] for t in got["tracks"]}
    (_, died), (came, _) = alive["actor-0"]
    told_s = died_s + 0.2 - rounds[index].begin_s
    assert died == pytest.approx(told_s, abs=1e-3) and told_s < came < alive["actor-1"][0][1]
    assert any(text.startswith("actor-0-r1: start engine") for text in got["spans"][5])
    assert (
        "actor-0 was killed by signal 9; restarting (restart 1); its last line was: weights served" in got["marks"][2]
    )


def test_a_round_of_very_many_spans_keeps_the_longest_and_says_how_many_are_left_out():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    timeline = RoundTimeline([one], run_end_s=10)
    spans = [span("rollout", i * 1e-3, i * 1e-3 + (1 if i == 7 else 1e-4)) for i in range(MAX_OF_TRACK + 100)]
    timeline.add("actor-0", spans)
    got = timeline.drawn(0)
    assert got["left_out"] == 100 and len(got["spans"][0]) == MAX_OF_TRACK
    assert 0.007 in got["spans"][0]


def test_overlapping_requests_have_lanes_of_their_own_and_evaluations_another_kind():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    timeline = RoundTimeline([one], run_end_s=10)
    timeline.add(
        "actor-0", [span("rollout", 1, 5, tid=4), span("rollout", 2, 6, tid=9, kind="eval"), span("prefetch", 2, 3)]
    )
    left, _, top, bottom, kind, _ = timeline.drawn(0)["spans"]
    assert sorted(KINDS[k] for k in kind) == ["evaluation", "prefetch", "rollout"]
    boxes = sorted(zip(top, bottom, strict=True))
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(boxes))


def test_learner_that_saves_or_probes_is_not_drawn_as_waiting_for_groups():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    timeline = RoundTimeline([one], run_end_s=10)
    did = [
        instant("restored", 0),
        span("train", 2, 4, compiled=True),
        span("probe", 4, 6),
        span("publish", 6, 8, tid=1),
    ]
    timeline.add("learner", [*did, *updates(10)])
    assert sorted(kinds(timeline.drawn(0), "learner"), key=lambda k: k[1:]) == [
        ("idle", 0, 2), ("compilation", 2, 4), ("aside", 4, 6), ("publish", 6, 8), ("idle", 6, 9.9),
        ("optimizer step", 9.9, 10),
    ]  # fmt: skip


def test_learner_is_not_drawn_as_waiting_while_spans_that_are_left_out_ran():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    timeline = RoundTimeline([one], run_end_s=10)
    timeline.add("learner", [*(span("train", i, i + 1) for i in range(6)), *updates(10)])
    got = timeline.drawn(0, max_of_track=2)
    assert got["left_out"] == 5
    assert [k[1:] for k in kinds(got, "learner") if k[0] == "idle"] == [(6, 9.9)]


def test_learner_that_is_dead_is_not_drawn_as_one_without_work():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(4, 20)], updates_per_round=2, by_rounds=True)
    told = [
        instant("start", 0, process="learner"),
        instant("exit", 6, process="learner", how="was killed by signal 9", signal=9),
    ]
    timeline = RoundTimeline([one], run_end_s=20, known=known_of([*told, instant("start", 12, process="learner")]))
    timeline.add("learner", updates(4, 20))
    assert [k[1:] for k in kinds(timeline.drawn(0), "learner") if k[0] == "idle"] == [(0, 3.9), (4, 6), (12, 19.9)]


def test_processes_are_in_natural_order_with_the_learner_first(tmp_path):
    (tmp_path / "events").mkdir()
    for name in ("actor-10", "actor-2", "learner", "actor-2-r1", "supervisor"):
        (tmp_path / "events" / f"{name}.jsonl").write_text('{"torn')
    assert processes(tmp_path) == ["learner", "actor-2", "actor-2-r1", "actor-10", "supervisor"]
    assert list(read_process(tmp_path, "actor-2")) == []


def test_faults_are_told_in_order_with_restarts_and_what_is_counted_only(killed):
    _, instants = read(killed, rounds_of(killed))
    instants["learner"].append(instant("restored", START_S + 999, incarnation=2, step=8))
    instants["actor-1"].append(instant("refused", START_S + 2, reason="\x1b[31mhash"))
    faults = find_faults(read_run(killed), instants)
    assert [(f.process, f.what) for f in faults.happened] == [
        ("actor-1", "weight version rejected"),
        ("supervisor", "actor-0 was killed by signal 9; restarting (restart 1)"),
        ("learner", "learner resumed from its checkpoint"),
    ]
    assert "\x1b" not in faults.happened[0].detail
    assert faults.happened[1].detail == "its last line was: weights served"
    assert faults.restarts == {"actor-0": 1, "learner": 2}
    assert faults.counts == [("failed or hung verifier calls", 2.0)]


def test_what_repeats_itself_is_told_once_with_how_often_it_was(killed):
    again = [instant("dropped", START_S + i, ticket=f"t{i}") for i in (1, 2, 3, 7)]
    between = instant("fence", START_S + 5, actor="actor-0")
    faults = find_faults(read_run(killed), {"actor-1": again, "learner": [between]})
    assert [(f.times, f.detail) for f in faults.happened] == [(3, "ticket t1"), (1, "actor actor-0"), (1, "ticket t7")]
    assert (faults.num_happened, faults.num_shown) == (5, 5) and faults.happened[0].last_s == START_S + 3


def kinds(drawn, name):
    """What lies in a track, from when to when: (kind, start, end)."""
    (track,) = [t for t in drawn["tracks"] if t["name"] == name]
    return [
        (KINDS[kind], left, right)
        for left, right, top, bottom, kind, _ in zip(*drawn["spans"], strict=True)
        if track["y0"] <= top and bottom <= track["y1"] + 1e-6
    ]


def test_a_run_that_hangs_ends_in_an_open_round_with_what_was_begun_in_it(tmp_path):
    folder = make_folder(tmp_path / "run", steps=8, hangs=True)
    got = read_rounds(read_run(folder), budget_bytes=1_000_000)
    assert [r["open"] for r in got.drawn] == [False, False, False, True] and got.num_rounds == 4
    last = got.drawn[-1]
    begin_s, end_s = STEP_S * 6, STEP_S * 12  # its first ticket, and the last event of all
    assert (last["number"], last["steps"]) == (3, [7, 7])
    assert last["begin"] == pytest.approx(START_S + begin_s) and last["seconds"] == pytest.approx(end_s - begin_s)
    assert [t["name"] for t in last["tracks"]] == ["learner", "actor-0", "actor-1"]
    unfinished = [(left, right) for kind, left, right in kinds(last, "actor-0") if kind == "not finished"]
    assert unfinished == [(STEP_S + 0.1, end_s - begin_s)] * 2  # its lanes
    assert not any("begin" in text for text in last["marks"][2])


def test_a_run_that_hangs_before_its_first_update_has_an_open_round():
    learner = [instant("restored", 5, incarnation=0, step=0), instant("issue", 6, step=0), span("train", 7, 8)]
    got = open_round(learner, updates_per_round=2, by_rounds=True, extent=(1, 30))
    assert got is not None and (got.number, got.first_step, got.last_step) == (0, 1, 0)
    assert (got.begin_s, got.end_s, got.is_open) == (6, 30, True)
    got = open_round([], updates_per_round=2, by_rounds=True, extent=(1, 30))  # of a learner that never came so far
    assert got is not None and (got.begin_s, got.end_s) == (1, 30)


def test_an_open_round_after_a_restart_goes_on_from_the_step_that_was_restored():
    learner = [instant("restored", 0, step=0), instant("issue", 1, step=0), *updates(5, 7, 9)]
    learner += [instant("issue", 7.5, step=2), instant("restored", 20, incarnation=1, step=2)]
    learner = sorted(learner, key=lambda e: e.ts)
    got = open_round(learner, updates_per_round=2, by_rounds=True, extent=(0, 40))
    assert got is not None and (got.number, got.last_step, got.begin_s) == (1, 2, 20)
    learner += [instant("issue", 21, step=2), *updates(25, first=3)]
    got = open_round(learner, updates_per_round=2, by_rounds=True, extent=(0, 40))
    assert got is not None and (got.number, got.last_step, got.begin_s) == (1, 3, 21)
    learner += [*updates(30, first=4), span("publish", 30, 31, tid=1, step=4)]
    got = open_round(learner, updates_per_round=2, by_rounds=True, extent=(0, 40))
    assert got is not None and (got.number, got.last_step, got.begin_s) == (2, 4, 31)
    assert open_round(learner, updates_per_round=2, by_rounds=True, extent=(0, 31)) is None


def test_a_run_that_is_done_has_no_open_round(tmp_path, killed):
    assert not any(r["open"] for r in read_rounds(read_run(killed), budget_bytes=1_000_000).drawn)
    longer = make_folder(tmp_path / "run", steps=8)  # continued: the summary is of the time before
    config = json.loads((longer / "config.json").read_text())
    config["run"]["num_updates"] = 9
    (longer / "config.json").write_text(json.dumps(config))
    assert read_rounds(read_run(longer), budget_bytes=1_000_000).drawn[-1]["open"]


BEGUN = [
    instant("begin", 1, lane=1, ticket="a", kind="train"), instant("begin", 2, lane=2, ticket="b", kind="train"),
    instant("begin", 3, lane=3, ticket="c", kind="eval"), span("rollout", 1, 4, tid=1, ticket="a"),
    instant("begin", 4.5, lane=1, ticket="d", kind="train"), instant("aborted", 5, lane=2, ticket="b"),
]  # fmt: skip


@pytest.mark.parametrize("died_s", [None, 7.0])
def test_what_was_begun_lasts_until_it_is_cut_off_or_its_process_ends(died_s):
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    line = instant("exit", died_s or 0, process="actor-0", how="exited with code 3", signal=0, cause="x")
    known = known_of([instant("start", 0.5, process="actor-0"), *([line] if died_s else [])])
    timeline = RoundTimeline([one], run_end_s=10, known=known)
    assert timeline.add("actor-0", BEGUN) == []
    got = sorted(kinds(timeline.drawn(0), "actor-0"))
    end_s = died_s or 10
    unfinished = [("not finished", 2, 5), ("not finished", 3, end_s), ("not finished", 4.5, end_s)]
    assert got == [*unfinished, ("rollout", 1, 4)]


def test_a_process_that_says_nothing_has_a_track_from_its_start_on():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    got = RoundTimeline([one], run_end_s=10, known=known_of([instant("start", 2, process="actor-0")])).drawn(0)
    assert [(t["name"], t["alive"]) for t in got["tracks"]] == [("actor-0", [[2, 10]])]


SPAN = [span("rollout", 1, 5)]
START = instant("start", 0, process="actor-0")
KILLED = {"how": "was killed by signal 9", "signal": 9, "cause": "no output"}
LIVES = {
    "supervised, silent since": (SPAN, [START], [(0, 100)]),
    "killed, not started again": (SPAN, [START, instant("exit", 6, process="actor-0", **KILLED)], [(0, 6)]),
    "hung": (
        SPAN,
        [START, instant("exit", 60, process="actor-0", how="hung (no heartbeat for 4 s) and was killed")],
        [(0, 60)],
    ),
    "ended with the supervisor": (SPAN, [START, instant("end", 50)], [(0, 50)]),
    "left": ([*SPAN, span("shutdown", 6, 7)], [START], [(0, 7)]),
    "left, started again under its name": (
        [*SPAN, span("shutdown", 6, 7), span("start engine", 9, 20)],
        [START, instant("start", 8, process="actor-0")],
        [(0, 7), (8, 100)],
    ),
    "supervisor was killed and came again": (
        SPAN,
        [START, instant("start", 0, process="learner"), instant("start", 50, process="learner")],
        [(0, 5)],
    ),
    "another's death": (SPAN, [START, instant("exit", 6, process="actor-1", **KILLED)], [(0, 100)]),
    "far, silent since": (SPAN, [], [(1, 5)]),
    "far, in the last round": ([*SPAN, span("rollout", 85, 92)], [], [(1, 100)]),
    "far, left in the last round": ([*SPAN, span("shutdown", 91, 92)], [], [(1, 92)]),
}


@pytest.mark.parametrize("case", LIVES)
def test_a_process_lived_as_long_as_its_supervisor_or_its_events_say(case):
    events, supervisor, lives = LIVES[case]
    lifetime = ProcessLifetime(known_of(supervisor).get("actor-0"))
    for event in events:
        lifetime.add(event)
    assert lifetime.lives(recent_s=90, run_end_s=100) == lives


AGAIN = "; restarting (restart 1)"
TOLD = [
    (
        {
            "how": "was killed by signal 11",
            "signal": 11,
            "cause": "it broke",
            "note": " (after 3 restarts)",
            "then": "!",
        },
        "actor-0 was killed by signal 11 (after 3 restarts)!",
        "its last line was: it broke",
    ),
    (
        {"how": "exited with code 1", "signal": 0, "cause": "ValueError: x", "then": AGAIN},
        "actor-0 exited with code 1: ValueError: x; restarting (restart 1)",
        "",
    ),
    (
        {"how": "hung (no heartbeat for 4 s) and was killed", "then": AGAIN},
        "actor-0 hung (no heartbeat for 4 s) and was killed; restarting (restart 1)",
        "",
    ),
]


@pytest.mark.parametrize(("args", "what", "detail"), TOLD)
def test_of_a_signal_the_last_line_is_no_reason(args, what, detail):
    assert supervisor_message(instant("exit", 0, process="actor-0", **args)) == (what, detail)


@pytest.mark.heavy
def test_rounds_are_within_their_bytes_and_the_open_one_and_the_ends_are_among_them(tmp_path):
    folder = make_folder(tmp_path / "run", steps=60, actors=6, hangs=True)
    for file in folder.glob("events/actor-*.jsonl"):  # as many requests as a large engine serves
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line * (16 if '"ph": "X"' in line else 1) for line in lines))
    whole = read_rounds(read_run(folder), budget_bytes=10**9)
    assert len(whole.drawn) == whole.num_rounds == 30
    for budget in (300_000, 60_000):
        got = read_rounds(read_run(folder), budget_bytes=budget)
        assert len(json_for_script(got.drawn)) <= budget and got.num_rounds == 30
        numbers = [r["number"] for r in got.drawn]
        assert {0, 28, 29} <= set(numbers) and got.drawn[-1]["open"]
    assert all(r["left_out"] for r in got.drawn if not r["open"])


def test_events_that_are_none_of_ours_are_left_out(tmp_path):
    folder = make_folder(tmp_path / "run", steps=4)
    about = {"ph": "X", "ts": START_S * 1e6, "dur": 1}
    damaged = [
        {"name": "apply", **about, "args": {"step": "x"}}, {"name": "apply", **about, "args": {"step": 10**15}},
        {"name": "publish", **about, "args": {"step": None}}, {"name": "issue", **about, "args": {}},
        {"name": "apply", **about, "ts": 1e18, "args": {"step": 2}}, {"name": "apply", **about, "args": [2]},
        {"name": "begin", **about, "ph": "i", "args": {"lane": [1]}}, {"name": "aborted", **about, "args": {}},
        {"name": "restored", **about, "ph": "i", "args": {"incarnation": "many"}},
    ]  # fmt: skip
    with open(folder / "events" / "learner.jsonl", "ab") as file:
        file.write(b"\xff\xfe\n" + "".join(json.dumps(e) + "\n" for e in damaged).encode())
    (folder / "events" / "odd.jsonl").mkdir()
    got = read_rounds(read_run(folder), budget_bytes=1_000_000)
    assert {0, 1} <= {r["number"] for r in got.drawn} and got.faults.restarts == {}
