"""reasoning-gym's tasks: endless, by index."""

import re

import reasoning_gym

from configs.sections.prompt_source import PromptSource
from learner.data.problems import RawProblem, task_of

NUM_PROCEDURAL = 2**31 - 1
"""Indices a procedural task has; each is another problem (some of the same text)."""


class ReasoningGymSource:
    """A procedural task: problem i is a function of (seed, i)."""

    def __init__(self, source: PromptSource, *, seed: int, where: str = "prompts") -> None:
        """Makes the library's data set; `where` is the source's field of the config.

        Raises:
          ValueError: no such task family, or the task refuses its arguments.
        """
        try:
            self._dataset = reasoning_gym.create_dataset(
                source.task, size=NUM_PROCEDURAL, seed=seed, **source.task_args
            )
        except (ValueError, AssertionError, TypeError) as e:
            raise ValueError(f"{where}.task={source.task!r} with task_args {source.task_args}: {e}") from e
        self._pattern = re.compile(source.pattern) if source.pattern else None
        self._source, self._where = source, where

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> RawProblem:
        """Problem `index`.

        Raises:
          ValueError: the pattern is not found in the question, or the family names no answer and is judged by one.
        """
        entry = self._dataset[index]
        question = entry["question"]
        if self._pattern is not None:
            found = self._pattern.search(question)
            if found is None:
                raise ValueError(f"{self._where}.pattern {self._pattern.pattern!r} is not in {question!r}")
            question = found.group(1)
        source = self._source
        needs_entry = source.environment != "" or source.parts.keys() != {"math"}
        answer = entry["answer"]
        if answer is None and source.parts.keys() & {"math", "exact"}:
            raise ValueError(f"{self._where}.task={source.task!r} names no answers: use verifier=reasoning_gym")
        task = task_of(
            "" if answer is None else answer,
            source.parts,
            answer_in=source.answer_in,
            metadata=entry if needs_entry else None,
            environment=source.environment,
        )
        return RawProblem(question, (), task, environment=source.environment)
