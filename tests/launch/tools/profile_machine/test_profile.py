import asyncio
import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from launch.tools.plan import profile as plan_profile
from launch.tools.profile_machine import measure_engine as profile_engine
from launch.tools.profile_machine.measure_learner import full_micro_batch, profile_learner
from learner.update.frozen_policies import FrozenPolicies
from tests.launch.commands import call_each
from tests.launch.test_cli import PROJECT, TINY
from tests.learner.streams import config_of, fresh_params, steps_of


class _Engine:
    """An engine in virtual time, one step after the other. A step of h sequences takes 0.002 + 0.001 h seconds, and
    `per_context_token_s` more per token before theirs. A request's start costs 0.0001 s per prompt token, and
    0.003 s beside others that are decoded, otherwise 0.0005 s; starts in an empty engine cost 0.01 s together."""

    size = SimpleNamespace(kv_tokens=1234)

    def __init__(self, *, per_context_token_s: float = 0.0, max_num_seqs: int = 1000) -> None:
        self.now_s = 0.0
        self.longest = {}
        self._per_context_token_s, self._max_num_seqs = per_context_token_s, max_num_seqs
        self._waiting: list[Any] = []
        self._running: list[Any] = []
        self._task: asyncio.Task[None] | None = None

    async def sample(self, prompt_tokens, sampling, *, request_id, priority):
        del request_id, priority
        one = SimpleNamespace(prompt=prompt_tokens.size, left=sampling.max_tokens, made=0, end=asyncio.Event())
        self._waiting.append(one)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        await one.end.wait()

    async def _run(self):
        while self._waiting or self._running:
            await asyncio.sleep(0)  # all that starts together is there
            each_s = 0.003 if self._running else 0.0005
            self.now_s += 0.0 if self._running else 0.01
            while self._waiting and len(self._running) < self._max_num_seqs:
                one = self._waiting.pop(0)
                self.now_s += each_s + 0.0001 * one.prompt
                self._running.append(one)
            h = len(self._running)
            context = sum(one.prompt + one.made for one in self._running)
            self.now_s += 0.002 + 0.001 * h + self._per_context_token_s * context
            for one in self._running:
                one.made, one.left = one.made + 1, one.left - 1
                self.longest[h] = max(self.longest.get(h, 0), one.prompt + one.made)
            for one in [one for one in self._running if not one.left]:
                self._running.remove(one)
                one.end.set()


def test_profile_engine_finds_the_engines_own_law(monkeypatch):
    engine = _Engine(max_num_seqs=6)
    monkeypatch.setattr(profile_engine.time, "perf_counter", lambda: engine.now_s)
    got = asyncio.run(profile_engine.profile_engine(engine, counts=[1, 2, 4, 6], num_tokens=32))  # pyright: ignore
    assert got["running"] == [1, 2, 4, 6] and got["max_num_seqs"] == 6 and got["kv_capacity_tokens"] == 1234
    assert got["tokens_per_s"] == pytest.approx([h / (0.002 + 0.001 * h) for h in (1, 2, 4, 6)])
    assert got["prefill_s_per_token"] == pytest.approx(0.0001)
    assert got["request_s"] == pytest.approx(0.003, rel=0.05)
    assert got["restart_s"] == pytest.approx(0.0005)
    assert got["start_latency_s"] == pytest.approx(0.01 + 0.0005 - 0.003, rel=0.05)


def test_profile_engine_times_sequences_of_the_context_asked_for_or_as_long_as_fit(monkeypatch):
    engine = _Engine(per_context_token_s=1e-5)
    monkeypatch.setattr(profile_engine.time, "perf_counter", lambda: engine.now_s)
    timed: Any = dict(counts=[1, 2, 8], num_tokens=32, context_tokens=400, max_tokens=600)
    got = asyncio.run(profile_engine.profile_engine(engine, **timed))  # pyright: ignore
    # The cache holds 1234 tokens: 617 each for two sequences, 154 for eight, less the 32 that are timed.
    contexts = {1: 400, 2: 400, 8: 122}
    wanted = [h / (0.002 + 0.001 * h + 1e-5 * h * c) for h, c in contexts.items()]
    assert got["tokens_per_s"] == pytest.approx(wanted, rel=0.01)
    assert all(h * tokens <= 1234 for h, tokens in engine.longest.items())


