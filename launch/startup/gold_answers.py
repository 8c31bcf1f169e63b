"""Startup check that each row's reference answer passes its verifiers."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from absl import logging

from actor.rewards.registry import gold_response
from actor.rewards.types import Response
from actor.rewards.verifier_pool import RaisedError, VerifierError, VerifierPool
from actor.sandbox.languages import TOOLS
from bridge.files import replace_file
from configs import custom_functions
from configs.run_folder import RunFolder
from configs.schema import Config
from launch.startup.provenance import versions
from launch.startup.tiny_model import cache_folder
from learner.data.row_filter import GoldRow, SetAside, gold_rows, read_gold_failures

NOT_ASKED = ("judge", "format")
"""Verifiers not checked: a judge is costly, and a reference answer lacks the format of a response."""
REVISION = 3
"""Cache revision; increase it when scoring of the same answers changes."""
PROGRESS_S = 10.0
MAX_WORKERS = 8
_LIBRARIES = ("math-verify", "reasoning-gym", "latex2sympy2-extended")
_Failed = dict[tuple[str, int], str]
"""Failure reasons by source and row."""


def check_gold_answers(
    config: Config, roles: Collection[str], *, show: Callable[[str], None] = print
) -> tuple[SetAside, list[str]]:
    """Scores reference answers: `rewards.check_gold_answers` rows spread over each file, or all rows if one fails.

    Returns the rows that fail, and notes for the console. A run that was set up before is not checked again. Results
    are cached by content. `show` is called with a progress line now and then. Raises ValueError if a file is invalid or
    no row passes. An unavailable verifier also raises it if `roles` contain "actor", and otherwise only adds a note.
    """
    known = RunFolder(pathlib.Path(config.run_dir)).gold_failures
    if known.is_file():
        return read_gold_failures(known), []
    num = config.rewards.check_gold_answers
    rows = list(gold_rows(config.prompts, limit=num)) if num else []
    if not rows:
        return {}, []
    names, notes = _names(config, rows, roles)
    failed = _judged(config, rows, names, show)
    if failed and len(everything := list(gold_rows(config.prompts))) > len(rows):
        show(f"reference answers: {len(failed)} of {len(rows)} rows fail; checking all {len(everything)} rows")
        rows = everything
        names, notes = _names(config, rows, roles)
        failed = _judged(config, rows, names, show)
    num_asked = sum(1 for row in rows if _asked(config, row, names))
    if failed and len(failed) == num_asked:
        (source, row), reason = next(iter(failed.items()))
        raise ValueError(
            f"reference answers: no row passes its verifiers; row {row}{f' of {source}' if source else ''}: {reason}; "
            "fix the rows, or set rewards.check_gold_answers=0"
        )
    gold_failures: dict[str, dict[int, str]] = {}
    for (source, row), reason in failed.items():
        gold_failures.setdefault(source, {})[row] = reason
    if num_asked:
        notes.append(f"reference answers: {num_asked} rows checked, {len(failed)} excluded")
    return gold_failures, notes


def _names(config: Config, rows: Iterable[GoldRow], roles: Collection[str]) -> tuple[frozenset[str], list[str]]:
    """Returns the available verifiers, and a note per unavailable one; if an actor runs here, one raises ValueError."""
    wanted = sorted({name for row in rows for name, _ in _questions(config, row)})
    problems = asyncio.run(_load(config, wanted)) if wanted else {}
    if problems and "actor" in roles:
        raise ValueError("; ".join(f"verifier {name}, which rows name: {said}" for name, said in problems.items()))
    notes = [
        f"note: reference answers are not checked by verifier {n} on this machine: {said}"
        for n, said in problems.items()
    ]
    return frozenset(wanted) - frozenset(problems), notes


async def _load(config: Config, names: Sequence[str]) -> dict[str, str]:
    problems = {}
    pool = VerifierPool.of_config(config, num_workers=1)
    try:
        for name in names:
            try:
                await pool.load(name)
            except VerifierError as e:
                problems[name] = str(e)
    finally:
        await pool.close()
    return problems


def _questions(config: Config, row: GoldRow) -> list[tuple[str, str]]:
    parts = [part.name for part in row.task.rewards if part.weight > 0 and part.name not in NOT_ASKED]
    asked = [(name, gold_response(name, row.task, config.rewards)) for name in parts]
    return [(name, text) for name, text in asked if text]


def _asked(config: Config, row: GoldRow, names: Collection[str]) -> list[tuple[str, str]]:
    """Returns the available verifiers that score the row's reference answer, each with the text that it scores."""
    return [(name, text) for name, text in _questions(config, row) if name in names]


