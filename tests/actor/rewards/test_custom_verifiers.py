"""Custom verifiers in real worker processes: loading, failures, what they start, and results that are refused."""

import os

import psutil
import pytest

from actor.rewards.verifier_pool import VerifierError, VerifierPool, check_own
from bridge.rollout_types import Finish, Task
from tests.actor.fakes import until
from tests.actor.rewards.test_verifier_pool import ask, no_pause

OWN = """
import sys
def length(response_text, task):
    return len(response_text) + len(task.answer) / 10
def text(response_text, task):
    return response_text
def ending(response_text, task, *, finish):
    return {"stop": 1, "length": 2}[finish]
def tokens(response_text, task, *, num_tokens):
    return num_tokens
def no_jax(response_text, task):
    return float(not {"jax", "torch", "vllm"} & sys.modules.keys())
"""


OWN_NAMES = ("mine:length", "mine:text", "mine:tokens", "mine:ending", "mine:no_jax")


async def test_score_by_somebodys_own_that_was_not_allowed_imports_nothing(tmp_path, monkeypatch):
    """A ticket names the verifier, and whoever writes tickets must not make an actor run code."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(text, task): return 1\n")
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=("theirs:g",))
    try:
        with pytest.raises(VerifierError, match="theirs:f is custom code"):
            await ask(pool, "theirs:f", "abc", "")
    finally:
        await pool.close()
    assert not (tmp_path / "imported").exists()


@pytest.mark.heavy
async def test_real_worker_scores_by_ones_own_from_where_the_command_was_started(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=OWN_NAMES)
    try:
        assert await ask(pool, "mine:length", "abc", "42") == 3.2
        assert await ask(pool, "mine:ending", "abc", "42") == 1.0
        assert await ask(pool, "mine:no_jax", "abc", "42") == 1.0
        with pytest.raises(VerifierError, match="verifier mine:text: .*must return a finite number, got 'abc'"):
            await ask(pool, "mine:text", "abc", "42")
        await pool._workers[0].kill()  # and again after a restart
        assert await ask(pool, "mine:length", "", "") == 0.0
    finally:
        await pool.close()


async def test_verifier_of_ones_own_is_told_how_the_response_ended_and_how_long_it_is(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=OWN_NAMES)
    try:
        ends: list[Finish] = ["stop", "length"]
        assert [await ask(pool, "mine:ending", "abc", "42", end) for end in ends] == [1.0, 2.0]
        assert await ask(pool, "mine:tokens", "abcd", "42") == 4.0
    finally:
        await pool.close()


@pytest.mark.heavy
def test_check_own_says_in_one_line_what_can_not_be_used(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert check_own(["mine:length"]) == [] == check_own([])
    for name, said in (
        ("mine:lenght", "has no 'lenght'; did you mean 'length'?"),
        ("nowhere:f", "cannot import module nowhere: ModuleNotFoundError: No module named 'nowhere' (looked in"),
    ):
        with pytest.raises(ValueError) as e:
            check_own(["mine:length", name])
        assert str(e.value).startswith(f"prompts.verifier={name}: ") and said in str(e.value)


FAILING = """
import os
CALLS = []
def fails_first(response_text, task):
    CALLS.append(1)
    if len(CALLS) < 3:
        raise {"value": ValueError, "key": KeyError, "connection": ConnectionError}[response_text]("down")
    return 0.25
def nan_first(response_text, task):
    CALLS.append(1)
    return float("nan") if len(CALLS) < 3 else 0.25
def nothing(response_text, task):
    return None
