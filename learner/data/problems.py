"""Problems: a question, its prompt tokens and how its answer is judged. No jax here.

They come from a reasoning-gym task (endless, by index) or from the rows of a file. Which ones are
held out for evaluation is decided by a hash of the question's text, so a held-out question can
enter training from no index, epoch or seed.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import reasoning_gym
from jaxtyping import Int32

from bridge.types import RewardPart, Task
from configs.schema import Config
from configs.sections import PromptsConfig
from learner.data.tokenizer import Message, Tokenizer

NUM_PROCEDURAL = 2**31 - 1
"""Indices a procedural task has; each is another problem (some of the same text)."""

_EVAL_SEED = 1_000_003
_MAX_DRAWS = 200_000


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt and its judge."""

    question: str
    prompt_tokens: Int32[np.ndarray, " P"]
    task: Task


@dataclasses.dataclass(frozen=True)
class RawProblem:
    """A problem before tokenization."""

    question: str
    messages: tuple[Message, ...]
    """Set when the row holds a conversation; else the question is the prompt."""
    task: Task
    row: int = 0
    """The row of the file it came from, counted from 1; 0 for a procedural problem."""


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that was set aside, and why."""

    row: int
    """Counted from 1."""
    reason: str


class ReasoningGymSource:
    """A procedural task: problem i is a function of (seed, i)."""

    def __init__(self, config: PromptsConfig, *, seed: int) -> None:
        """Makes the library's data set.

        Raises:
          ValueError: no such task family, or the task refuses `prompts.task_args`.
        """
        try:
            self._dataset = reasoning_gym.create_dataset(
                config.task, size=NUM_PROCEDURAL, seed=seed, **config.task_args
            )
        except (ValueError, AssertionError, TypeError) as e:
            raise ValueError(f"prompts.task={config.task!r} with task_args {config.task_args}: {e}") from e
        self._pattern = re.compile(config.pattern) if config.pattern else None
        self._config = config

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> RawProblem:
        """Problem `index`.

        Raises:
          ValueError: `prompts.pattern` is not found in the question.
        """
        entry = self._dataset[index]
        question = entry["question"]
        if self._pattern is not None:
            found = self._pattern.search(question)
            if found is None:
                raise ValueError(f"prompts.pattern {self._pattern.pattern!r} is not in {question!r}")
            question = found.group(1)
        return RawProblem(question, (), task_of(entry["answer"], self._config, entry=entry))


def task_of(answer: str | int | float, config: PromptsConfig, *, entry: dict[str, Any] | None = None) -> Task:
    """What a response is judged by; its metadata is what the configured verifier reads of it.

    Args:
      answer: text or a number.
      config: names the verifier, and where verifier=math looks for an answer.
      entry: the library's, of a procedural problem.
    """
    metadata = dict(entry or {}) if set(config.parts) - {"math"} else {}
    if "math" in config.parts:
        metadata |= {"answer_in": config.answer_in}
    return Task(
        rewards=tuple(RewardPart(name, weight) for name, weight in config.parts.items()),
        answer=str(answer),
        metadata=json.dumps(metadata, default=str),
    )


def read_rows(path: str, config: PromptsConfig) -> tuple[list[RawProblem], list[BadRow]]:
    """Reads a .jsonl or .parquet file of problems; malformed rows are set aside with their numbers.

    A prompt is text, or a conversation (a list of {role, content}); an answer is text or a number.

    Raises:
      ValueError: no such file, another format, or not one good row.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"no prompts file {path!r}")
    if file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompts must be .jsonl or .parquet, got {path!r}")
    good, bad = [], []
    for number, row in _rows(file):
        problem = row if isinstance(row, str) else _parse_row(number, row, config)
        if isinstance(problem, str):
            bad.append(BadRow(number, problem))
        else:
            good.append(problem)
    if not good:
        first = f"; the first: row {bad[0].row}: {bad[0].reason}" if bad else ""
        raise ValueError(f"{path} has no usable row ({len(bad)} malformed{first})")
    return good, bad


def is_held_out(question: str, one_in: int) -> bool:
    """Whether a question belongs to evaluation, by its text alone."""
    digest = hashlib.sha256(question.strip().encode()).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0


