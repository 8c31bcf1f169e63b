"""reasoning-gym's tasks: endless, by index."""

import functools
import random
import re
from typing import Any

from configs.sections.prompt_source import PromptSource
from learner.data.problems import RawProblem, task_of

NUM_PROCEDURAL = 2**31 - 1
"""Indices a procedural task has; each is another problem (some of the same text)."""


_BLOCKS = {"acre": 500, "gsm_symbolic": 10_000, "list_functions": 10_000, "word_ladder": 10_000}
"""Families that draw something for all problems of a data set when it is made, which takes memory and time: they come
as one data set after the other, of so many problems and a seed of its own each."""


class ReasoningGymSource:
    """A procedural task: problem i is a function of (seed, i)."""

    def __init__(self, source: PromptSource, *, seed: int, where: str = "prompts") -> None:
        """Makes the library's (first) data set; `where` is the source's field of the config.

        Raises:
          ValueError: no such task family, or the task refuses its arguments.
        """
        # Here, since it imports sympy and matplotlib, which a run with prompts of another source does not need.
        import reasoning_gym

        self._block = _BLOCKS.get(source.task, NUM_PROCEDURAL)

        @functools.lru_cache(maxsize=2)
        def block(number: int) -> Any:
            drawn = seed if number == 0 else random.Random(f"{seed}.{number}").getrandbits(31)
            return reasoning_gym.create_dataset(source.task, size=self._block, seed=drawn, **source.task_args)

        try:
            block(0)
        except (ValueError, AssertionError, TypeError) as e:
            raise ValueError(f"{where}.task={source.task!r} with task_args {source.task_args}: {e}") from e
        self._dataset = block
        self._pattern = re.compile(source.pattern) if source.pattern else None
        self._source, self._where = source, where

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> RawProblem:
        """Problem `index`.

        Raises:
          ValueError: the pattern is not found in the question, or the family names no answer and is judged by one.
        """
        number, place = divmod(index, self._block)
        entry = self._dataset(number)[place]
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
