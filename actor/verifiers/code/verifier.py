"""Whether the program in a response passes the test cases of its row (metadata: `bridge.code_tests`)."""

import functools
import json
import re

from actor.sandbox import languages
from actor.sandbox.pool import Box
from actor.sandbox.program import Call, Case, CompileError, Outcome
from actor.verifiers.code import sandboxes
from actor.verifiers.code.answer import program_text
from actor.verifiers.code.compare import as_json, is_printed, is_returned
from actor.verifiers.judged import Context, Response, Score
from bridge import code_tests
from bridge.code_tests import CodeTests, Printed, Returned
from bridge.types import Task, Verdict
from configs.sections import RewardsConfig


def prepare(settings: RewardsConfig) -> None:
    """Makes this process's sandboxes, so that the first response need not wait.

    Raises:
      SandboxUnavailableError: this machine can't isolate a program; says what is missing.
    """
    sandboxes.sandbox(settings)


def score(response: Response, task: Task, context: Context) -> Score:
    """1 if the program passes all test cases, run one after the other until one fails; else 0.

    With `rewards.code_partial` a failure earns the share of cases that were passed before it; its verdict stays what it
    is. A response without a program is wrong, and so is one that does not compile. What a case wants never enters the
    sandbox.

    Raises:
      ValueError: the row's test cases are none (LanguageError: or of a language that isn't here).
      SandboxError: no sandbox could be had.
      SandboxUnavailableError: this machine can't isolate a program.
    """
    tests = code_tests.read(json.loads(task.metadata))
    settings = context.settings
    sandbox = sandboxes.sandbox(settings)
    text = _program_text(response, tests, settings)
    if text is None or len(text.encode("utf-8", "replace")) > sandbox.limits.disk_bytes:
        return _failed("wrong", 0, tests, settings)
    program = languages.program(tests.language, text, calls=tests.are_calls)
    try:
        with sandbox.open(program) as box:
            return _judge(box, tests, text, context)
    except CompileError:
        return _failed("wrong", 0, tests, settings)


def _program_text(response: Response, tests: CodeTests, settings: RewardsConfig) -> str | None:
    functions = {case.function for case in tests.cases if isinstance(case, Returned)}
    reads = any(isinstance(case, Printed) and case.stdin.strip() for case in tests.cases)
    where = tests.code_in or settings.code_in
    return program_text(response.answer, tests.language, where, functions=functions, reads=reads)


def _judge(box: Box, tests: CodeTests, text: str, context: Context) -> Score:
    settings = context.settings
    case_s: list[float] = []
    for index, test in enumerate(tests.cases):
        left_s = settings.max_answer_s - sum(case_s)
        if left_s <= 0:
            return _failed("timeout", index, tests, settings)
        timeout_s = functools.partial(_timeout_s, context, index, left_s)
        outcome = box.run(_case(test, text, timeout_s()), timeout_s=timeout_s)
        if outcome.ended in ("timeout", "cpu"):
            return _failed("timeout", index, tests, settings)
        if not _passes(outcome, test, tests):
            return _failed("wrong", index, tests, settings)
        case_s.append(outcome.seconds)
    return Score(value=1.0, verdict="ok", case_s=tuple(case_s))


def _timeout_s(context: Context, index: int, left_s: float) -> float:
    """The timeout of a case, as it is known now."""
    known = tuple(context.case_timeouts_s)
    return min(known[index] if index < len(known) else context.settings.max_timeout_s, left_s)


def _failed(verdict: Verdict, num_passed: int, tests: CodeTests, settings: RewardsConfig) -> Score:
    share = num_passed / len(tests.cases) if settings.code_partial else 0.0
    return Score(value=share, verdict=verdict)


def _case(test: Printed | Returned, text: str, timeout_s: float) -> Case:
    if isinstance(test, Printed):
        return Case(timeout_s=timeout_s, stdin=test.stdin.encode("utf-8", "replace"))
    call = Call(function=_found(test.function, text), arguments=test.arguments, keywords=test.keywords)
    return Case(timeout_s=timeout_s, call=call)


def _found(function: str, text: str) -> str:
    """Where the program has the function: data sets name a method of `class Solution` without its class."""
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
