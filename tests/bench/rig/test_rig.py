import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from actor.engine_protocol import PartialSample, Sample
from actor.rewards.types import Response
from bridge.rollout_types import Sampling, Task
from configs.schema import Config
from learner.distributed.sharding import make_mesh
from learner.update.train_step import TrainStep
from tests.bench.rig.calibrate import calibrate, wait_and_compute_s, waiting_ratio
from tests.bench.rig.learner_process import compiled_in
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.paced_steps import PacedSteps
from tests.bench.rig.replay import HashRewards, Places, ReplayEngine
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

    async def sample(
        self, prompt_tokens: Any, sampling: Sampling, *, request_id: str, priority: int, begun: PartialSample | None
    ) -> Sample:
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


def test_hash_rewards_are_half_ones_and_flat_for_a_share_of_the_prompts():
    async def scores(pool: HashRewards, answer: str) -> list[float]:
        task = Task.judged_by("exact", answer=answer)
        return [
            (await pool.score(Response(text=f"text {i}", finish="stop", num_tokens=2), task)).reward for i in range(500)
        ]

    got = asyncio.run(scores(HashRewards(), "4"))
    assert got == asyncio.run(scores(HashRewards(), "4")) and set(got) == {0.0, 1.0}
    np.testing.assert_allclose(np.mean(got), 0.5, atol=0.1)
    flat = [HashRewards(0.25).is_flat(f"answer {n}") for n in range(4000)]
    np.testing.assert_allclose(np.mean(flat), 0.25, atol=0.02)
    assert set(asyncio.run(scores(HashRewards(0.25), f"answer {flat.index(True)}"))) == {1.0}


def test_places_let_the_lowest_priority_in_next_and_are_not_lost_with_a_cancelled_request():
    async def scenario() -> list[str]:
        places, seen, ends = Places(1), list[str](), {name: asyncio.Event() for name in "abcd"}

        async def hold(name: str, priority: int) -> None:
            async with places.take(priority):
                seen.append(name)
                await ends[name].wait()

        tasks = {n: asyncio.create_task(hold(n, p)) for n, p in zip("abcd", (9, 8, 3, 5), strict=True)}
        await asyncio.sleep(0)
        tasks["d"].cancel()
        for event in ends.values():
            event.set()
        await asyncio.wait(tasks.values())
        return seen

    assert asyncio.run(scenario()) == ["a", "c", "b"]


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


def test_sessions_share_programs_unless_what_is_compiled_in_differs():
    other, wider = config_of(), config_of(rows=4)
    other = dataclasses.replace(other, run=dataclasses.replace(other.run, name="another"))
    assert compiled_in(config_of()) == compiled_in(other) != compiled_in(wider)


def round_row(wait_s: float, compute_s: float, *, aside_s: float = 0.0) -> dict[str, float]:
    """A round as the clock has it; what was set aside is in its span, and neither wait nor compute."""
    return {
        "round/rollout_to_train_end_s": wait_s + compute_s + aside_s,
        "round/waiting_ratio": wait_s / (wait_s + compute_s),
        "round/wait_s": wait_s,
        "round/compute_s": compute_s,
    }


class _SerialRig:
    """A serial round of 1000 tokens in 10 micro-batches: 3 s of rollout, 0.05 s a pass, and 0.1 s besides."""

    def run(self, session: Session) -> Any:
        num_passes = max(10.0, 1000 * session.passes_per_token)
        row = round_row(3.0, 0.05 * num_passes + 0.1)
        return SimpleNamespace(rounds=[row], num_passes=num_passes, num_micro_batches=10, real_tokens=1000)


def test_calibration_finds_the_passes_at_which_serial_waits_as_wanted():
    rig: Any = _SerialRig()
    session = Session(config=config_of())
    found = calibrate(rig, {"serial": session}, bounds=(0.299, 0.301), tries=9)
    np.testing.assert_allclose(0.05 * 1000 * found.passes_per_token + 0.1, 7, rtol=0.01)  # 3 of 10 s are the rollout's
    assert found.is_within and abs(found.waiting_ratio - 0.3) < 0.001
    np.testing.assert_allclose(found.passes_per_micro_batch, 13.8, rtol=0.01)
    missed = calibrate(rig, {"serial": session}, bounds=(0.299, 0.301), tries=1)
    assert not missed.is_within and missed.passes_per_token == 0.0 and "Warning" in missed.notes()[1]


def test_wait_and_compute_leave_out_what_was_set_aside():
    result: Any = SimpleNamespace(rounds=[round_row(3.0, 1.0, aside_s=4.0), round_row(2.0, 4.0)])
    assert wait_and_compute_s(result) == (5.0, 5.0) and waiting_ratio(result) == 0.5


def test_a_session_counts_from_the_end_of_its_last_skipped_update():
    def event(name: str, start_s: float, seconds: float = 0.0) -> dict[str, Any]:
        return {"name": name, "ts": 1e6 * start_s, "dur": 1e6 * seconds}

    row = {"sequences": 4, "response/mean_tokens": 10.0, "lag/max": 2}
    whole = Result(
        rounds=[{"step": 2}, {"step": 4}],
        steps=[row, row, row, row | {"lag/max": 3}],
        evals=[],
        events=[event("issue", 0.0), *(event("apply", n, 0.5) for n in (2, 3, 4, 5))],
        num_passes=8,
        num_micro_batches=8,
        real_tokens=160,
        step_cpu_s=[0.1, 0.2, 0.3, 0.4],
        dropped={},
        running=[],
    )
    assert (whole.span_s, whole.tokens_per_s) == (5.5, pytest.approx(160 / 5.5))
    later = whole.skip(1).skip(1)
    assert (later.span_s, later.tokens_per_s, later.num_skipped) == (2.0, 40.0, 2)
    assert later.rounds == [{"step": 4}] and later.step_cpu_s == [0.3, 0.4] and later.max_lag == 3
    with pytest.raises(ValueError, match="cannot skip 2 of 2"):
        later.skip(2)
