"""`packing.auto`: rows x tokens of a micro-batch chosen from the lengths that a run really has. Pure, on the host.

The gradient doesn't depend on how tokens are packed ([docs/gradient_sums.md]), so a shape is only a question of speed:
slots that hold nothing are computed all the same. The first groups propose a shape for whole updates of such lengths;
each update later on may propose another, where it would save a tenth, and so often that a run compiles at most
1 + `MAX_CHANGES` shapes. The choice is in the checkpoints' books, so a restart goes on with the same one.
"""

import dataclasses
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
_MAX_CANDIDATES = 24
"""Widths that are tried."""
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
        rows, row_tokens = shape
        if shape in [[c.rows, c.row_tokens] for c in candidates(config, row_tokens=row_tokens)]:
            self._chosen = dataclasses.replace(config.packing, rows=rows, row_tokens=row_tokens)
            self._num_changes = state["num_changes"]

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
    """The shape with the fewest slots for updates of such sequences; of equal ones the fewest, largest micro-batches.

    Args:
      lengths: tokens of some sequences, prompt and response together.
      config: `packing` gives the most slots that a micro-batch may have, `rounds` how many sequences an update has.
    """
    draws = _draws(lengths, config)
    widths = sorted({c.row_tokens for c in candidates(config)})
    best: tuple[float, float, PackingConfig] | None = None
    for width in widths:
        shapes = [c for c in candidates(config, row_tokens=width)]
        rows_of = [len(first_fit_decreasing(draw, shapes[0])) for draw in draws]
        for shape in shapes:
            micros = [-(-rows // shape.rows) for rows in rows_of]
            slots = float(sum(micros)) * shape.rows * shape.row_tokens
            if best is None or (slots, sum(micros)) < best[:2]:
                best = slots, float(sum(micros)), shape
    assert best is not None
    return best[2]


def candidates(config: Config, *, row_tokens: int | None = None) -> list[PackingConfig]:
    """The shapes that a run may choose from: rows that the mesh divides, tokens that hold the longest sequence.

    None has more slots than the configured one. Without `row_tokens` one of each width.
    """
    packing, mesh = config.packing, config.mesh
    step = math.lcm(TOKEN_MULTIPLE, mesh.sequence)
    most, shards = packing.rows * packing.row_tokens, mesh.batch_shards
    shortest, widest = -(-config.model.max_tokens // step) * step, most // shards // step * step
    if row_tokens is None:
        every = max(1, -(-((widest - shortest) // step) // _MAX_CANDIDATES)) * step
        widths = list(range(shortest, widest + 1, every))
        shapes = [(shards, width) for width in widths]
    elif row_tokens % step == 0 and row_tokens >= shortest:
        shapes = [(rows, row_tokens) for rows in range(shards, most // row_tokens + 1, shards)]
    else:
        shapes = []
    made = [dataclasses.replace(packing, rows=rows, row_tokens=width) for rows, width in shapes]
    is_own = row_tokens in (None, packing.row_tokens)
    return made if made or not is_own else [packing]


def num_slots(draws: Sequence[Sequence[int]], shape: PackingConfig) -> int:
    """Slots of all micro-batches of such updates, each packed at once."""
    micros = [-(-len(first_fit_decreasing(draw, shape)) // shape.rows) for draw in draws]
    return sum(micros) * shape.rows * shape.row_tokens


def _draws(lengths: Sequence[int], config: Config) -> list[list[int]]:
    """Updates of as many sequences as the run's have, drawn from the lengths; always the same for the same ones."""
    size = config.rounds.groups_per_update * config.rounds.samples_per_group
    rng = np.random.default_rng(0)
    seen = np.asarray(lengths)
    if seen.size == size:
        return [list(lengths), *(rng.choice(seen, size).tolist() for _ in range(_NUM_DRAWS - 1))]
    return [rng.choice(seen, size).tolist() for _ in range(_NUM_DRAWS)]
