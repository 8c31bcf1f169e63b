"""The verifier of programs, in real sandboxes; alone and in the pool's workers."""

import asyncio
import contextlib
import json
import os

import psutil
import pytest

from actor.rewards.adaptive_timeout import AdaptiveTimeouts, task_key
from actor.rewards.registry import gold_response
from actor.rewards.scorer import RewardScorer
from actor.rewards.types import Context, Response, Score
from actor.rewards.verifier_pool import VerifierError, VerifierPool
from actor.rewards.verifier_worker import MAX_MEMORY_BYTES
from actor.rewards.verifiers import code
from actor.sandbox.pool import SandboxHandle
from actor.sandbox.program import Case, LanguageError, Outcome, SandboxUnavailableError
from bridge.rollout_types import Task
from configs.sections import RewardsConfig
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("isolated")]

SETTINGS = RewardsConfig()
SUMS = {"tests": [{"input": f"{a} {b}\n", "output": f"{a + b}\n"} for a, b in ((1, 2), (3, 4), (50, 60))]}
ADD = "print(sum(map(int, input().split())))"
NOT_THE_LAST = "a, b = map(int, input().split())\nprint(a + b if a < 50 else 0)"
C_ADD = '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }'


def response(program: str, language: str = "python") -> Response:
    return Response(text=f"So:\n```{language}\n{program}\n```\n", finish="stop", num_tokens=1)


def task(**metadata) -> Task:
    return Task.judged_by("code", answer="", metadata=json.dumps(metadata))


def judged(program: str, of: Task, *, timeouts_s: tuple[float, ...] = (), **settings) -> Score:
    context = Context(settings=RewardsConfig(**settings), case_timeouts_s=timeouts_s)
    return code.score(response(program), of, context)


def test_right_program_is_ok_with_the_time_of_each_case():
    got = judged(ADD, task(**SUMS))
    assert (got.value, got.verdict) == (1.0, "ok")
    assert len(got.case_s) == 3 and all(0 < s < 30 for s in got.case_s)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>\n```python\n{wrong}\n```\n</think>\n```python\n{right}\n```", 1.0),
        ("```python\n{right}\n```\n</think>\n```python\n{wrong}\n```", 0.0),
        ("<think>\n```python\n{right}\n```", 0.0),
        ("Perhaps\n```python\n{wrong}\n</think>\n```python\n{right}\n```", 1.0),
    ],
)
def test_program_is_looked_for_behind_the_thinking(text, value):
    whole = text.format(right=ADD, wrong="print(0)")
    got = code.score(Response(text=whole, finish="stop", num_tokens=1), task(**SUMS), Context(settings=SETTINGS))
    assert got.value == value


@pytest.mark.parametrize(
    ("program", "partial", "value"),
    [
        (NOT_THE_LAST, False, 0.0),
        (NOT_THE_LAST, True, 2 / 3),
        ("print(0)", True, 0.0),
        ("print(3); raise SystemExit(1)", True, 0.0),  # what it printed is right; it failed all the same
        ("no Python", False, 0.0),
    ],
)
def test_program_that_fails_a_case_is_wrong_and_earns_a_share_only_where_that_is_said(program, partial, value):
    assert judged(program, task(**SUMS), code_partial=partial) == Score(value=value, verdict="wrong")


def test_first_failure_is_the_last_case_that_runs():
    """The second case would time out; the first is wrong."""
    program = "a = input()\nwhile a != '1 2': pass\nprint(0)"
    assert judged(program, task(**SUMS)).verdict == "wrong"


@pytest.mark.parametrize(
    ("timeouts_s", "settings"),
    [
        ((0.2,), {}),
        ((), {"min_timeout_s": 0.1, "max_timeout_s": 0.2}),
        ((30.0,), {"max_answer_s": 0.2}),
    ],
)
def test_program_that_runs_out_of_its_cases_or_the_answers_time_is_a_timeout(timeouts_s, settings):
    got = judged("while True: pass", task(**SUMS), timeouts_s=timeouts_s, **settings)
    assert (got.value, got.verdict, len(got.case_s)) == (0.0, "timeout", 1) and got.case_s[0] >= 0.2