def only_this_text(response_text, task):
    return {"42": 1.0}[response_text]
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("fails_first", "value"), ("fails_first", "key"), ("fails_first", "connection"), ("nan_first", "")],
)
async def test_own_verifier_that_fails_for_a_while_is_asked_again_and_its_answer_counts(
    tmp_path, monkeypatch, name, text
):
    (tmp_path / "mine.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=2, own=(f"mine:{name}",), sleep=no_pause)
    try:
        assert await ask(pool, f"mine:{name}", text, "") == 0.25
        assert pool.num_failures == 2
    finally:
        await pool.close()


@pytest.mark.parametrize(("name", "text"), [("nothing", "42"), ("only_this_text", "41")])
async def test_own_verifier_that_keeps_failing_is_no_reward_although_it_judges_the_own_answer(
    tmp_path, monkeypatch, name, text
):
    (tmp_path / "mine.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=2, own=(f"mine:{name}",), sleep=no_pause)
    try:
        with pytest.raises(VerifierError, match="3 attempts"):
            await ask(pool, f"mine:{name}", text, "42")
    finally:
        await pool.close()


FORKING = """
import concurrent.futures
import multiprocessing
import os
import pathlib
import time
POOL = None
def one(text):
    return os.getpid()
def shared(response_text, task):
    global POOL
    POOL = POOL or concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    return POOL.submit(one, response_text).result()
def forks(response_text, task):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    return pid
def forks_and_ends(response_text, task):
    pid = forks(response_text, task)
    pathlib.Path(task.answer).write_text(str(pid))
    os._exit(7)
def reads(response_text, task):
    import sys
    return len(sys.stdin.read()) + 0.5
"""


@pytest.mark.parametrize("name", ["shared", "forks"])
async def test_close_ends_what_a_verifier_forked(tmp_path, monkeypatch, name):
    (tmp_path / "mine.py").write_text(FORKING)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=(f"mine:{name}",))
    forked = int(await ask(pool, f"mine:{name}", "", ""))
    os.kill(forked, 0)
    await pool.close()
    await until(lambda: not is_alive(forked), "it is gone")


async def test_worker_that_ends_under_a_question_takes_what_it_forked_along_and_is_an_error_at_once(
    tmp_path, monkeypatch
):
    """Its child holds the channel open, so that its end alone would not be seen there."""
    (tmp_path / "mine.py").write_text(FORKING)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=1000.0, retries=0, own=("mine:forks_and_ends",))
    try:
        with pytest.raises(VerifierError, match="with exit code 7"):
            await ask(pool, "mine:forks_and_ends", "", str(tmp_path / "pid"))
        forked = int((tmp_path / "pid").read_text())
        await until(lambda: not is_alive(forked), "it is gone")
    finally:
        await pool.close()


async def test_verifier_that_reads_standard_input_gets_nothing_of_the_questions(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FORKING)
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=("mine:reads",))
    try:
        assert [await ask(pool, "mine:reads", text, "") for text in ("a", "b")] == [0.5, 0.5]
    finally:
        await pool.close()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


UNFIT = """
import functools
import numpy as np
from decimal import Decimal
def numpy_bool(response_text, task): return np.isclose(1.0, 1.0)
def array(response_text, task): return np.array(0.5)
def float16(response_text, task): return np.float16(0.5)
def one_of_many(response_text, task): return np.array([0.5])
def text(response_text, task): return "0.5"
def nothing(response_text, task): return None
def two(response_text, task): return 0.5, "fine"
def imaginary(response_text, task): return 1j
def forgot(response_text, task): return undefined_name
def needs_a_row(response_text, task): return float(task.metadata["key"])
def ends(response_text, task): raise SystemExit(3)
async def waits(response_text, task): return 1.0
waits_partial = functools.partial(waits)
def later(response_text, task): return waits(response_text, task)
def yields(response_text, task): yield 1.0
class Made:
    def __init__(self, response_text, task): pass
class Called:
    def __call__(self, response_text, task): return 0.5
class CalledLater:
    async def __call__(self, response_text, task): return 0.5
class CalledInPieces:
    def __call__(self, response_text, task): yield 0.5
called, called_later, called_in_pieces = Called(), CalledLater(), CalledInPieces()
"""


REFUSED = {
    "one_of_many": "must return a finite number, got array",
    "text": "must return a finite number, got '0.5'",
    "nothing": "must return a finite number, got None",
    "two": "must return a finite number, got (0.5, 'fine')",
    "imaginary": "must return a finite number, got 1j",
    "forgot": "NameError: name 'undefined_name' is not defined",
    "ends": "with exit code 3",
    "waits": "got an async function",
    "waits_partial": "got an async function",
    "later": "must return a finite number, got <coroutine",
    "yields": "got a generator",
    "Made": "got a class",
    "called_later": "got an async function",
    "called_in_pieces": "got a generator",
}


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unfit")
    (folder / "unfit.py").write_text(UNFIT)
    return folder


def test_own_verifiers_whose_result_counts_as_a_number_are_taken(unfit, monkeypatch):
    monkeypatch.chdir(unfit)
    assert check_own([f"unfit:{name}" for name in ("numpy_bool", "array", "float16", "called")]) == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", REFUSED)
def test_own_verifier_that_would_fail_at_each_response_is_refused_in_one_line_before_a_run(unfit, monkeypatch, name):
    monkeypatch.chdir(unfit)
    with pytest.raises(ValueError) as e:
        check_own([f"unfit:{name}"])
    said = str(e.value)
    assert said.startswith(f"prompts.verifier=unfit:{name}") and REFUSED[name] in said and "\n" not in said


@pytest.mark.heavy
def test_own_verifier_that_needs_more_than_a_made_up_row_is_told_of_and_refused_only_on_a_real_one(unfit, monkeypatch):
    monkeypatch.chdir(unfit)
    (line,) = check_own(["unfit:needs_a_row"])
    assert "prompts.verifier=unfit:needs_a_row: failed on a trial" in line and "TypeError" in line
    with pytest.raises(ValueError, match="failed on a trial response: TypeError"):
        check_own(["unfit:needs_a_row"], Task.judged_by("unfit:needs_a_row", answer="1", metadata="{}"))