@pytest.mark.parametrize("num_tokens", [8, 100, 128])
@pytest.mark.parametrize("context_tokens", [12, 70, 144, 4000])
@pytest.mark.parametrize("count", [1, 16, 256])
def test_profile_engine_asks_for_no_longer_sequence_than_the_engine_takes(count, context_tokens, num_tokens):
    prompt, few = profile_engine._context(count, num_tokens, context_tokens, 144)
    assert prompt >= 4 and few >= 4
    assert prompt + few + num_tokens - 4 <= 144


def test_profile_engine_responses_too_short_to_measure_are_refused():
    with pytest.raises(ValueError, match="at least 8 tokens, got 7"):
        asyncio.run(profile_engine.tokens_per_s(_Engine(), 1, 7))  # pyright: ignore


@pytest.mark.parametrize(("limit", "want"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])])
def test_counts_are_powers_of_two_and_the_limit(limit, want):
    assert profile_engine.counts_up_to(limit) == want


@pytest.mark.heavy
def test_profile_learner_times_full_micro_batches():
    config = config_of(rows=3, row_tokens=24)
    assert (full_micro_batch(config).batch.segment_ids > 0).all()
    steps = steps_of(config)
    state = steps.init(fresh_params())
    anchors = FrozenPolicies(steps, config, load_reference=fresh_params, params=state.params)
    got, state = profile_learner(config, steps, anchors, state)
    assert got["micro_batch_tokens"] == 72
    assert min(got.values()) > 0
    assert int(state.step) > 0  # the state given was stepped, and this one goes on


@pytest.mark.parametrize("whole_groups", [False, True])
def test_micro_batch_of_one_row_is_full_and_of_the_packings_arrays(whole_groups):
    config = config_of(rows=1, row_tokens=192)
    model = dataclasses.replace(config.model, max_tokens=24)
    packing = dataclasses.replace(config.packing, whole_groups=whole_groups)
    batch = full_micro_batch(dataclasses.replace(config, model=model, packing=packing)).batch
    assert (batch.segment_ids > 0).all() and (batch.group_ids is not None) == whole_groups


REFUSED = [
    (["--out=/nonexistent/profile.json"], "error: --out=/nonexistent/profile.json: folder /nonexistent does not exist"),
    ([f"--config={TINY}", "--context_tokens=1000000"], "error: --context_tokens=1000000 is above model.max_tokens="),
    ([], "error: --config: not set"),
    ([f"--config={TINY}", "--tensor_parallel_sizes=1,x"], "--tensor_parallel_sizes: expected a list such as 1,2,4"),
    ([f"--config={TINY}", "--tensor_parallel_sizes=0"], "--tensor_parallel_sizes: expected a list such as 1,2,4"),
    ([f"--config={TINY}", "--config.run.num_updats=3"], "did you mean 'run.num_updates'?"),
]


@pytest.mark.heavy
def test_profile_machine_unusable_input_is_one_line(tmp_path):
    lines = [[f"--out={tmp_path}/p.json", *arguments] for arguments, _ in REFUSED]
    for done, (_, said) in zip(call_each("launch.tools.profile_machine.__main__", lines), REFUSED, strict=True):
        assert done.code == 2 and said in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
@pytest.mark.engine
def test_profile_machine_measures_a_whole_profile(tmp_path):
    out = tmp_path / "profile.json"
    command = [
        sys.executable,
        "-m",
        "launch.tools.profile_machine",
        f"--config={TINY}",
        f"--out={out}",
        "--num_prompts=4",
        "--tensor_parallel_sizes=1,2",
    ]
    done = subprocess.run([*command, "--config.actor.max_num_seqs=3"], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    profile = json.loads(out.read_text())
    assert profile["engine"]["running"] == [1, 2, 3] and min(profile["engine"]["tokens_per_s"]) > 0
    assert [len(group) for group in profile["response_tokens"]["groups"]] == [8] * 4
    assert all(1 <= length <= 6 for group in profile["response_tokens"]["groups"] for length in group)
    assert min(profile["publish"].values()) > 0 and profile["learner"]["seconds_per_token"] > 0
    assert profile["verifier_s"] > 0
    larger = plan_profile.load(out).sizes()[2]
    assert larger.engine.running == (1.0, 2.0, 3.0) and min(larger.engine.tokens_per_s) > 0
    assert larger.engine.kv_capacity_tokens > profile["engine"]["kv_capacity_tokens"]