def test_case_may_run_no_longer_than_runs_before_it_left_of_the_answers_time(monkeypatch):
    given, took_s = [], []
    run_case = SandboxHandle.run

    def run(box: SandboxHandle, case: Case, **more) -> Outcome:
        given.append(case.timeout_s)
        outcome = run_case(box, case, **more)
        took_s.append(outcome.seconds)
        return outcome

    monkeypatch.setattr(SandboxHandle, "run", run)
    assert judged(ADD, task(**SUMS), timeouts_s=(3.0, 90.0, 90.0), max_answer_s=60.0).verdict == "ok"
    # Not what passed between them: a new sandbox is no fault of the answer's.
    first_s, second_s, _ = took_s[-3:]  # before them, the sandbox may have been tested
    assert given[-3:] == [3.0, 60.0 - first_s, 60.0 - (first_s + second_s)]


def test_timeouts_are_by_case_and_the_answers_time_is_for_all_of_them():
    slow = f"import time\nwhile time.process_time() < 0.5: pass\n{ADD}"
    got = judged(slow, task(**SUMS), timeouts_s=(30.0, 30.0, 0.1))
    assert got.verdict == "timeout" and len(got.case_s) == 3 and min(got.case_s[:2]) >= 0.5 and got.case_s[2] >= 0.1
    assert judged(slow, task(**SUMS), timeouts_s=(30.0, 30.0, 30.0), max_answer_s=1.2).verdict == "timeout"
    assert judged(slow, task(**SUMS), timeouts_s=(30.0, 30.0)).verdict == "ok"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def f(a, *, b=0, c=0): return [a, (b, c)]", "ok"),
        ("class Solution:\n    def f(self, a, b, c=0): return [a, [b, c]]", "ok"),
        ("def f(a, b, c=0): return [a, b, c]", "wrong"),
        ("def f(a, b, c=0): return {1, 2}", "wrong"),  # no JSON
        ("def g(a, b, c=0): return [a, [b, c]]", "wrong"),
        ("def f(a, b, c=0):\n    while True: pass", "timeout"),
    ],
)
def test_function_is_called_with_arguments_by_position_and_by_name(program, verdict):
    calls = task(tests=[{"call": "f", "args": [7], "kwargs": {"b": n}, "returns": [7, [n, 0]]} for n in (1, 2)])
    assert judged(program, calls, timeouts_s=(1.0, 1.0)).verdict == verdict


def test_response_without_a_program_is_wrong():
    got = code.score(Response(text="4", finish="stop", num_tokens=1), task(**SUMS), Context(settings=SETTINGS))
    assert got == Score(value=0.0, verdict="wrong")
    plain = code.score(
        Response(text=ADD, finish="stop", num_tokens=1), task(**SUMS, code_in="text"), Context(settings=SETTINGS)
    )
    assert plain.verdict == "ok"


@pytest.mark.parametrize(("program", "verdict"), [(C_ADD, "ok"), ("int main() {", "wrong")])
def test_compiled_program_is_judged_and_one_that_does_not_compile_is_wrong(program, verdict):
    if "gcc" not in code.open_sandbox(SETTINGS).tools():
        pytest.skip("the sandbox lacks gcc")
    got = code.score(response(program, "c"), task(**SUMS, language="c"), Context(settings=SETTINGS))
    assert got.verdict == verdict


def test_what_a_case_wants_is_nowhere_in_the_sandbox():
    """A program that looks into its files, environment, arguments and memory's maps for what it should print."""
    secret = "wanted-4711-of-this-case"
    look = (
        "import os, sys, gc\n"
        "found = [sys.stdin.read(), repr(os.environ), repr(sys.argv), repr(gc.get_objects())]\n"
        "for top in ('/scratch', '/tmp', '/dev/shm', '/sluice'):\n"
        "    for folder, _, names in os.walk(top):\n"
        "        for name in names:\n"
        "            try: found.append(open(os.path.join(folder, name), errors='replace').read())\n"
        "            except OSError: pass\n"
        "import re\nkey = '-'.join(['wanted', str(4711)])\n"
        "seen = [m for f in found for m in re.findall(key + r'[-a-z]*', f)]\nprint(seen[0] if seen else 'nothing')"
    )
    of = task(tests=[{"input": "x", "output": "nothing"}, {"input": "y", "output": secret}])
    got = judged(look, of, code_partial=True)
    assert got == Score(value=0.5, verdict="wrong")


def test_row_without_test_cases_or_of_no_language_here_raises_rather_than_scores(monkeypatch):
    with pytest.raises(ValueError, match="requires test cases"):
        judged(ADD, task())
    monkeypatch.setattr(code.open_sandbox(SETTINGS), "_take", lambda: pytest.fail("a sandbox was taken"))
    with pytest.raises(ValueError, match="language: .*got 'cobol'"):
        judged(ADD, task(**SUMS, language="cobol"))


