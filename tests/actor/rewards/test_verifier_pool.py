import asyncio
import os
import signal
import subprocess
import sys

import pytest

from actor.rewards.types import Response
from actor.rewards.verifier_pool import MAX_HANGS, HangError, RaisedError, VerifierError, VerifierPool
from bridge.rollout_types import Finish, Task
from tests.actor.fakes import until

BAD = ["hang", "stop", "crash", "raise", "nan", "inf", "memory"]
"""stop: somebody stops the process (SIGSTOP), which no text can be blamed for, however often it happens."""


async def no_pause(seconds: float) -> None:
    """Between attempts; tests don't wait."""


def make_pool(
    tmp_path, *, timeout_s: float = 0.5, retries: int = 1, num_workers: int = 1, sleep=no_pause
) -> VerifierPool:
    return VerifierPool(
        sleep=sleep,
        num_workers=num_workers,
        timeout_s=timeout_s,
        retries=retries,
        command=(sys.executable, "-m", "tests.actor.rewards.verifiers.bad_verifiers", str(tmp_path / "attempts")),
    )


def process_of(pool: VerifierPool) -> subprocess.Popen[bytes]:
    (one,) = pool._workers
    assert one._running is not None
    return one._running.process


async def ask(pool: VerifierPool, name: str, text: str, answer: str, finish: Finish = "stop") -> float:
    response = Response(text=text, finish=finish, num_tokens=len(text))
    return (await pool.score(name, response, Task.judged_by(name, answer=answer))).value


@pytest.mark.heavy
@pytest.mark.parametrize("how", BAD)
async def test_score_after_one_failure_is_the_second_attempts(tmp_path, how):
    pool = make_pool(tmp_path, timeout_s=2.0)
    try:
        assert await ask(pool, how, "1", "a") == 0.5
        assert pool.num_failures == 1
    finally:
        await pool.close()


@pytest.mark.heavy
@pytest.mark.parametrize("how", BAD)
async def test_score_that_keeps_failing_is_an_error_and_no_reward(tmp_path, how):
    pool = make_pool(tmp_path)
    try:
        said = "3 times" if how == "hang" else "2 attempts"
        said = "with exit code 7.*2 attempts" if how == "crash" else said
        kind = {"hang": HangError, "raise": RaisedError}.get(how, VerifierError)
        with pytest.raises(VerifierError, match=said) as e:
            await ask(pool, how, "9", "a")
        assert e.type is kind
        assert pool.num_failures == (MAX_HANGS if how == "hang" else 2)
        assert await ask(pool, how, "0", "b") == 0.5  # the worker is back
    finally:
        await pool.close()


@pytest.mark.heavy
async def test_attempts_are_further_and_further_apart_up_to_a_bound_and_the_worker_is_free_meanwhile(tmp_path):
    """What a machine lacks for a moment (memory, processes) drops no group."""
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        assert await ask(pool, "raise", "0", "b") == 0.5

    pool = VerifierPool(
        num_workers=1,
        timeout_s=30.0,
        retries=6,
        command=(sys.executable, "-m", "tests.actor.rewards.verifiers.bad_verifiers", str(tmp_path / "attempts")),
        sleep=sleep,
        draw=lambda low, high: high - low,
    )
    try:
        with pytest.raises(VerifierError, match="7 attempts"):
            await ask(pool, "crash", "9", "a")
        assert slept_s == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]  # halves: they are drawn between half and whole
    finally:
        await pool.close()


@pytest.mark.heavy
async def test_hung_worker_is_killed(tmp_path):
    pool = make_pool(tmp_path, retries=0)
    try:
        assert await ask(pool, "hang", "0", "a") == 0.5
        process = process_of(pool)
        with pytest.raises(HangError, match="no answer"):
            await ask(pool, "hang", "9", "b")
        assert process.returncode == -signal.SIGKILL
    finally:
        await pool.close()


@pytest.mark.heavy
async def test_workers_judge_side_by_side_and_a_hung_one_holds_up_no_other(tmp_path):
    pool = make_pool(tmp_path, num_workers=2, timeout_s=60.0, retries=0)
    try:
        stuck = asyncio.create_task(ask(pool, "hang", "9", "a"))
        await until(lambda: (tmp_path / "attempts").exists(), "the first one runs")
        for i in range(20):
            assert await ask(pool, "raise", "0", f"b{i}") == 0.5
        assert not stuck.done()
        stuck.cancel()
    finally:
        await pool.close()


@pytest.mark.heavy
async def test_cancelled_question_answers_nobody_else(tmp_path):
    pool = make_pool(tmp_path, timeout_s=60.0)
    try:
        first = asyncio.create_task(ask(pool, "hang", "9", "a"))
        await until(lambda: (tmp_path / "attempts").exists(), "the first one runs")
        first.cancel()
        assert await ask(pool, "raise", "0", "b") == 0.5
    finally:
        await pool.close()


async def test_workers_run_on_the_cores_that_they_are_given(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import os\ndef cores(text, task): return sum(2**c for c in os.sched_getaffinity(0))\n"
    )
    monkeypatch.chdir(tmp_path)
    core = max(os.sched_getaffinity(0))
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=("mine:cores",), cores=[core])
    try:
        assert await ask(pool, "mine:cores", "", "") == 2**core
    finally:
        await pool.close()


async def test_close_ends_the_workers(tmp_path):
    pool = make_pool(tmp_path)
    await ask(pool, "raise", "0", "a")
    process = process_of(pool)
    await pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.heavy
async def test_real_worker_scores_and_names_what_it_does_not_know():
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0)
    try:
        assert await ask(pool, "exact", "42", "42") == 1.0
        assert await ask(pool, "math", "$\\frac12$", "0.5") == 1.0
        with pytest.raises(VerifierError, match="no verifier 'nope'"):
            await ask(pool, "nope", "42", "42")
    finally:
        await pool.close()


def test_cores_that_are_not_there_are_refused_before_a_worker_starts():
    with pytest.raises(ValueError, match=r"rewards.cpu_cores: expected .* got \[400000\]"):
        VerifierPool(num_workers=1, timeout_s=1.0, retries=0, cores=(0, 400000))
