import asyncio
import os
import signal
import sys

import pytest

from actor.verifiers.pool import VerifierError, VerifierPool, check_own
from bridge.types import Task
from configs.sections.prompts import Truncated
from tests.actor.fakes import until

BAD = ["hang", "crash", "raise", "nan", "inf", "memory"]


def make_pool(
    tmp_path, *, timeout_s: float = 0.5, retries: int = 1, num_workers: int = 1, truncated: Truncated = "zero"
) -> VerifierPool:
    return VerifierPool(
        truncated=truncated,
        num_workers=num_workers,
        timeout_s=timeout_s,
        retries=retries,
        command=(sys.executable, "-m", "tests.actor.verifiers.bad_verifiers", str(tmp_path / "attempts")),
    )


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


@pytest.mark.parametrize("how", BAD)
def test_score_after_one_failure_is_the_second_attempts(tmp_path, how):
    async def body():
        pool = make_pool(tmp_path, timeout_s=2.0)
        try:
            assert await pool.score("1", Task(verifier=how, answer="a"), "stop") == 0.5
            assert pool.num_failures == 1
        finally:
            await pool.close()

    run(body())


@pytest.mark.parametrize("how", BAD)
def test_score_that_keeps_failing_is_an_error_and_no_reward(tmp_path, how):
    async def body():
        pool = make_pool(tmp_path)
        try:
            with pytest.raises(VerifierError, match=r"2 attempts"):
                await pool.score("9", Task(verifier=how, answer="a"), "stop")
            assert await pool.score("0", Task(verifier=how, answer="b"), "stop") == 0.5  # the worker is back
        finally:
            await pool.close()

    run(body())


def test_hung_worker_is_killed(tmp_path):
    async def body():
        pool = make_pool(tmp_path, retries=0)
        try:
            assert await pool.score("0", Task(verifier="hang", answer="a"), "stop") == 0.5
            process = pool._workers[0]._process
            assert process is not None
            with pytest.raises(VerifierError, match="no answer"):
                await pool.score("9", Task(verifier="hang", answer="b"), "stop")
            assert process.returncode == -signal.SIGKILL
        finally:
            await pool.close()

    run(body())


def test_workers_judge_side_by_side_and_a_hung_one_holds_up_no_other(tmp_path):
    async def body():
        pool = make_pool(tmp_path, num_workers=2, timeout_s=60.0, retries=0)
        try:
            stuck = asyncio.create_task(pool.score("9", Task(verifier="hang", answer="a"), "stop"))
            await until(lambda: (tmp_path / "attempts").exists(), "the first one runs")
            for i in range(20):
                assert await pool.score("0", Task(verifier="raise", answer=f"b{i}"), "stop") == 0.5
            assert not stuck.done()
            stuck.cancel()
        finally:
            await pool.close()

    run(body())


def test_cancelled_question_answers_nobody_else(tmp_path):
    async def body():
        pool = make_pool(tmp_path, timeout_s=60.0)
        try:
            first = asyncio.create_task(pool.score("9", Task(verifier="hang", answer="a"), "stop"))
            await until(lambda: (tmp_path / "attempts").exists(), "the first one runs")
            first.cancel()
            assert await pool.score("0", Task(verifier="raise", answer="b"), "stop") == 0.5
        finally:
            await pool.close()

    run(body())


def test_close_ends_the_workers(tmp_path):
    async def body():
        pool = make_pool(tmp_path)
        await pool.score("0", Task(verifier="raise", answer="a"), "stop")
        process = pool._workers[0]._process
        assert process is not None
        await pool.close()
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)

    run(body())


def test_real_worker_scores_and_names_what_it_does_not_know():
    async def body():
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0)
        try:
            assert await pool.score("42", Task(verifier="exact", answer="42"), "stop") == 1.0
            assert await pool.score("$\\frac12$", Task(verifier="math", answer="0.5"), "stop") == 1.0
            with pytest.raises(VerifierError, match="no verifier 'nope'"):
                await pool.score("42", Task(verifier="nope", answer="42"), "stop")
        finally:
            await pool.close()

    run(body())


OWN = """
import sys
def length(response_text, task):
    return len(response_text) + len(task.answer) / 10
def text(response_text, task):
    return response_text
def ending(response_text, task, *, finish):
    return {"stop": 1, "length": 2}[finish]
def no_jax(response_text, task):
    return float(not {"jax", "torch", "vllm"} & sys.modules.keys())
"""
OWN_NAMES = ("mine:length", "mine:text", "mine:ending", "mine:no_jax")


def test_score_by_somebodys_own_that_was_not_allowed_imports_nothing(tmp_path, monkeypatch):
    """A ticket names the verifier, and whoever writes tickets must not make an actor run code."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(text, task): return 1\n")
    monkeypatch.chdir(tmp_path)

    async def body():
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=("theirs:g",))
        try:
            with pytest.raises(VerifierError, match="theirs:f is code of somebody's own"):
                await pool.score("abc", Task(verifier="theirs:f", answer=""), "stop")
        finally:
            await pool.close()

    run(body())
    assert not (tmp_path / "imported").exists()


def test_real_worker_scores_by_ones_own_from_where_the_command_was_started(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    async def body():
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=OWN_NAMES)
        try:
            assert await pool.score("abc", Task(verifier="mine:length", answer="42"), "stop") == 3.2
            assert await pool.score("abc", Task(verifier="mine:ending", answer="42"), "stop") == 1.0
            assert await pool.score("abc", Task(verifier="mine:no_jax", answer="42"), "stop") == 1.0
            with pytest.raises(VerifierError, match="verifier mine:text: .*must return a finite number, got 'abc'"):
                await pool.score("abc", Task(verifier="mine:text", answer="42"), "stop")
            await pool._workers[0].kill()  # and again after a restart
            assert await pool.score("", Task(verifier="mine:length", answer=""), "stop") == 0.0
        finally:
            await pool.close()

    run(body())


@pytest.mark.parametrize(("truncated", "rewards"), [("zero", [0.5, 0.0]), ("keep", [0.5, 0.5]), ("mask", [0.5, 0.5])])
def test_truncated_response_is_judged_as_any_other_unless_it_earns_nothing(tmp_path, truncated, rewards):
    async def body():
        pool = make_pool(tmp_path, truncated=truncated)
        try:
            task = Task(verifier="raise", answer="a")
            assert [await pool.score("0", task, finish) for finish in ("stop", "length")] == rewards
        finally:
            await pool.close()

    run(body())
    asked = (tmp_path / "attempts").read_text().split()
    assert len(asked) == (1 if truncated == "zero" else 2)  # what earns nothing is not even asked about


def test_verifier_of_ones_own_is_told_how_the_response_ended(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    async def body():
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, truncated="keep", own=OWN_NAMES)
        try:
            task = Task(verifier="mine:ending", answer="42")
            assert [await pool.score("abc", task, finish) for finish in ("stop", "length")] == [1.0, 2.0]
        finally:
            await pool.close()

    run(body())


def test_check_own_says_in_one_line_what_can_not_be_used(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    check_own("mine:length")
    check_own("exact")
    for name, said in (
        ("mine:lenght", "has no 'lenght'; did you mean 'length'?"),
        ("nowhere:f", "the module nowhere does not import: ModuleNotFoundError: No module named 'nowhere' (looked in"),
    ):
        with pytest.raises(ValueError) as e:
            check_own(name)
        assert str(e.value).startswith(f"prompts.verifier={name}: ") and said in str(e.value)