def test_language_whose_compiler_is_not_here_raises(monkeypatch):
    of = code.open_sandbox(SETTINGS)
    take = of._take

    def without_gcc():
        process = take()
        process.tools -= {"gcc"}
        return process

    monkeypatch.setattr(of, "_take", without_gcc)
    with pytest.raises(LanguageError, match="lacks gcc"):
        code.score(response(C_ADD, "c"), task(**SUMS, language="c"), Context(settings=SETTINGS))


def pool(**fields) -> VerifierPool:
    given = {"num_workers": 1, "timeout_s": 30.0, "retries": 0, "settings": SETTINGS} | fields
    return VerifierPool(**given)


async def test_pool_judges_code_in_a_worker_whose_sandboxes_wait_since_it_loaded():
    one = pool()
    try:
        await one.load("code")
        worker = worker_of()
        await asyncio.to_thread(wait_until, lambda: bool(sandboxes_of(worker)), "a sandbox waits", deadline_s=60)
        # What a sandbox may have is bounded by the hard limit of who starts it.
        hard = psutil.Process().rlimit(psutil.RLIMIT_AS)[1]
        assert worker_of().rlimit(psutil.RLIMIT_AS) == (MAX_MEMORY_BYTES, hard)
        right = await one.score("code", response(ADD), task(**SUMS))
        ended = await one.score("code", response("while True: pass"), task(**SUMS), case_timeouts_s=lambda: (0.2,))
        assert (right.verdict, ended.verdict) == ("ok", "timeout")
    finally:
        await one.close()


async def test_worker_that_is_killed_takes_its_sandboxes_and_programs_with_it():
    """As the pool does with one that hangs: SIGKILL."""
    forever = response("import os\nif os.fork() == 0: os.setsid()\nwhile True: pass")
    # Its own clock is none that ends it here.
    one = pool(settings=RewardsConfig(max_timeout_s=600.0, max_answer_s=600.0))
    await one.load("code")
    judging = asyncio.create_task(one.score("code", forever, task(**SUMS)))
    worker = worker_of()
    await asyncio.to_thread(wait_until, lambda: len(programs_of(worker)) == 2, "a program runs", deadline_s=60)
    below = worker.children(recursive=True)
    judging.cancel()  # the pool kills who was asked
    await asyncio.gather(judging, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not any(is_running(p) for p in below), "all is gone", deadline_s=30)
    assert await one.score("code", response(ADD), task(**SUMS)) is not None  # by a new one
    await one.close()


async def test_worker_that_ends_in_order_leaves_nothing():
    one = pool()
    await one.load("code")
    worker = worker_of()
    await asyncio.to_thread(wait_until, lambda: bool(sandboxes_of(worker)), "a sandbox waits", deadline_s=60)
    below = sandboxes_of(worker)
    for w in one._workers:  # its input ends, as when the actor closes it
        w.close_input()
    await asyncio.to_thread(wait_until, lambda: not any(map(is_running, [worker, *below])), "gone", deadline_s=30)
    await one.close()


async def test_machine_that_can_not_isolate_is_no_reward_but_an_error_that_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    one = pool()
    try:
        with pytest.raises(VerifierError, match="SandboxUnavailableError: .*bubblewrap is not installed: apt-get"):
            await one.load("code")
        with pytest.raises(VerifierError, match="bubblewrap is not installed"):
            await one.score("code", response(ADD), task(**SUMS))
    finally:
        await one.close()


def test_worker_without_isolation_raises_it_at_load(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match="bubblewrap is not installed"):
        code.prepare(RewardsConfig(sandbox_memory_mib=333))


async def test_right_runs_shorten_the_timeout_of_the_same_cases_and_hanging_ones_do_not():
    """RollPacker 4.3 through the scheduler, with a store's anchors in between."""

    class Store:
        def __init__(self):
            self.known = {}

        def anchors(self, keys):
            return {k: self.known[k] for k in keys if k in self.known}

        def raise_anchors(self, told):
            self.known |= told

    store = Store()
    anchors = AdaptiveTimeouts(store, factor=1.5, min_s=0.3, max_s=20.0)  # pyright: ignore[reportArgumentType]
    rewards = RewardScorer(pool(), anchors=anchors)
    of = task(**SUMS)
    hanging = response("import time; time.sleep(1000)")
    assert (await rewards.score(response(ADD), of)).reward == 1.0
    known = anchors.timeouts_s(task_key(of))
    assert len(known) == 3 and max(known) < 20.0
    judged = await rewards.score(hanging, of)
    assert [s.verdict for s in judged.scores] == ["timeout"] and judged.reward == 0.0
    await rewards.close()
    assert set(store.known) == {task_key(of)} and len(store.known[task_key(of)]) == 3