def _judged(config: Config, rows: Sequence[GoldRow], names: frozenset[str], show: Callable[[str], None]) -> _Failed:
    """Returns the rows that fail, from the cache if the same rows were scored before."""
    asked = [(row, questions) for row in rows if (questions := _asked(config, row, names))]
    # The source of a custom function may have changed, so do not cache.
    key = "" if any(map(custom_functions.is_custom, names)) else _key(config, asked)
    if key:
        with contextlib.suppress(OSError, ValueError):  # missing or truncated cache file
            found = json.loads((cache_folder() / "own_answers" / f"{key}.json").read_text())
            return {(source, row): reason for source, row, reason in found}
    failed, unscored = asyncio.run(_judge_all(config, asked, show))
    if unscored:
        why = next(iter(unscored.values()))
        show(f"reference answers: {len(unscored)} rows not checked, kept until the next run checks them: {why}")
    elif key:
        try:
            file = cache_folder() / "own_answers" / f"{key}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps([[*row, reason] for row, reason in failed.items()]).encode())
        except (OSError, ValueError) as e:
            logging.warning("reference answer results not cached error=%s", e)
    return failed


def _key(config: Config, asked: Sequence[tuple[GoldRow, list[tuple[str, str]]]]) -> str:
    """Returns a hash of everything a verdict depends on: answers, test cases, timeouts, libraries, compilers."""
    tools = [tool for tool in sorted(TOOLS) if shutil.which(tool)]
    digest = hashlib.sha256()
    bounds = [dataclasses.asdict(config.rewards), config.actor.verifier_timeout_s]
    for part in (REVISION, versions(_LIBRARIES), tools, bounds):
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
    for row, questions in asked:
        digest.update(json.dumps([row.source, row.row, row.task.answer, row.task.metadata, questions]).encode() + b"\n")
    return digest.hexdigest()[:32]


async def _judge_all(
    config: Config, asked: Sequence[tuple[GoldRow, list[tuple[str, str]]]], show: Callable[[str], None]
) -> tuple[_Failed, _Failed]:
    """Returns the rows that fail, and the rows that could not be scored."""
    num_workers = max(config.actor.verifier_workers, min(MAX_WORKERS, os.cpu_count() or 1, len(asked)))
    pool = VerifierPool.of_config(config, num_workers=num_workers)
    failed: _Failed = {}
    unscored: _Failed = {}
    left = iter(asked)
    num_done = 0
    shown_s = time.monotonic()

    async def judge_some() -> None:
        nonlocal num_done, shown_s
        for row, questions in left:
            try:
                reason = await _judge(pool, row, questions)
            except VerifierError as e:
                reason, unscored[row.source, row.row] = "", str(e)
            num_done += 1
            if reason:
                failed[row.source, row.row] = reason
            if time.monotonic() > shown_s + PROGRESS_S:
                shown_s = time.monotonic()
                show(f"reference answers: {num_done} of {len(asked)} rows checked, {len(failed)} failed")

    try:
        async with asyncio.TaskGroup() as judging:
            for _ in itertools.repeat(None, num_workers):
                judging.create_task(judge_some())
    finally:
        await pool.close()
    order = {(row.source, row.row): i for i, (row, _) in enumerate(asked)}
    return dict(sorted(failed.items(), key=lambda item: order[item[0]])), unscored


async def _judge(pool: VerifierPool, row: GoldRow, questions: Sequence[tuple[str, str]]) -> str:
    for name, text in questions:
        try:
            score = await pool.score(
                name, Response(text=text, finish="stop", num_tokens=1, begun_by_prompt=""), row.task
            )
        except RaisedError as e:
            return f"reference answer cannot be scored: {e}"
        if score.verdict != "ok":
            return f"reference answer fails: verifier {name} returns {score.verdict}"
    return ""
