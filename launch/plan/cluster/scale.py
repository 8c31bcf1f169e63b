"""Which part gives out first over many sizes of cluster: numbers of engines against numbers of learner chips."""

import dataclasses
from collections.abc import Sequence

from configs.schema import Config
from launch.plan.cluster.limits import Cluster, Limit, first_to_give_out
from launch.plan.profiles import Profile

_PER_OCTAVE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One size."""

    num_engines: int
    num_learner_chips: int
    limit: Limit
    tokens_per_s: float
    """Response tokens trained a second, at that limit."""


def counts_up_to(most: int, *, per_octave: int = _PER_OCTAVE) -> list[int]:
    """1 to `most`, about `per_octave` in each doubling, powers of two and `most` among them."""
    num = per_octave * (most.bit_length() - 1)
    return sorted({most, *(min(most, round(2 ** (i / per_octave))) for i in range(num + 1))})


def scale(
    config: Config, profile: Profile, *, engines: Sequence[int], learner_chips: Sequence[int]
) -> list[list[Cell]]:
    """A row a number of chips, a column a number of engines.

    A window (admission.policy=window, no async_ratio) is made as wide as all engines together have places, so that it
    isn't what bounds them. Batch, round and whatever else a config says stay as they are.
    """
    return [[_cell(config, profile, num_engines=n, num_learner_chips=c) for n in engines] for c in learner_chips]


def _cell(config: Config, profile: Profile, *, num_engines: int, num_learner_chips: int) -> Cell:
    sized = dataclasses.replace(profile, num_engines=num_engines, num_learner_chips=num_learner_chips)
    cluster = Cluster.of(_filling(config, sized), sized)
    limit = first_to_give_out(cluster)
    work = cluster.workload
    tokens = work.num_samples * work.response_tokens
    return Cell(
        num_engines=num_engines,
        num_learner_chips=num_learner_chips,
        limit=limit,
        tokens_per_s=limit.groups_per_s * tokens,
    )


def _filling(config: Config, profile: Profile) -> Config:
    if config.admission.policy != "window" or config.admission.async_ratio is not None:
        return config
    places = profile.num_engines * profile.engine.max_num_seqs
    return dataclasses.replace(config, admission=dataclasses.replace(config.admission, sequences=places, width=0))