async def test_hanging_answer_that_began_before_its_first_right_sibling_has_the_siblings_timeout():
    """RollPacker 4.3: the deadline follows the anchor while an answer runs."""

    class Store:
        def anchors(self, keys):
            return {}

        def raise_anchors(self, told):
            pass

    settings = RewardsConfig(max_timeout_s=10_000.0, max_answer_s=10_000.0)
    anchors = AdaptiveTimeouts(Store(), factor=1.5, min_s=0.3, max_s=10_000.0)  # pyright: ignore[reportArgumentType]
    rewards = RewardScorer(pool(num_workers=2, settings=settings), anchors=anchors)
    of = task(**SUMS)
    hanging = asyncio.create_task(rewards.score(response("while True: pass"), of))
    await asyncio.to_thread(wait_until, lambda: any(map(programs_of, workers())), "it runs", deadline_s=60)
    assert (await rewards.score(response(ADD), of)).reward == 1.0
    assert [s.verdict for s in (await hanging).scores] == ["timeout"]
    await rewards.close()


STARTER = {
    "typing": "class Solution:\n    def f(self, x: List[int]) -> Optional[Dict[str, Any]]: return x",
    "collections": "def f(x): return list(deque(x))",
    "modules": "def f(x): return [math.floor(v + heapq.heappop([0])) for v in collections.deque(x)]",
    "functions": "@cache\ndef one(v): return v\ndef f(x): return [one(gcd(v, v)) for v in accumulate(x, max)]",
    "its own": "def gcd(a, b): return a\ndef f(x): return [gcd(v, 0) for v in x]",
    "builtins": "def f(x): return [pow(v, 1, 10**9) for v in x]",
}
"""Programs that return [1, 2] for [1, 2] with LeetCode's imports, as its starter code has them."""


@pytest.mark.parametrize("name", STARTER)
def test_function_has_what_leetcode_has_imported(name):
    calls = task(tests=[{"call": "f", "args": [[1, 2]], "returns": [1, 2]}])
    assert judged(STARTER[name], calls).verdict == "ok"


async def test_rows_own_solution_is_run_once_when_its_group_begins_and_gives_the_first_anchors():
    class Store:
        def anchors(self, keys):
            return {}

        def raise_anchors(self, told):
            pass

    anchors = AdaptiveTimeouts(Store(), factor=1.5, min_s=0.3, max_s=20.0)  # pyright: ignore[reportArgumentType]
    one, asked = pool(), []
    ask = one.score
    one.score = lambda *given, **more: asked.append(given) or ask(*given, **more)  # pyright: ignore[reportAttributeAccessIssue]
    rewards = RewardScorer(one, anchors=anchors)
    own, none = task(**SUMS, solution=ADD), task(**SUMS, solution="print(0)")
    for of in (own, none, task(**SUMS), own):
        rewards.begin(of)
    runs = dict(rewards._own_runs)
    assert set(runs) == {task_key(own), task_key(none)}
    await asyncio.gather(*runs.values())
    assert len(anchors.timeouts_s(task_key(own))) == 3 and anchors.timeouts_s(task_key(none)) == ()
    rewards.begin(own)
    assert rewards._own_runs == runs and len(asked) == 2
    await rewards.close()


@pytest.mark.parametrize("code_in", ["block", "text"])
def test_own_answer_of_a_row_is_its_solution_where_the_program_is_looked_for(code_in):
    of = task(**SUMS, solution=ADD)
    settings = RewardsConfig(code_in=code_in)
    text = gold_response("code", of, settings)
    got = code.score(Response(text=text, finish="stop", num_tokens=1), of, Context(settings=settings))
    assert got.verdict == "ok"
    assert gold_response("code", task(**SUMS), settings) == ""


def workers() -> list[psutil.Process]:
    """The pool's, children of this process."""
    return [
        p for p in psutil.Process(os.getpid()).children() if "actor.rewards.verifier_worker" in " ".join(p.cmdline())
    ]


def worker_of() -> psutil.Process:
    (found,) = workers()
    return found


def sandboxes_of(worker: psutil.Process) -> list[psutil.Process]:
    return worker.children(recursive=True)


def programs_of(worker: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in sandboxes_of(worker):
        with contextlib.suppress(psutil.Error):  # it ended
            found += [process] * (process.cmdline()[-1:] == ["main.py"])
    return found


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