def tokenize(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> Problem:
    """Renders and tokenizes a prompt."""
    chat = config.chat_template == "on" or (config.chat_template == "auto" and tokenizer.chat_template != "")
    if chat:
        messages = raw.messages or ({"role": "user", "content": raw.question},)
        if config.system_prompt and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": config.system_prompt}, *messages)
        text = tokenizer.render_chat(messages)
    else:
        text = config.system_prompt + raw.question
        if config.add_bos:
            text = tokenizer.special_tokens.get("bos_token", "") + text
    return Problem(raw.question, tokenizer.encode(text), raw.task)


def set_aside_long(
    problems: Sequence[RawProblem], tokenizer: Tokenizer, config: PromptsConfig, *, max_tokens: int
) -> tuple[list[Problem], list[BadRow]]:
    """Tokenizes all; prompts that are empty or longer than the bound are set aside.

    Raises:
      ValueError: none is left.
    """
    good, bad = [], []
    for raw in problems:
        problem = tokenize(raw, tokenizer, config)
        if 0 < problem.prompt_tokens.size <= max_tokens:
            good.append(problem)
        else:
            bad.append(BadRow(raw.row, f"prompt has {problem.prompt_tokens.size} tokens, want 1 to {max_tokens}"))
    if not good:
        raise ValueError(
            f"no prompt fits: all {len(bad)} are empty or longer than {max_tokens} tokens "
            "(model.max_tokens - sampling.max_response_tokens)"
        )
    return good, bad


def max_prompt_tokens(config: Config) -> int:
    """Tokens that the response leaves for a prompt."""
    return config.model.max_tokens - config.sampling.max_response_tokens


def load_held_out(config: Config, tokenizer: Tokenizer) -> list[Problem]:
    """The procedural task's held-out problems: distinct, and the same whatever the run's seed.

    Raises:
      ValueError: the task has too few, or a prompt that is too long.
    """
    if config.evaluation.num_problems == 0:
        return []
    source = ReasoningGymSource(config.prompts, seed=_EVAL_SEED)
    found: dict[str, Problem] = {}
    for index in range(_MAX_DRAWS):
        raw = source[index]
        if raw.question not in found and is_held_out(raw.question, config.prompts.held_out_one_in):
            found[raw.question] = tokenize(raw, tokenizer, config.prompts)
        if len(found) == config.evaluation.num_problems:
            break
    else:
        raise ValueError(
            f"prompts.task={config.prompts.task!r} has only {len(found)} distinct held-out problems in "
            f"{_MAX_DRAWS} draws; lower evaluation.num_problems ({config.evaluation.num_problems}) or widen "
            "prompts.task_args"
        )
    longest = max(p.prompt_tokens.size for p in found.values())
    if longest > max_prompt_tokens(config):
        raise ValueError(
            f"prompts of {config.prompts.task!r} have up to {longest} tokens; model.max_tokens - "
            f"sampling.max_response_tokens leaves {max_prompt_tokens(config)}"
        )
    return list(found.values())


def load_file(config: Config, tokenizer: Tokenizer) -> tuple[list[Problem], list[Problem], list[BadRow]]:
    """A file's problems: to train on, held out, and the rows set aside.

    Raises:
      ValueError: the file is unusable, or leaves nothing to train on or to evaluate.
    """
    prompts = config.prompts
    rows, bad = read_rows(prompts.path, prompts)
    if prompts.eval_path:
        eval_rows, eval_bad = read_rows(prompts.eval_path, prompts)
        held_out_texts = {r.question.strip() for r in eval_rows}
        train_rows = [r for r in rows if r.question.strip() not in held_out_texts]
    else:
        eval_bad = []
        eval_rows = [r for r in rows if is_held_out(r.question, prompts.held_out_one_in)]
        train_rows = [r for r in rows if not is_held_out(r.question, prompts.held_out_one_in)]
    if not train_rows or (not eval_rows and config.evaluation.num_problems > 0):
        raise ValueError(
            f"{prompts.path}: {len(train_rows)} rows to train on and {len(eval_rows)} held out; both are "
            "needed (set prompts.eval_path, or change prompts.held_out_one_in)"
        )
    bound = max_prompt_tokens(config)
    train, too_long = set_aside_long(train_rows, tokenizer, prompts, max_tokens=bound)
    if config.evaluation.num_problems == 0:
        return train, [], bad + too_long
    held_out, eval_too_long = set_aside_long(eval_rows, tokenizer, prompts, max_tokens=bound)
    eval_bad = eval_bad + eval_too_long
    if prompts.eval_path:  # a row number alone would point into the training file
        eval_bad = [BadRow(b.row, f"of {prompts.eval_path}: {b.reason}") for b in eval_bad]
    return train, held_out[: config.evaluation.num_problems], bad + too_long + eval_bad


def write_quarantine(file: pathlib.Path, source: str, bad: Sequence[BadRow]) -> None:
    """Appends set-aside rows to the run's quarantine file."""
    with open(file, "a", encoding="utf-8") as out:
        for row in bad:
            out.write(json.dumps({"source": source, "row": row.row, "reason": row.reason}) + "\n")


def _rows(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(row number from 1, the row, or why it can't be read)."""
    if file.suffix == ".parquet":
        import pyarrow.parquet  # only where a parquet file is used

        try:
            table = pyarrow.parquet.read_table(file)
        except Exception as e:  # pyarrow has no common base class for its errors
            raise ValueError(f"{file} is no parquet file: {e}") from e
        yield from enumerate(table.to_pylist(), start=1)
        return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as e:
                yield number, f"not JSON: {e}"
                continue
            yield number, row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def _parse_row(number: int, row: dict[str, Any], config: PromptsConfig) -> RawProblem | str:
    missing = [f for f in (config.prompt_field, config.answer_field) if row.get(f) is None]
    if missing:
        return f"no field {' and no field '.join(map(repr, missing))} (fields: {', '.join(sorted(row))})"
    prompt, answer = row[config.prompt_field], row[config.answer_field]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        return f"{config.answer_field!r} must be text or a number, got {answer!r}"
    if not _is_unicode(str(answer)):
        return f"{config.answer_field!r} is no Unicode text: {answer!r}"
    task = task_of(answer, config)
    if isinstance(prompt, str):
        if not prompt.strip():
            return f"{config.prompt_field!r} is empty"
        if not _is_unicode(prompt):
            return f"{config.prompt_field!r} is no Unicode text"
        return RawProblem(prompt, (), task, number)
    if not isinstance(prompt, list) or not prompt:
        return f"{config.prompt_field!r} must be text or a list of messages, got {type(prompt).__name__}"
    for message in prompt:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            return f"{config.prompt_field!r}: every message needs a role and a content"
        if not _is_unicode(message["role"] + message["content"]):
            return f"{config.prompt_field!r} is no Unicode text"
    messages = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
    return RawProblem("\n".join(m["content"] for m in messages), messages, task, number)


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and neither a hash nor a tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
