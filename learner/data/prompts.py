"""Training prompts as a grain dataset: shuffled, endless, never a held-out one, with state."""

from typing import Any

import grain

from configs.schema import Config
from learner.data.problems import (
    NUM_PROCEDURAL,
    BadRow,
    Problem,
    RawProblem,
    ReasoningGymSource,
    is_held_out,
    load_file,
    load_held_out,
    max_prompt_tokens,
    tokenize,
)
from learner.data.tokenizer import Tokenizer

_NO_PREFETCH = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class PromptStream:
    """An endless iterator of training problems whose place can be saved and restored.

    Not thread-safe (grain iterators are not).
    """

    def __init__(self, dataset: grain.IterDataset[Any]) -> None:
        """Starts at the first problem."""
        self._iterator = iter(dataset)

    def __next__(self) -> Problem:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands; JSON."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called."""
        self._iterator.set_state(state)


def load_prompts(config: Config, tokenizer: Tokenizer) -> tuple[PromptStream, list[Problem], list[BadRow]]:
    """The training stream, the held-out problems, and the rows that were set aside.

    Raises:
      ValueError: the task or the file is unusable, or too few held-out problems exist.
    """
    if config.prompts.path:
        train, held_out, bad = load_file(config, tokenizer)
        dataset = grain.MapDataset.source(train).seed(config.run.seed).shuffle().repeat().to_iter_dataset(_NO_PREFETCH)
        return PromptStream(dataset), held_out, bad
    source = ReasoningGymSource(config.prompts, seed=_train_seed(config.run.seed))
    dataset = (
        grain.MapDataset.source(_Indexed(source))
        .map(lambda raw: _trainable(raw, config, tokenizer))
        .to_iter_dataset(_NO_PREFETCH)
        .filter(lambda problem: problem is not None)
    )
    return PromptStream(dataset), load_held_out(config, tokenizer), []


class _Indexed:
    """A procedural source as grain wants it, by index."""

    def __init__(self, source: ReasoningGymSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: Any) -> RawProblem:
        return self._source[int(index)]


def _trainable(raw: RawProblem, config: Config, tokenizer: Tokenizer) -> Problem | None:
    """The problem, or None if it is held out or does not fit."""
    if is_held_out(raw.question, config.prompts.held_out_one_in):
        return None
    problem = tokenize(raw, tokenizer, config.prompts)
    return problem if 0 < problem.prompt_tokens.size <= max_prompt_tokens(config) else None


def _train_seed(seed: int) -> int:
    """Apart from the warm-up's and the evaluation's seeds, and from other runs'.

    The library makes problem i from seed + i, so neighbouring seeds would give the same problems, shifted by one.
    """
    return 10_000_000 * (1 + seed)
