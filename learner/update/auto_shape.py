"""`packing.auto`: rows x tokens of a micro-batch chosen from the lengths that a run really has. Pure, on the host.

The shape changes speed and not the gradient (docs/design/streaming.md):
slots that hold nothing are computed all the same. Packed are the groups that are there, so what a shape costs hangs on
how they come as well as on lengths: one micro-batch for a whole update is best where every update has the same total,
and the worst where each second one spills into another, or where groups come one by one.

The first groups propose a shape. Then what `NUM_SEEN` updates had, as it came, is looked at together, with updates
drawn from their groups; another shape is taken where it would save `MIN_SAVING` of what they cost, and then for
`MIN_UPDATES` at least. So a run of n updates compiles at most 2 + n / `MIN_UPDATES` shapes. The choice and what was
seen are in the checkpoints' books, so a restart goes on as the run would have.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.rollout_types import Group
from configs.schema import Config
from configs.sections import PackingConfig
from learner.update.packing import first_fit_decreasing, parts

NUM_SEEN = 8
"""Updates that a shape is judged by."""
MIN_UPDATES = 50
"""From one change to the next; the first proposal may be changed sooner, as soon as enough is seen."""
MIN_SAVING = 0.03
"""Share of the cost that another shape must save: over `MIN_UPDATES`, what a compilation is worth (1.5 updates)."""
TOKEN_MULTIPLE = 64
"""Tokens of a row; a block of the xla attention path."""
MICRO_BATCH_SLOTS = {"float32": 64, "bfloat16": 768}
"""What a micro-batch costs a device besides its slots, in slots, by the dtype of matrix products: reading the weights
and adding to the gradient once more. Where products are bfloat16, they are far faster than memory and links: a
micro-batch's collectives take as long as 540 to 2030 slots of a chip (tests/bench/results/tpu.md)."""
_MAX_WIDENING = 2
"""A row is so many times as wide as the configured one at most: some attention computes all pairs of a row."""
_MAX_DRAWS = 7
"""Times that what was seen is drawn anew; fewer where updates are large, and so alike."""
_MAX_DRAWN = 4096
"""Sequences that a look packs for a width at most, those that were seen among them: fractions of a second in all."""

Pack = Sequence[Sequence[int]]
"""Groups that are packed together: of each the tokens of its sequences, prompt and response together, or of those that
share their prompt."""


class AutoShape:
    """The shape in use, and what it is judged by."""

    def __init__(self, config: Config) -> None:
        """None is chosen yet; without `packing.auto` it is the configured one for good."""
        self._config = config
        self._chosen: PackingConfig | None = None if config.packing.auto else config.packing
        self._num_held = 0
        """Updates for which the shape stays, whatever they have."""
        self._num_seen = 0
        self._packs: list[list[list[int]]] = []
        """`Pack`s of the updates seen and of the one that is being filled."""

    @property
    def packing(self) -> PackingConfig:
        """The shape in use; the configured one, which holds anything, before there is any."""
        return self._chosen or self._config.packing

    def choose(self, groups: Sequence[Group], *, ends_update: bool) -> PackingConfig:
        """The shape to pack these groups of an update with; looks at them first."""
        if not self._config.packing.auto:
            return self.packing
        pack = [[part.size for part in parts(g, self._config.packing)] for g in groups]
        self._packs.append(pack)
        if self._chosen is None:
            self._chosen = propose(first_packs(pack, self._config), self._config)
        now = self._chosen
        if ends_update:
            self._end_update(now)
        return now

    def get_state(self) -> dict[str, Any]:
        """JSON for the checkpoint's books, between two updates."""
        chosen = self._chosen
        shape = None if chosen is None else [chosen.rows, chosen.row_tokens]
        return {"shape": shape, "num_held": self._num_held, "num_seen": self._num_seen, "packs": self._packs}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with a checkpoint's shape, where this run may have it."""
        config, shape = self._config, state["shape"]
        if not config.packing.auto or shape is None:
            return
        chosen = dataclasses.replace(config.packing, rows=shape[0], row_tokens=shape[1])
        if is_allowed(chosen, config):
            self._chosen = chosen
            self._num_held, self._num_seen = state["num_held"], state["num_seen"]
            self._packs = list(state["packs"])

    def _end_update(self, now: PackingConfig) -> None:
        """After an update: the next ones get another shape, if it is time and that saves enough."""
        if self._num_held:
            self._num_held -= 1
            self._packs = []
            return
        self._num_seen += 1
        if self._num_seen < NUM_SEEN:
            return
        packs, self._packs, self._num_seen = with_draws(self._packs), [], 0
        best, each = propose(packs, self._config), micro_batch_slots(self._config)
        before, after = (num_slots(packs, shape, per_micro_batch=each) for shape in (now, best))
        if after < (1 - MIN_SAVING) * before:
            self._chosen, self._num_held = best, MIN_UPDATES - NUM_SEEN


