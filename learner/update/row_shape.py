"""`packing.auto`: rows x tokens of a micro-batch chosen from the lengths that a run really has. Pure, on the host.

The gradient doesn't depend on how tokens are packed ([docs/gradient_sums.md]), so a shape is only a question of speed:
slots that hold nothing are computed all the same. The first groups propose a shape for whole updates of such lengths;
each update later on may propose another, where it would save a tenth, and so often that a run compiles at most
1 + `MAX_CHANGES` shapes. The choice is in the checkpoints' books, so a restart goes on with the same one.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.types import Group
from configs.schema import Config
from configs.sections import PackingConfig
from learner.update.packing import first_fit_decreasing

MAX_CHANGES = 3
"""How often a run may take another shape than its first."""
MIN_SAVING = 0.1
"""Share of an update's slots that another shape must save: what a compilation is worth."""
TOKEN_MULTIPLE = 64
"""Tokens of a row; a block of the xla attention path."""
MICRO_BATCH_SLOTS = 64
"""What a micro-batch costs besides its slots, in slots: reading the weights and adding to the gradient once more."""
_NUM_WIDTHS = 4
"""Widths that are tried for a number of rows."""
_NUM_DRAWS = 3
"""Updates drawn from the lengths seen: a shape that just holds this one may not hold the next."""


class RowShape:
    """The shape in use, and what it is judged by."""

    def __init__(self, config: Config) -> None:
        """None is chosen yet; without `packing.auto` it is the configured one for good."""
        self._config = config
        self._chosen: PackingConfig | None = None if config.packing.auto else config.packing
        self._num_changes = 0
        self._lengths: list[int] = []
        """Tokens of each sequence of the update that is being filled."""

    @property
    def packing(self) -> PackingConfig:
        """The shape in use; the configured one, which holds anything, before there is any."""
        return self._chosen or self._config.packing

    def take(self, groups: Sequence[Group], *, ends_update: bool) -> PackingConfig:
        """The shape to pack these groups of an update with; looks at them first."""
        if not self._config.packing.auto:
            return self.packing
        self._lengths += [g.prompt_tokens.size + r.tokens.size for g in groups for r in g.rollouts]
        if self._chosen is None:
            self._chosen = propose(self._lengths, self._config)
        now = self._chosen
        if ends_update:
            self._reconsider()
        return now

    def get_state(self) -> dict[str, Any]:
        """JSON for the checkpoint's books, between two updates."""
        chosen = self._chosen
        shape = None if chosen is None else [chosen.rows, chosen.row_tokens]
        return {"shape": shape, "num_changes": self._num_changes}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with a checkpoint's shape, where this run may have it."""
        config, shape = self._config, state["shape"]
        if not config.packing.auto or shape is None:
            return
        chosen = dataclasses.replace(config.packing, rows=shape[0], row_tokens=shape[1])
        if is_allowed(chosen, config):
            self._chosen, self._num_changes = chosen, state["num_changes"]

    def _reconsider(self) -> None:
        """After an update: the next ones get another shape, if that saves enough and there are changes left."""
        lengths, self._lengths = self._lengths, []
        if self._num_changes == MAX_CHANGES or self._chosen is None:
            return
        draws = _draws(lengths, self._config)
        # No shape has fewer slots than there are tokens, and mostly that settles it.
        if sum(map(sum, draws)) >= (1 - MIN_SAVING) * num_slots(draws, self._chosen):
            return
        best = propose(lengths, self._config)
        if num_slots(draws, best) < (1 - MIN_SAVING) * num_slots(draws, self._chosen):
            self._chosen, self._num_changes = best, self._num_changes + 1


def propose(lengths: Sequence[int], config: Config) -> PackingConfig:
    """The shape in which updates of such sequences cost least: slots, and `MICRO_BATCH_SLOTS` a micro-batch.

    Tried are, for each number of rows, the widths from that on which just holds an update's tokens in as few
    micro-batches as there may be, or in one more.

    Args:
      lengths: tokens of some sequences, prompt and response together.
      config: `packing` gives the most slots that a micro-batch may have, `rounds` how many sequences an update has.
    """
    draws, most = _draws(lengths, config), config.packing.rows * config.packing.row_tokens
    step, total = _width_step(config), max(map(sum, draws))
    fewest = -(-total // most)
    best: tuple[float, PackingConfig] | None = None
    for micros, rows in itertools.product((fewest, fewest + 1), _row_counts(config)):
        first = max(config.model.max_tokens, -(-total // (micros * rows)))
        for n in range(_NUM_WIDTHS):
            shape = dataclasses.replace(config.packing, rows=rows, row_tokens=(-(-first // step) + n) * step)
            if not is_allowed(shape, config):
                break
            cost = num_slots(draws, shape, per_micro_batch=MICRO_BATCH_SLOTS)
            if best is None or cost < best[0]:
                best = cost, shape
    return config.packing if best is None else best[1]


def is_allowed(shape: PackingConfig, config: Config) -> bool:
    """Whether the mesh divides it, it holds the longest sequence, and it has no more slots than the configured one."""
    return (
        shape.rows % config.mesh.batch_shards == 0
        and shape.row_tokens % config.mesh.sequence == 0
        and shape.row_tokens >= config.model.max_tokens
        and shape.rows * shape.row_tokens <= config.packing.rows * config.packing.row_tokens
    )


def num_slots(draws: Sequence[Sequence[int]], shape: PackingConfig, *, per_micro_batch: int = 0) -> int:
    """Slots of all micro-batches of such updates, each packed at once, and so many more a micro-batch."""
    micros = sum(-(-len(first_fit_decreasing(draw, shape)) // shape.rows) for draw in draws)
    return micros * (shape.rows * shape.row_tokens + per_micro_batch)


def _width_step(config: Config) -> int:
    return math.lcm(TOKEN_MULTIPLE, config.mesh.sequence)


def _row_counts(config: Config) -> list[int]:
    """Multiples of what the mesh splits rows by: all of the first few, then each about an eighth larger."""
    shards, packing = config.mesh.batch_shards, config.packing
    most, counts = packing.rows * packing.row_tokens // config.model.max_tokens // shards, [1]
    while counts[-1] < most:
        counts.append(max(counts[-1] + 1, counts[-1] * 9 // 8))
    return [shards * n for n in counts]


def _draws(lengths: Sequence[int], config: Config) -> list[list[int]]:
    """Updates of as many sequences as the run's have, drawn from the lengths; always the same for the same ones."""
    size = config.rounds.groups_per_update * config.rounds.samples_per_group
    rng = np.random.default_rng(0)
    seen = np.asarray(lengths)
    if seen.size == size:
        return [list(lengths), *(rng.choice(seen, size).tolist() for _ in range(_NUM_DRAWS - 1))]
    return [rng.choice(seen, size).tolist() for _ in range(_NUM_DRAWS)]
