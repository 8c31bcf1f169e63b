import itertools

import pytest

from launch.report.run_data import read_run
from launch.report.timeline.events import Event, processes, read_process
from launch.report.timeline.faults import find_faults
from launch.report.timeline.rounds import choose_rounds, find_rounds
from launch.report.timeline.spans import KINDS, MAX_SPANS, Timeline, read_timeline
from tests.launch.report.folder import START_S, STEP_S, make_folder


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


def test_every_process_has_a_track_in_every_round_with_what_it_did(killed):
    rounds = rounds_of(killed)
    assert [(r.first_step, r.last_step) for r in rounds] == [(1 + 2 * i, 2 + 2 * i) for i in range(6)]
    timeline, _ = read_timeline(killed, rounds)
    for i in range(len(rounds)):
        got = timeline.drawn(i, run_end_s=START_S + 30)
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
    timeline, _ = read_timeline(killed, rounds)
    died_s = START_S + STEP_S * 6 + 1.0
    index = next(i for i, r in enumerate(rounds) if r.begin_s <= died_s <= r.end_s)
    got = timeline.drawn(index, run_end_s=START_S + 30)
    alive = {t["name"]: t["alive"] for t in got["tracks"]}
    (_, died), (came, _) = alive["actor-0"]
    assert died < died_s - rounds[index].begin_s < came < alive["actor-1"][0][1]
    assert any(text.startswith("actor-0-r1: start engine") for text in got["spans"][5])
    assert any("killed by signal 9" in text for text in got["marks"][2])


def test_a_round_of_very_many_spans_keeps_the_longest_and_says_how_many_are_left_out():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    timeline = Timeline([one])
    spans = [span("rollout", i * 1e-3, i * 1e-3 + (1 if i == 7 else 1e-4)) for i in range(MAX_SPANS + 100)]
    list(timeline.add("actor-0", spans))
    got = timeline.drawn(0, run_end_s=10)
    assert got["left_out"] == 100 and len(got["spans"][0]) == MAX_SPANS
    assert 0.007 in got["spans"][0]


def test_overlapping_requests_have_lanes_of_their_own_and_evaluations_another_kind():
    (one,) = find_rounds([instant("issue", 0, step=0), *updates(10)], updates_per_round=1, by_rounds=True)
    timeline = Timeline([one])
    list(
        timeline.add(
            "actor-0", [span("rollout", 1, 5, tid=4), span("rollout", 2, 6, tid=9, kind="eval"), span("prefetch", 2, 3)]
        )
    )
    left, _, top, bottom, kind, _ = timeline.drawn(0, run_end_s=10)["spans"]
    assert sorted(KINDS[k] for k in kind) == ["evaluation", "prefetch", "rollout"]
    boxes = sorted(zip(top, bottom, strict=True))
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(boxes))


def test_processes_are_in_natural_order_with_the_learner_first(tmp_path):
    (tmp_path / "events").mkdir()
    for name in ("actor-10", "actor-2", "learner", "actor-2-r1", "supervisor"):
        (tmp_path / "events" / f"{name}.jsonl").write_text('{"torn')
    assert processes(tmp_path) == ["learner", "actor-2", "actor-2-r1", "actor-10", "supervisor"]
    assert list(read_process(tmp_path, "actor-2")) == []


def test_faults_are_told_in_order_with_restarts_and_what_is_counted_only(killed):
    _, instants = read_timeline(killed, rounds_of(killed))
    instants["learner"].append(instant("restored", START_S + 999, incarnation=2, step=8))
    instants["actor-1"].append(instant("refused", START_S + 2, reason="\x1b[31mhash"))
    faults = find_faults(read_run(killed), instants)
    assert [(f.process, f.what) for f in faults.happened] == [
        ("actor-1", "a version of the weights was refused"),
        ("supervisor", "actor-0 was killed by signal 9: ; starting it again (1)"),
        ("learner", "the learner went on from its checkpoint"),
    ]
    assert "\x1b" not in faults.happened[0].detail
    assert faults.restarts == {"actor-0": 1, "learner": 2}
    assert faults.counts == [("verifiers that failed or hung", 2.0)]


def test_what_repeats_itself_is_told_once_with_how_often_it_was(killed):
    again = [instant("dropped", START_S + i, ticket=f"t{i}") for i in (1, 2, 3, 7)]
    between = instant("fence", START_S + 5, actor="actor-0")
    faults = find_faults(read_run(killed), {"actor-1": again, "learner": [between]})
    assert [(f.times, f.detail) for f in faults.happened] == [(3, "ticket t1"), (1, "actor actor-0"), (1, "ticket t7")]
    assert (faults.num_happened, faults.num_shown) == (5, 5) and faults.happened[0].last_s == START_S + 3