def propose(packs: Sequence[Sequence[int]], config: Config) -> PackingConfig:
    """The shape in which such packs cost least: slots, and `micro_batch_slots` a micro-batch.

    cost = sum over packs of ceil(n / rows) (rows width + c), n the rows of that width that the pack fills.

    Tried are the configured shape and those of `is_allowed` on a grid of widths and numbers of rows, from micro-batches
    of a single row a device to the most slots that one may have.

    Args:
      packs: tokens of what is packed as one (`learner/update/packing.py`), by what is packed at once.
      config: `packing` gives the most slots that a micro-batch may have.
    """
    each = micro_batch_slots(config)
    best, least = config.packing, num_slots(packs, config.packing, per_micro_batch=each)
    longest = max((size for pack in packs for size in pack), default=0)
    for width in (w for w in _widths(config) if w >= longest):
        filled = [_num_rows(pack, dataclasses.replace(config.packing, row_tokens=width)) for pack in packs]
        for rows in _row_counts(config, width):
            cost = _num_micro_batches(filled, rows) * (rows * width + each)
            shape = dataclasses.replace(config.packing, rows=rows, row_tokens=width)
            if cost < least and is_allowed(shape, config):
                best, least = shape, cost
    return best


def first_packs(pack: Pack, config: Config) -> list[list[int]]:
    """`NUM_SEEN` updates as they may come, from the groups that came first; the same for the same ones.

    Groups are drawn with replacement and then each one's sequences (a bootstrap in two stages), since sequences of a
    group are alike. Each update counts twice, as one pack and in packs of as many groups as came: those that come first
    come alone, and later ones wait for the learner or it for them.
    """
    rng, num_groups = np.random.default_rng(0), config.rounds.groups_per_update
    packs: list[list[int]] = []
    for _ in range(NUM_SEEN):
        groups = [rng.choice(pack[i], len(pack[i])).tolist() for i in rng.integers(len(pack), size=num_groups)]
        for at_once in (num_groups, len(pack)):
            packs += [_joined(groups[i : i + at_once]) for i in range(0, num_groups, at_once)]
    return packs


def with_draws(packs: Sequence[Pack]) -> list[list[int]]:
    """The packs, and more of as many groups each, drawn with replacement from all of them; the same for the same ones.

    Of eight updates alone, that shape would look best which happens to hold just those.
    """
    groups, rng = [group for pack in packs for group in pack], np.random.default_rng(0)
    num_draws = min(_MAX_DRAWS, _MAX_DRAWN // sum(map(len, groups)) - 1)
    drawn = [[groups[i] for i in rng.integers(len(groups), size=len(pack))] for _ in range(num_draws) for pack in packs]
    return [_joined(pack) for pack in (*packs, *drawn)]


def is_allowed(shape: PackingConfig, config: Config) -> bool:
    """Whether the mesh divides it, it holds the longest sequence, and it has no more slots than the configured one."""
    return (
        shape.rows % config.mesh.batch_shards == 0
        and shape.row_tokens % config.mesh.sequence == 0
        and shape.row_tokens >= config.model.max_tokens
        and shape.rows * shape.row_tokens <= config.packing.rows * config.packing.row_tokens
    )


def num_slots(packs: Sequence[Sequence[int]], shape: PackingConfig, *, per_micro_batch: int = 0) -> int:
    """Slots of all micro-batches of such packs, and so many more a micro-batch."""
    filled = [_num_rows(pack, shape) for pack in packs]
    return _num_micro_batches(filled, shape.rows) * (shape.rows * shape.row_tokens + per_micro_batch)


def micro_batch_slots(config: Config) -> int:
    """What a micro-batch costs besides its slots, in slots on all devices that share them."""
    return MICRO_BATCH_SLOTS[config.model.compute_dtype] * config.mesh.batch_shards * config.mesh.sequence


def _joined(groups: Pack) -> list[int]:
    return [tokens for group in groups for tokens in group]


def _num_rows(pack: Sequence[int], shape: PackingConfig) -> int:
    return len(first_fit_decreasing(pack, shape))


def _num_micro_batches(filled: Sequence[int], rows: int) -> int:
    return sum(-(-n // rows) for n in filled)


def _widths(config: Config) -> Iterator[int]:
    """Multiples of what a row's tokens are split by, from the longest sequence on, each about an eighth wider."""
    step, packing = math.lcm(TOKEN_MULTIPLE, config.mesh.sequence), config.packing
    most = min(packing.rows * packing.row_tokens // config.mesh.batch_shards, _MAX_WIDENING * packing.row_tokens)
    num = -(-config.model.max_tokens // step)
    while num * step <= most:
        yield num * step
        num = max(num + 1, num * 9 // 8)


def _row_counts(config: Config, width: int) -> Iterator[int]:
    """Multiples of what the mesh splits rows by: all of the first few, then each about an eighth more."""
    shards, packing, num = config.mesh.batch_shards, config.packing, 1
    while num * shards * width <= packing.rows * packing.row_tokens:
        yield num * shards
        num = max(num + 1, num * 9 // 8)
