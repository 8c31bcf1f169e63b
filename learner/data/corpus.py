"""Examples of right answers, which the tiny model is warmed up on; held-out problems are never among them.

There are some for a task whose answers are whole numbers, for a file of rows with answers or programs
(`configs.code_tasks`), and for the environments that give examples of episodes (`configs.environments.shipped`).
"""

import itertools
import json
import random
import re
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from jaxtyping import Int32

from bridge import code_tests
from bridge.chat_template import ChatTemplate, Message
from configs.environments.row import Said
from configs.environments.shipped import EXAMPLES, rows
from configs.sections import PromptsConfig
from configs.sections.prompt_source import PromptSource
from configs.tiny_model import TinyModelRecipe
from learner.data.gold import gold_rows
from learner.data.problems import is_held_out
from learner.data.sources.reasoning_gym import ReasoningGymSource

_SEED = 3_000_017
_NUM_LOOKED_AT = 2000
_LONG = 16
"""Characters that must all be right: from here on an answer has fewer typos."""

Example = tuple[str, Sequence[Said]]
"""A question and what follows it."""


class Corpus:
    """Endless batches of examples, right-padded: fresh ones, but for a file's, which are shuffled."""

    def __init__(
        self,
        recipe: TinyModelRecipe,
        prompts: PromptsConfig,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos: int,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Looks at many examples to see how long they are and what is written in them.

        A question is rendered by `chat`, where that has a template.

        Raises:
          ValueError: there are none, or the task's answers are not whole numbers.
        """
        self._recipe = recipe
        self._one_in = prompts.held_out_one_in
        self._tokenizer, self._chat = tokenizer, chat
        self.eos = eos
        self._examples = _examples(prompts, _SEED + recipe.seed, thinks=recipe.thinks)
        drawn = [self._draw() for _ in range(_NUM_LOOKED_AT)]
        written = ["".join(s.text for s in said if s.by_policy) for _, said in drawn]
        of_sums = "-0123456789" + "</think>" * recipe.thinks
        letters = of_sums if _is_of_sums(prompts) else "".join(sorted(set("".join(written))))
        self.answer_ids = np.array([*self._encode(letters), eos], np.int32)
        """What an answer is made of."""
        is_long = statistics.fmean(map(len, written)) > _LONG
        self.typo_rate = recipe.program_typo_rate if is_long else recipe.typo_rate
        # Long enough for the longest of many; a longer one is left out.
        self.length = max(len(self._tokens(example)[0]) for example in drawn)

    def batch(self) -> tuple[Int32[np.ndarray, "B S"], Int32[np.ndarray, "B S"]]:
        """Token ids, and 1 where the policy writes: an answer or a turn, and its end."""
        tokens = np.zeros((self._recipe.batch_size, self.length), np.int32)
        mask = np.zeros_like(tokens)
        row = 0
        while row < len(tokens):
            ids, wanted = self._tokens(self._draw())
            if len(ids) > self.length:
                continue
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, wanted
            row += 1
        return tokens, mask

    def _draw(self) -> Example:
        return next(e for e in self._examples if not is_held_out(e[0], self._one_in))

    def _tokens(self, example: Example) -> tuple[list[int], list[int]]:
        question, pieces = example
        asked: list[Message] = [{"role": "user", "content": question}]
        tokens = self._encode(self._chat.render(asked) if self._chat is not None and self._chat.source else question)
        mask = [0] * len(tokens)
        for said in pieces:
            added = [*self._encode(said.text), *([self.eos] if said.by_policy else [])]
            tokens += added
            mask += [int(said.by_policy)] * len(added)
        return tokens, mask

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _examples(prompts: PromptsConfig, seed: int, *, thinks: bool) -> Iterator[Example]:
    if thinks and not _is_of_sums(prompts):
        raise ValueError("the tiny model that thinks is warmed up on sums of prompts.task alone; give model.path")
    if prompts.mixture:
        raise ValueError("the tiny model is warmed up on one source, and prompts.mixture has several; give model.path")
    if prompts.path:
        return _of_rows(prompts, seed)
    return _of_episodes(prompts, seed) if prompts.environment else _of_sums(prompts, seed, thinks=thinks)


def _is_of_sums(prompts: PromptsConfig) -> bool:
    return not (prompts.path or prompts.environment)


def _answered(question: str, answer: str) -> Example:
    return question, [Said(answer, by_policy=True)]


def _partial_sums(question: str) -> str:
    """The sums of the first two terms of a question, of the first three and so on, but for all of them."""
    terms = [int(term.replace(" ", "")) for term in re.findall(r"[+-]?\s*\d+", question)]
    return " ".join(str(total) for total in list(itertools.accumulate(terms))[1:-1])


def _of_sums(prompts: PromptsConfig, seed: int, *, thinks: bool = False) -> Iterator[Example]:
    """Yields examples of a task with whole-number answers; with `thinks` behind partial sums and `</think>`."""
    source = PromptSource(task=prompts.task, task_args=prompts.task_args, pattern=prompts.pattern, verifier="exact")
    problems = ReasoningGymSource(source, seed=seed)
    for index in itertools.count():
        raw = problems[index]
        try:
            thought = _partial_sums(raw.question) + "</think>" if thinks else ""
            yield _answered(raw.question, thought + str(int(raw.task.answer)))
        except ValueError as e:
            raise ValueError(f"the tiny model needs a task with whole-number answers, got {raw.task.answer!r}") from e


def _of_rows(prompts: PromptsConfig, seed: int) -> Iterator[Example]:
    """Of a file's rows, shuffled anew each time they have all been there."""
    known = [
        _answered(gold.question, answer)
        for gold in gold_rows(prompts)
        for is_code in [any(part.name == "code" for part in gold.task.rewards)]
        if (answer := code_tests.read(json.loads(gold.task.metadata)).solution if is_code else gold.task.answer)
    ]
    if all(is_held_out(question, prompts.held_out_one_in) for question, _ in known):
        raise ValueError(f"{prompts.path} has no rows with answers to warm the tiny model up on")
    order = np.random.default_rng(seed)
    while True:
        for index in order.permutation(len(known)):
            yield known[index]


def _of_episodes(prompts: PromptsConfig, seed: int) -> Iterator[Example]:
    """Of an environment that makes its own rows."""
    example = EXAMPLES.get(prompts.environment)
    if example is None or prompts.environment_rows:
        raise ValueError(
            f"the tiny model can't be warmed up for prompts.environment={prompts.environment}: examples of episodes "
            f"are there for the own rows of {', '.join(EXAMPLES)}; give model.path"
        )
    row = rows(prompts.environment, seed=seed, args=prompts.environment_args)
    drawn = random.Random(seed)
    for index in itertools.count():
        made = row(index)
        yield made.question, example(made, drawn)
