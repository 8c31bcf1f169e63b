import asyncio
import dataclasses
import json
import select
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from actor.engine_protocol import Sample
from actor.rewards.types import Response
from bridge.rollout_types import Sampling, Task
from configs.schema import Config
from launch.tools.profile_machine.profile_worker import ChildError, RpcProcess, wait_for
from learner.distributed.sharding import make_mesh
from learner.update.train_step import TrainStep
from tests.bench.rig import measure, report
from tests.bench.rig.calibrate import (
    Baseline,
    Calibration,
    baseline_within,
    calibrate_passes,
    measured_ratio,
    wait_and_compute_s,
)
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.measure import measure_profile
from tests.bench.rig.paced_steps import PacedSteps
from tests.bench.rig.replay import HashRewards, ReplayEngine
from tests.bench.rig.rig import Result
from tests.bench.rig.session import Session
from tests.learner.streams import MODEL, config_of, fresh_params, random_groups, steps_of, stream

PROMPTS = [np.array([n // 50, n % 50, 3], np.int32) for n in range(2000)]


def drawn(lengths: Lengths, num_samples: int = 8) -> np.ndarray:
    return np.array([[lengths.tokens(p, i) for i in range(num_samples)] for p in PROMPTS])


def test_lengths_depend_on_prompt_sample_and_seed_only():
    one = Lengths(kind="lognormal", max_tokens=500, median=100)
    assert (drawn(one, 2) == drawn(Lengths(kind="lognormal", max_tokens=500, median=100), 2)).all()
    other = Lengths(kind="lognormal", max_tokens=500, median=100, seed=1)
    assert (drawn(one, 2) != drawn(other, 2)).mean() > 0.9


def test_uniform_lengths_are_uniform():
    counts = np.bincount(drawn(Lengths(kind="uniform", max_tokens=10)).ravel(), minlength=11)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / counts.sum(), 0.1, atol=0.01)


def test_lognormal_lengths_have_the_median_and_the_spreads_asked_for():
    logs = np.log(drawn(Lengths(kind="lognormal", max_tokens=10**7, median=5000, prompt_sigma=0.6, sample_sigma=0.3)))
    np.testing.assert_allclose(np.exp(np.median(logs)), 5000, rtol=0.05)
    np.testing.assert_allclose(logs.std(axis=1, ddof=1).mean(), 0.3, rtol=0.1)
    np.testing.assert_allclose(logs.mean(axis=1).std(), np.sqrt(0.6**2 + 0.3**2 / 8), rtol=0.05)


@pytest.mark.parametrize("ratio", [8, 16, 32])
def test_tail_lengths_have_rollpackers_shape(ratio):
    tokens = drawn(Lengths(kind="tail", max_tokens=4096, max_over_p75=ratio, long_prompts=0.1))
    np.testing.assert_allclose(np.quantile(tokens, 0.75), 4096 / ratio, rtol=0.05)
    assert tokens.max() == 4096
    is_long = (tokens >= 2 * 4096 / ratio - 1).mean(axis=1)
    np.testing.assert_allclose((is_long == 1).mean(), 0.1, atol=0.02)  # consistently long prompts
    assert (is_long < 0.5).mean() > 0.85  # the others' are short but for strays


def test_tail_whose_p75_would_be_a_long_response_is_refused():
    with pytest.raises(ValueError, match="more than 75%"):
        Lengths(kind="tail", max_tokens=100, long_prompts=0.3)


class _Engine:
    version = None
    num_sampled_tokens = 5
    stats = "the engine's"

    def __init__(self) -> None:
        self.asked: list[Sampling] = []
        self.may_swap = asyncio.Event()
        self.num_swaps = 0

    async def sample(self, prompt_tokens: Any, sampling: Sampling, *, request_id: str, priority: int) -> Sample:
        self.asked.append(sampling)
        tokens = np.zeros(sampling.max_tokens, np.int32)
        return Sample(tokens=tokens, logprobs=np.zeros(tokens.size, np.float32), token_versions=(), finish="length")

    async def swap_weights(self, path: Any, manifest: Any) -> Any:
        await self.may_swap.wait()
        self.num_swaps += 1


def test_replay_asks_for_the_drawn_length_and_masks_no_token():
    engine = _Engine()
    lengths = Lengths(kind="uniform", max_tokens=50)
    replay = ReplayEngine(engine, lengths)  # pyright: ignore[reportArgumentType]
    asked = Sampling(max_tokens=40, stop_token_ids=(7,), temperature=0.5)
    samples = [
        asyncio.run(replay.sample(PROMPTS[1], asked, request_id=f"000000003.{index}", priority=3)) for index in range(9)
    ]
    # Short of what the ticket allows it is as if a stop token had come.
    assert [s.finish for s in samples] == ["stop" if s.tokens.size < 40 else "length" for s in samples]
    assert {s.finish for s in samples} == {"stop", "length"}
    assert [s.max_tokens for s in engine.asked] == [min(40, lengths.tokens(PROMPTS[1], i)) for i in range(9)]
    assert {(s.min_tokens, s.ignore_eos, s.stop_token_ids, s.temperature) for s in engine.asked} == {(0, True, (), 0.5)}
    assert replay.stats == "the engine's"


def test_replay_without_lengths_leaves_the_request_alone():
    engine = _Engine()
    asked = Sampling(max_tokens=40, stop_token_ids=(7,))
    replay = ReplayEngine(engine, None)  # pyright: ignore[reportArgumentType]
    asyncio.run(replay.sample(PROMPTS[1], asked, request_id="3.0", priority=3))
    assert engine.asked == [asked]


def test_replay_a_swap_outlives_the_session_that_began_it():
    async def scenario() -> int:
        engine = _Engine()
        replay = ReplayEngine(engine, None)  # pyright: ignore[reportArgumentType]
        swap = asyncio.create_task(replay.swap_weights(None, None))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0)
        swap.cancel()
        await asyncio.wait({swap})
        assert swap.cancelled() and engine.num_swaps == 0
        engine.may_swap.set()
        await replay.settle()
        return engine.num_swaps

    assert asyncio.run(scenario()) == 1


def test_hash_rewards_are_the_same_for_the_same_text_and_half_ones():
    async def scores() -> list[float]:
        pool = HashRewards()
        task = Task.judged_by("exact", answer="4")
        texts = [f"text {i % 500}" for i in range(1000)]
        return [(await pool.score(Response(text=t, finish="stop", num_tokens=2), task)).reward for t in texts]

    got = asyncio.run(scores())
    assert got[:500] == got[500:] and set(got) == {0.0, 1.0}
    np.testing.assert_allclose(np.mean(got), 0.5, atol=0.1)


def trained(steps: TrainStep, config: Config) -> Any:
    """The parameters after two updates."""
    state = steps.init(fresh_params())
    for seed in range(2):
        for micro in stream(config, random_groups(seed, 4)):
            state = steps.accumulate(state, micro.batch)
        state, _ = steps.apply(state)
    return jax.tree.map(np.array, state.params)


@pytest.fixture(scope="module")
def paced() -> PacedSteps:
    config = config_of()
    return PacedSteps(MODEL, config, make_mesh(**config.mesh.axes, devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def without_pace() -> Any:
    return trained(steps_of(config_of()), config_of())


@pytest.mark.parametrize("passes_per_token", [0.0, 0.05, 0.37])
def test_paced_steps_train_bit_for_bit_like_steps(paced, without_pace, passes_per_token):
    config = config_of()
    paced.set_pace(passes_per_token)
    jax.tree.map(np.testing.assert_array_equal, trained(paced, config), without_pace)
    assert paced.num_compilations == 2
    tokens = sum(
        int((micro.batch.segment_ids > 0).sum()) for s in range(2) for micro in stream(config, random_groups(s, 4))
    )
    assert paced.num_real_tokens == tokens
    assert len(paced.cpu_s) == 2 and min(paced.cpu_s) > 0
    if passes_per_token == 0.37:  # enough that no micro-batch falls short of its own pass
        assert abs(paced.num_passes - tokens * passes_per_token) <= 1


def round_row(wait_s: float, compute_s: float, *, aside_s: float = 0.0) -> dict[str, float]:
    """A round as the clock has it; what was set aside is in its span, and neither wait nor compute."""
    return {
        "round/rollout_to_train_end_s": wait_s + compute_s + aside_s,
        "round/waiting_ratio": wait_s / (wait_s + compute_s),
        "round/wait_s": wait_s,
        "round/compute_s": compute_s,
    }


class _SerialRig:
    """A serial round of 1000 tokens in 10 micro-batches; a pass takes 0.05 s, and a round 0.1 s besides."""

    def __init__(self, *, rollout_s: float = 3.0) -> None:
        self._rollout_s = rollout_s
        self.tried: list[float] = []

    def run(self, passes_per_token: float) -> Any:
        self.tried.append(passes_per_token)
        num_passes = max(10.0, 1000 * passes_per_token)
        row = round_row(self._rollout_s, 0.05 * num_passes + 0.1)
        return SimpleNamespace(rounds=[row], num_passes=num_passes, num_micro_batches=10, real_tokens=1000)


def calibrated(rig: Any, **options: Any) -> Calibration:
    as_session: Any = lambda passes: passes  # noqa: E731
    return calibrate_passes(rig, as_session, **options)


def test_calibration_finds_the_passes_at_which_serial_waits_as_wanted():
    found = calibrated(_SerialRig(), waiting_ratio=0.3, tolerance=0.001, tries=8)
    np.testing.assert_allclose(0.05 * 1000 * found.passes_per_token + 0.1, 7, rtol=0.01)  # 3 of 10 s are the rollout's
    np.testing.assert_allclose(found.waiting_ratio, 0.3, atol=0.001)
    np.testing.assert_allclose(found.passes_per_micro_batch, 13.8, rtol=0.01)
    assert found.remarks() == []


def test_wait_and_compute_leave_out_what_was_set_aside():
    result: Any = SimpleNamespace(rounds=[round_row(3.0, 1.0, aside_s=4.0), round_row(2.0, 4.0)])
    assert wait_and_compute_s(result) == (5.0, 5.0)
    assert measured_ratio(result) == 0.5


@pytest.mark.parametrize("tries", [0, 1, 2])
def test_calibration_takes_only_a_cost_that_a_run_had(tries):
    rig = _SerialRig()
    found = calibrated(rig, waiting_ratio=0.3, tolerance=0.0, tries=tries)
    assert found.passes_per_token in rig.tried and len(rig.tried) == 1 + tries
    assert found.waiting_ratio == found.result.rounds[0]["round/waiting_ratio"]


def test_calibration_out_of_reach_warns_of_the_ratio_and_of_the_passes():
    # The micro-batches' own passes take 0.6 s: with a rollout of 0.2 s serial can't wait half of its time.
    found = calibrated(_SerialRig(rollout_s=0.2), waiting_ratio=0.5)
    ratio, passes = found.remarks()
    assert "waited 25.0% of its time, not the 50.0%" in ratio
    assert "1.0 gradient passes a micro-batch" in passes
    assert found.values()["calibrated_waiting_ratio"] == pytest.approx(0.25)
    assert found.values()["calibrated_passes_per_micro_batch"] == 1.0


class _SizedRig:
    """Serial rounds that wait 3 s a group and compute 100 s a group for each pass a token; tries differ by a factor."""

    def __init__(self, *slower: float) -> None:
        self._slower = slower
        self.tried: list[tuple[int, float]] = []

    def run(self, session: tuple[int, float]) -> Any:
        size, passes = session
        wait_s = 3 * size * self._slower[sum(s == size for s, _ in self.tried)]
        self.tried.append(session)
        return SimpleNamespace(rounds=[round_row(wait_s, 100 * size * passes)], tried=session)


def baseline(rig: Any, passes: float, **options: Any) -> Baseline:
    sessions: Any = {size: lambda p, size=size: (size, p) for size in (2, 4)}
    return baseline_within(rig, sessions, passes_per_token=passes, bounds=(0.47, 0.52), **options)


def test_baseline_within_its_bounds_is_taken_as_it_is():
    rig = _SizedRig(1.0)
    found = baseline(rig, 0.03)
    assert rig.tried == [(2, 0.03), (4, 0.03)] and found.num_repeats == 0
    assert found.waiting_ratios == pytest.approx({2: 0.5, 4: 0.5})
    assert found.remarks((0.47, 0.52)) == []


def test_baseline_out_of_bounds_is_measured_again_at_a_cost_corrected_by_what_it_waited():
    rig = _SizedRig(1.0, 1.0)
    found = baseline(rig, 0.02)  # waits 60%
    assert found.num_repeats == 1 and len(rig.tried) == 4
    assert found.passes_per_token == pytest.approx(0.03 * 0.505 / 0.495)
    assert found.waiting_ratios == pytest.approx({2: 0.495, 4: 0.495})
    assert found.results[4].tried == rig.tried[3]  # pyright: ignore[reportAttributeAccessIssue]
    assert "in try number 2" in found.remarks((0.47, 0.52))[0]


def test_baseline_that_never_comes_within_is_the_nearest_one_and_says_so():
    rig = _SizedRig(1.0, 2.0, 5.0)  # the machine grows slower and slower
    found = baseline(rig, 0.02, repeats=2)
    assert len(rig.tried) == 6 and found.num_repeats == 2
    assert found.results[2].tried == rig.tried[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert "in 3 tries serial never waited 47 to 52% of its time" in found.remarks((0.47, 0.52))[0]


def span(name: str, seconds: float, *, at_s: float = 0.0) -> dict[str, Any]:
    return {"name": name, "ts": 1e6 * at_s, "dur": 1e6 * seconds}


def result_of(
    *, train_s: float = 0.0, publish_s: list[float] | None = None, events: list[dict[str, Any]] | None = None
) -> Result:
    """Publishes, one every 100 s, that an actor notices 2 s later each than the one before, and takes in 0.1 s."""
    published = []
    for n, seconds in enumerate(publish_s or []):
        published += [span("publish", seconds, at_s=100 * n)]
        published += [span("pause", 0.1, at_s=100 * n + seconds + 2 * n)]
    trained = [span("train", train_s), span("train", train_s), span("apply", 0.5), span("rollout", 99.0)]
    return Result(
        rounds=[],
        steps=[],
        evals=[],
        events=[*trained, *published, *(events or [])],
        num_passes=1,
        num_micro_batches=1,
        real_tokens=100,
        step_cpu_s=[],
        dropped={},
        running=[],
    )


def test_profile_has_the_costs_of_the_results_given_and_the_lengths_to_come():
    rig: Any = SimpleNamespace(prompts=lambda config, count: [p.tolist() for p in PROMPTS[:count]])
    lengths, config = Lengths(kind="uniform", max_tokens=5), config_of()
    # A cold publish, then one of 2 s and one of 3 s; the other run has published once only.
    results = [result_of(train_s=1.0, publish_s=[9.0, 2.0, 3.0]), result_of(train_s=3.0, publish_s=[1.0])]
    engine = {"running": [1], "tokens_per_s": [1.0], "max_num_seqs": 1}
    got = measure_profile(rig, config, results=results, lengths=lengths, num_groups=3, engine=engine)
    assert got["engine"] == engine
    assert got["learner"] == {"seconds_per_token": pytest.approx((1 + 1 + 3 + 3) / 200), "optimizer_step_s": 0.5}
    # Noticed after 2 and 4 s, and at once where there was one publish only.
    assert got["publish"] == pytest.approx({"export_s": 2.0, "prefetch_s": 2.0, "pause_s": 0.1})
    num_requests = config.rounds.requests_per_group
    assert got["response_tokens"]["groups"] == [
        [lengths.tokens(p, i) for i in range(num_requests)] for p in PROMPTS[:3]
    ]


def test_a_requests_cost_is_a_round_of_one_token_responses_less_token_and_prompt():
    asked = []

    def run(session: Session) -> Result:
        asked.append(session)
        # From 10 s to 13.5 s, and training after that; 128 groups of 2 responses, 11 tokens of prompt each.
        events = [span("rollout", 1.0, at_s=10.0), span("rollout", 1.0, at_s=12.0), span("reward", 0.5, at_s=13.0)]
        return dataclasses.replace(result_of(events=events), events=events, real_tokens=256 * 12)

    rig: Any = SimpleNamespace(run=run)
    engine = {"tokens_per_s": [10.0, 1000.0], "prefill_s_per_token": 1e-4}
    got = measure.request_s(rig, config_of(), engine)
    (session,) = asked
    rounds = session.config.rounds
    assert rounds.groups_per_round * rounds.samples_per_group == 256 and rounds.train_start == "round_complete"
    assert {session.lengths.tokens(p, i) for p in PROMPTS[:50] for i in range(4)} == {1}
    assert got == pytest.approx(3.5 / 256 - 1 / 1000 - 11 * 1e-4)


def test_a_smaller_engines_profile_ends_at_its_places():
    engine = {"running": [1, 8, 16, 32], "tokens_per_s": [1.0, 2.0, 3.0, 4.0], "max_num_seqs": 32, "request_s": 0.5}
    want = {"running": [1, 8], "tokens_per_s": [1.0, 2.0], "max_num_seqs": 8, "request_s": 0.5}
    assert measure.limited(engine, 8) == want


def test_result_says_how_long_it_took_beside_what_load_and_how_it_was_calibrated(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(report, "_START_S", report.time.monotonic() - 100)
    monkeypatch.setattr(report, "_START_LOAD", 7.5)
    off = dataclasses.replace(calibrated(_SerialRig(), waiting_ratio=0.3), waiting_ratio=0.4)
    report.finish(
        "some",
        title="Some",
        about=[],
        table=report.Table(columns=["a"], rows=[["1"]]),
        remarks=["as is"],
        values={"a": 1.0},
        aims={"a": {"value": 1.0, "aim": [0.5, 2.0], "met": True}},
        data={},
        calibration=off,
    )
    values = json.loads((tmp_path / "some.json").read_text())["values"]
    assert values["a"] == 1.0 and values["load_at_start"] == 7.5 and "load_at_end" in values
    assert 100 <= values["wall_s"] < 200
    assert values["calibrated_waiting_ratio"] == 0.4
    page = (tmp_path / "some.md").read_text()
    assert "waited 40.0% of its time, not the 30.0%" in page and "as is" in page
    assert "| a | 1 | 0.5 to 2 | yes |" in page


def test_session_survives_the_pipe():
    session = Session(
        config=config_of(), lengths=Lengths(kind="uniform", max_tokens=5), rewards="task", passes_per_token=0.25
    )
    assert Session.from_json(json.loads(json.dumps(session.to_json()))) == session
    bare = Session(config=config_of())
    assert Session.from_json(json.loads(json.dumps(bare.to_json()))) == bare


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(2.0, True, True), (1.9, True, False), (1.9, False, True), (None, True, False)]
)
def test_aim_is_met_on_its_side(value, at_least, met):
    assert report.Aim(value=value, aim=2.0, at_least=at_least).to_json() == {"value": value, "aim": 2.0, "met": met}


CHILD = """
import sys
from launch.tools.profile_machine.profile_worker import RpcServer
parent = RpcServer()
print("chatter on stdout")
while (request := parent.receive()) is not None:
    if request["do"] == "add":
        parent.answer({"sum": request["a"] + request["b"]})
    elif request["do"] == "fail":
        parent.fail(ExceptionGroup("several", [ValueError("the reason")]))
    elif request["do"] == "end":
        sys.exit("last words")
"""


@pytest.fixture
def start_child(tmp_path, monkeypatch):
    (tmp_path / "pipe_child.py").write_text(CHILD)
    monkeypatch.setattr(
        "launch.tools.profile_machine.profile_worker.sys",
        SimpleNamespace(executable=_with_path(tmp_path), stdin=sys.stdin),
    )
    return lambda name: RpcProcess("pipe_child", [], tmp_path / name)


@pytest.fixture
def child(start_child):
    one = start_child("log")
    yield one
    one.close()


def _with_path(folder):
    """An interpreter that also finds modules of `folder`."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_child_answers_whatever_it_prints(child):
    for a in (1, 2):
        child.send({"do": "add", "a": a, "b": 3})
        assert wait_for(child, deadline_s=60) == {"sum": a + 3}


def test_child_that_fails_says_why(child):
    child.send({"do": "fail"})
    with pytest.raises(ChildError, match="failed: ValueError: the reason"):
        wait_for(child, deadline_s=60)


def test_child_that_ends_shows_its_log(child):
    child.send({"do": "end"})
    with pytest.raises(ChildError, match="(?s)ended; its log .*last words"):
        wait_for(child, deadline_s=60)


def test_child_that_does_not_answer_is_not_waited_for(child):
    with pytest.raises(ChildError, match="did not answer in 0 s"):
        wait_for(child, deadline_s=0.2)


def test_answers_of_a_child_that_is_first_are_kept_for_its_turn(start_child):
    first, second = start_child("first"), start_child("second")
    try:
        first.send({"do": "add", "a": 1, "b": 2})
        first.send({"do": "add", "a": 3, "b": 4})
        assert select.select([first._answers], [], [], 60)[0]  # it has answered before the other is asked
        second.send({"do": "add", "a": 10, "b": 20})
        assert wait_for(second, first, deadline_s=60) == {"sum": 30}
        assert wait_for(first, second, deadline_s=60) == {"sum": 3}
        assert wait_for(first, second, deadline_s=60) == {"sum": 7}
    finally:
        first.close()
        second.close()


def test_child_that_ended_before_it_was_asked_is_closed_all_the_same(start_child):
    child = start_child("log")
    child.send({"do": "end"})
    child.process.wait(60)
    with pytest.raises(ChildError, match="ended"):
        child.send({"do": "add"})
    child.close()  # what could not be sent is still in the pipe's buffer
    assert child.process.stdin is not None and child.process.stdin.closed
