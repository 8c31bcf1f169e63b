"""The problems of all sets, by the same readers as a run's; no jax is loaded."""

import dataclasses
import pathlib

from configs.schema import Config
from launch.evaluate import settings
from learner.data.opening import open_sources
from learner.data.problems import Problem
from learner.data.sets import ProblemSet, all_sets, open_own_sets
from learner.data.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Problems:
    """What is asked."""

    sets: list[ProblemSet]
    tokenizer: Tokenizer


def open_problems(config: Config, model: pathlib.Path) -> Problems:
    """All sets of the config, none of them empty; prints how many problems each has, and what was set aside.

    Raises:
      ValueError: a source or the model's tokenizer is unusable, or a set has no problem.
    """
    tokenizer = load_tokenizer(model, vocab_size=settings.vocab_size(model), template=config.prompts.template_settings)
    own = open_own_sets(config, tokenizer)
    for looked_at in [found for one in own.values() for found in one.looked_at]:
        looked_at.check_num_bad(config.prompts.max_bad_share)
    held_out: list[Problem] = []
    if any(not how.has_source for how in config.evaluation_sets.values()):
        held_out = [problem for source in open_sources(config, tokenizer) for problem in source.held_out]
    sets = all_sets(config, own, held_out)
    for one in sets:
        if not one.problems:
            raise ValueError(f"evaluation set {one.name} has no problem")
        how = one.how
        print(
            f"{one.name}: {len(one.problems)} problems, {how.k} samples each, temperature {how.temperature:g}, at most "
            f"{how.max_tokens} tokens",
            flush=True,
        )
        if one.bad:
            first = one.bad[0]
            print(f"warning: {len(one.bad)} rows of {one.name} set aside; row {first.row}: {first.reason}", flush=True)
    return Problems(sets, tokenizer)
