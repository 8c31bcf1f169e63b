"""Verifier `code`: runs a response's program on test cases in a worker's sandboxes and compares the results."""

import atexit
import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from actor.rewards.types import Context, Response, Score
from actor.rewards.verifiers.code_block import program_text
from actor.sandbox import languages
from actor.sandbox.bwrap import HostView
from actor.sandbox.pool import Sandbox, SandboxHandle
from actor.sandbox.program import MIB, Call, Case, CompileError, Outcome, SandboxLimits
from actor.sandbox.self_test import check_isolation
from bridge import code_tests
from bridge.code_tests import CodeTests, Compare, Printed, Returned
from bridge.rollout_types import Task, Verdict
from configs.sections import RewardsConfig

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
"""Unambiguous on runs of digits: two ways to read one would make a long run quadratic."""
_WHOLE = re.compile(r"[+-]?\d+")


def is_printed(got: str, wanted: str, compare: Compare, tolerance: float) -> bool:
    """Returns True if standard output is right (`bridge.code_tests.Compare`)."""
    if compare == "exact":
        return _without_end(got) == _without_end(wanted)
    said, asked = got.split(), wanted.split()
    if compare == "tokens":
        return said == asked
    return len(said) == len(asked) and all(_near_text(a, b, tolerance) for a, b in zip(said, asked, strict=True))


def is_returned(got: Any, wanted: Any, compare: Compare, tolerance: float) -> bool:
    """Returns True if a function's result is right, compared as JSON values, so that a tuple equals a list."""
    if isinstance(wanted, list):
        return (
            isinstance(got, list)
            and len(got) == len(wanted)
            and all(is_returned(a, b, compare, tolerance) for a, b in zip(got, wanted, strict=True))
        )
    if isinstance(wanted, Mapping):
        return (
            isinstance(got, Mapping)
            and got.keys() == wanted.keys()
            and all(is_returned(got[key], wanted[key], compare, tolerance) for key in wanted)
        )
    if _is_number(got) and _is_number(wanted):
        return _is_same_number(got, wanted, compare, tolerance)
    return type(got) is type(wanted) and got == wanted


def as_json(value: Any) -> Any:
    """Returns a value after a round trip through JSON; raises ValueError if the value has no JSON form."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, RecursionError) as e:
        raise ValueError(f"a test case's expected value must be JSON: {type(e).__name__}") from e


def _without_end(text: str) -> str:
    return text.replace("\r\n", "\n").rstrip("\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same_number(got: float, wanted: float, compare: Compare, tolerance: float) -> bool:
    if compare == "exact" and type(got) is not type(wanted):
        return False
    if got == wanted or (got != got and wanted != wanted):
        return True
    # Whole numbers must be equal.
    return (
        compare == "float" and not (isinstance(got, int) and isinstance(wanted, int)) and _near(got, wanted, tolerance)
    )


def _near_text(got: str, wanted: str, tolerance: float) -> bool:
    if got == wanted:
        return True
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(wanted)):
        return False
    if _WHOLE.fullmatch(got) and _WHOLE.fullmatch(wanted):
        return got.lstrip("+") == wanted.lstrip("+")
    return _near(float(got), float(wanted), tolerance)


def _near(got: float, wanted: float, tolerance: float) -> bool:
    try:
        a, b = float(got), float(wanted)
    except OverflowError:  # a whole number beyond float64
        return False
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))


NUM_WARM = 2
"""Idle sandboxes per verifier process, about 10 MiB each."""
_open: dict[tuple[SandboxLimits, HostView], Sandbox] = {}


def limits_of(settings: RewardsConfig) -> SandboxLimits:
    """Returns the limits of a program's sandbox; CPU time above that of the longest case."""
    return SandboxLimits(
        cpu_s=max(SandboxLimits.cpu_s, math.ceil(settings.max_timeout_s) + 1),
        memory_bytes=settings.sandbox_memory_mib * MIB,
        address_space_bytes=2 * settings.sandbox_memory_mib * MIB,
    )


def view_of(settings: RewardsConfig) -> HostView:
    """Returns the view of the host that programs get."""
    return HostView(packages=settings.package_names)


def open_sandbox(settings: RewardsConfig) -> Sandbox:
    """Returns this process's sandboxes, created at the first call after an isolation test.

    Raises SandboxUnavailableError if this machine cannot isolate programs; no program runs.
    """
    limits, view = limits_of(settings), view_of(settings)
    if (limits, view) not in _open:
        # Tests the machine: probes need other limits than programs.
        check_isolation(view=view)
        _open[limits, view] = Sandbox(limits, num_warm=NUM_WARM, view=view)
    return _open[limits, view]


