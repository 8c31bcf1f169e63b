"""A run's prompts: the stream to train on, the held-out problems, and the rows that were set aside."""

from collections.abc import Callable, Collection, Mapping

from configs.schema import Config
from learner.data.opening import SetAside, open_sources
from learner.data.problems import BadRow, Problem
from learner.data.stream import PromptStream
from learner.data.tokenizer import Tokenizer


def load_prompts(
    config: Config,
    tokenizer: Tokenizer,
    *,
    set_aside: SetAside | None = None,
    quarantine: Callable[[BadRow], None] | None = None,
    evaluated: Collection[str] = (),
    digests: Mapping[str, str] | None = None,
) -> tuple[PromptStream, list[Problem], list[BadRow]]:
    """The training stream, the held-out problems, and the rows that were set aside.

    Args:
      config: the run's.
      tokenizer: the model's.
      set_aside: rows whose own answer does not pass.
      quarantine: told of the bad rows that turn up later, among those made by index.
      evaluated: questions of evaluation sets, which nothing trains on.
      digests: hashes of the evaluation sets' rows by name, kept with the stream's place.

    Raises:
      ValueError: a source is unusable, or too few held-out problems exist.
    """
    opened = open_sources(config, tokenizer, set_aside=set_aside, evaluated=evaluated)
    held_out = [problem for source in opened for problem in source.held_out]
    bad = [row for source in opened for row in source.bad]
    return PromptStream(config, opened, quarantine=quarantine, digests=digests), held_out, bad
