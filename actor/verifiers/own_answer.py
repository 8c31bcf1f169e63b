"""The response that gives a task's own answer, as a verifier reads it."""

import json
import re

from actor.verifiers.code.answer import fenced
from bridge import code_tests
from bridge.types import Task
from configs.sections import RewardsConfig


def own_answer(name: str, task: Task, settings: RewardsConfig) -> str:
    """A text that verifier `name` should find to be right; empty if the row has none.

    Args:
      name: a verifier's; one that isn't ours is given the answer as the row has it.
      task: that it is the answer to.
      settings: say where programs are looked for.

    Raises:
      ValueError: the row's test cases are none.
    """
    if name == "code":
        tests = code_tests.read(json.loads(task.metadata))
        in_block = (tests.code_in or settings.code_in) == "block"
        return fenced(tests.solution, tests.language) if tests.solution and in_block else tests.solution
    if name == "math" and task.answer:
        # In LaTeX's own marks it is found already; a box would hide them.
        return f"The answer is {task.answer}" if _is_marked(task.answer) else f"\\boxed{{{task.answer}}}"
    return task.answer


def _is_marked(answer: str) -> bool:
    return bool(re.search(r"(?<!\\)(?:\$|\\[(\[])|\\boxed", answer))  # \$18.90 is money