@atexit.register
def close() -> None:
    """Closes this process's sandboxes."""
    while _open:
        _open.popitem()[1].close()


def prepare(settings: RewardsConfig) -> None:
    """Creates this process's sandboxes, so that the first response does not wait; raises as `open_sandbox`."""
    open_sandbox(settings)


def score(response: Response, task: Task, context: Context) -> Score:
    """Returns 1 if the program passes all test cases, run in order until one fails, else 0.

    With `rewards.code_partial` a failure scores the fraction of cases passed before it; its verdict is unchanged. A
    response without a program, or whose program does not compile, is wrong. Expected results never enter the sandbox.

    Raises ValueError if the row's test cases are invalid (LanguageError: their language is unavailable), SandboxError
    if no sandbox was available, and SandboxUnavailableError if this machine cannot isolate programs.
    """
    tests = code_tests.read(json.loads(task.metadata))
    settings = context.settings
    sandbox = open_sandbox(settings)
    functions = {case.function for case in tests.cases if isinstance(case, Returned)}
    reads = any(isinstance(case, Printed) and case.stdin.strip() for case in tests.cases)
    where = tests.code_in or settings.code_in
    text = program_text(response.answer, tests.language, where, functions=functions, reads=reads)
    if text is None or len(text.encode("utf-8", "replace")) > sandbox.limits.disk_bytes:
        return _failed("wrong", 0, tests, settings)
    program = languages.program(tests.language, text, calls=tests.are_calls)
    try:
        with sandbox.open(program) as box:
            return _judge(box, tests, text, context)
    except CompileError:
        return _failed("wrong", 0, tests, settings)


def _judge(box: SandboxHandle, tests: CodeTests, text: str, context: Context) -> Score:
    settings = context.settings
    case_s: list[float] = []
    for index, test in enumerate(tests.cases):
        left_s = settings.max_answer_s - sum(case_s)
        if left_s <= 0:
            return _failed("timeout", index, tests, settings)
        timeout_s = functools.partial(_timeout_s, context, index, left_s)
        outcome = box.run(_case(test, text, timeout_s()), timeout_s=timeout_s)
        if outcome.ended == "cpu":
            return _failed("timeout", index, tests, settings)
        if outcome.ended == "timeout":
            return _failed("timeout", index, tests, settings, case_s=(*case_s, outcome.seconds))
        if not _passes(outcome, test, tests):
            return _failed("wrong", index, tests, settings)
        case_s.append(outcome.seconds)
    return Score(value=1.0, verdict="ok", case_s=tuple(case_s))


def _timeout_s(context: Context, index: int, left_s: float) -> float:
    known = tuple(context.case_timeouts_s)
    return min(known[index] if index < len(known) else context.settings.max_timeout_s, left_s)


def _failed(
    verdict: Verdict, num_passed: int, tests: CodeTests, settings: RewardsConfig, *, case_s: tuple[float, ...] = ()
) -> Score:
    share = num_passed / len(tests.cases) if settings.code_partial else 0.0
    return Score(value=share, verdict=verdict, case_s=case_s)


def _case(test: Printed | Returned, text: str, timeout_s: float) -> Case:
    if isinstance(test, Printed):
        return Case(timeout_s=timeout_s, stdin=test.stdin.encode("utf-8", "replace"))
    call = Call(function=_found(test.function, text), arguments=test.arguments, keywords=test.keywords)
    return Case(timeout_s=timeout_s, call=call)


def _found(function: str, text: str) -> str:
    """Returns the function's path in the program: datasets name a method of `class Solution` without its class."""
    if "." in function or re.search(rf"^(async\s+)?def\s+{re.escape(function)}\b", text, re.MULTILINE):
        return function
    return f"Solution.{function}" if re.search(r"^class\s+Solution\b", text, re.MULTILINE) else function


def _passes(outcome: Outcome, test: Printed | Returned, tests: CodeTests) -> bool:
    if not outcome.succeeded:
        return False
    if isinstance(test, Printed):
        return is_printed(outcome.stdout.decode("utf-8", "replace"), test.stdout, tests.compare, tests.tolerance)
    try:
        result = outcome.result()
    except ValueError:
        return False
    return any(is_returned(result, as_json(wanted), tests.compare, tests.tolerance) for wanted in test.wanted)
