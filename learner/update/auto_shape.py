"""`packing.auto`: rows x tokens of a micro-batch, chosen from the lengths of a run's groups. Pure, on the host.

The shape changes the speed and not the gradient (docs/design/streaming.md): empty slots are computed as well. Available
groups are packed together, so the cost of a shape depends on lengths and on arrivals. One micro-batch per update is
best if all updates have equal totals, and worst if every second update overflows it or groups arrive one by one.

The first groups propose a shape. After `NUM_SEEN` updates, the shapes are compared on their packs and on updates drawn
from their groups. Another shape is chosen if it saves `MIN_SAVING` of the cost, and then kept for at least
`MIN_UPDATES` updates. A run of n updates therefore compiles at most 2 + n / `MIN_UPDATES` shapes. Checkpoints contain
the choice and the lengths seen, so a restart continues with them.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.rollout_types import Group
from configs.schema import Config
from configs.sections import PackingConfig
from learner.update.first_fit import first_fit_decreasing
from learner.update.packing import parts

NUM_SEEN = 8
"""Updates over which a shape is evaluated."""
MIN_UPDATES = 50
"""Minimum updates between two changes; the first proposal may change as soon as `NUM_SEEN` updates are seen."""
MIN_SAVING = 0.03
"""Share of the cost that another shape must save, to compensate for its compilation over `MIN_UPDATES`."""
TOKEN_MULTIPLE = 64
"""Row widths are multiples of this number of tokens, a block of the xla attention path."""
MICRO_BATCH_SLOTS = {"float32": 64, "bfloat16": 768}
"""Fixed cost of a micro-batch per device, in slots, by the dtype of matrix products: reading the weights and adding to
the gradient. bfloat16 products are far faster than memory and links: a micro-batch's collectives take as long as 540 to
2030 slots of a chip (tests/bench/results/tpu.md)."""
_MAX_WIDENING = 2
"""Largest row width as a multiple of the configured one; some attention paths compute all pairs of a row."""
_MAX_DRAWS = 7
"""Maximum redraws of the updates seen; fewer if updates are large, and thus alike."""
_MAX_DRAWN = 4096
"""Maximum sequences that an evaluation packs per width, including those seen."""

Pack = Sequence[Sequence[int]]
"""Groups that are packed together: for each group, the tokens of its sequences (prompt and response together), or of
sequences that share their prompt."""


class AutoShape:
    """Current shape and the data of its evaluation."""

    def __init__(self, config: Config) -> None:
        """Creates the state; without `packing.auto` the shape is always the configured one."""
        self._config = config
        self._chosen: PackingConfig | None = None if config.packing.auto else config.packing
        self._num_held = 0
        """Updates for which the shape stays fixed."""
        self._num_seen = 0
        self._packs: list[list[list[int]]] = []
        """`Pack`s of the updates seen and of the update in progress."""

    @property
    def packing(self) -> PackingConfig:
        """Current shape; before the first choice the configured one, which holds any sequence."""
        return self._chosen or self._config.packing

    def choose(self, groups: Sequence[Group], *, ends_update: bool) -> PackingConfig:
        """Records groups of an update and returns the shape to pack them with."""
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
        """Returns the state for the checkpoint, between two updates; JSON."""
        chosen = self._chosen
        shape = None if chosen is None else [chosen.rows, chosen.row_tokens]
        return {"shape": shape, "num_held": self._num_held, "num_seen": self._num_seen, "packs": self._packs}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the shape and data of a checkpoint, if this run's config allows the shape."""
        config, shape = self._config, state["shape"]
        if not config.packing.auto or shape is None:
            return
        chosen = dataclasses.replace(config.packing, rows=shape[0], row_tokens=shape[1])
        if is_allowed(chosen, config):
            self._chosen = chosen
            self._num_held, self._num_seen = state["num_held"], state["num_seen"]
            self._packs = list(state["packs"])

    def _end_update(self, now: PackingConfig) -> None:
        """Counts the update; changes the shape for the next ones if an evaluation is due and finds enough savings."""
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
    """Returns the shape with the lowest cost for these packs, which hold their units' tokens (`packing.py`).

    cost = sum over packs of ceil(n / rows) (rows width + c), n the rows of that width that the pack fills, c
    `micro_batch_slots`.

    Candidates are the configured shape and the shapes of `is_allowed` on a grid of widths and row counts, from one row
    per device up to the slots of the configured shape.
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
    """Returns the packs of `NUM_SEEN` possible updates, drawn from the first groups; deterministic.

    Groups are drawn with replacement, and then each group's sequences (a two-stage bootstrap), since sequences of a
    group are alike. Each update counts twice, as one pack and in packs of as many groups as `pack` has, because first
    groups arrive alone, and later ones may wait for the learner.
    """
    rng, num_groups = np.random.default_rng(0), config.groups_per_update
    packs: list[list[int]] = []
    for _ in range(NUM_SEEN):
        groups = [rng.choice(pack[i], len(pack[i])).tolist() for i in rng.integers(len(pack), size=num_groups)]
        for at_once in (num_groups, len(pack)):
            packs += [_joined(groups[i : i + at_once]) for i in range(0, num_groups, at_once)]
    return packs


def with_draws(packs: Sequence[Pack]) -> list[list[int]]:
    """Returns the packs, and further packs of equal group counts drawn with replacement from all groups; deterministic.

    With only the updates seen, a shape that happens to fit them would look best.
    """
    groups, rng = [group for pack in packs for group in pack], np.random.default_rng(0)
    num_draws = min(_MAX_DRAWS, _MAX_DRAWN // sum(map(len, groups)) - 1)
    drawn = [[groups[i] for i in rng.integers(len(groups), size=len(pack))] for _ in range(num_draws) for pack in packs]
    return [_joined(pack) for pack in (*packs, *drawn)]


def is_allowed(shape: PackingConfig, config: Config) -> bool:
    """Returns True if the mesh divides the shape, and it holds the longest sequence within the configured slots."""
    return (
        shape.rows % config.mesh.batch_shards == 0
        and shape.row_tokens % config.mesh.sequence == 0
        and shape.row_tokens >= config.model.max_tokens
        and shape.rows * shape.row_tokens <= config.packing.rows * config.packing.row_tokens
    )


def num_slots(packs: Sequence[Sequence[int]], shape: PackingConfig, *, per_micro_batch: int = 0) -> int:
    """Returns the slots of all micro-batches of these packs, plus `per_micro_batch` for each."""
    filled = [_num_rows(pack, shape) for pack in packs]
    return _num_micro_batches(filled, shape.rows) * (shape.rows * shape.row_tokens + per_micro_batch)


def micro_batch_slots(config: Config) -> int:
    """Returns the fixed cost of a micro-batch, in slots on all devices that share it."""
    return MICRO_BATCH_SLOTS[config.model.compute_dtype] * config.mesh.batch_shards * config.mesh.sequence


def _joined(groups: Pack) -> list[int]:
    return [tokens for group in groups for tokens in group]


def _num_rows(pack: Sequence[int], shape: PackingConfig) -> int:
    return len(first_fit_decreasing(pack, shape))


def _num_micro_batches(filled: Sequence[int], rows: int) -> int:
    return sum(-(-n // rows) for n in filled)


def _widths(config: Config) -> Iterator[int]:
    """Yields multiples of what a row's tokens are split by, from the longest sequence up, each an eighth wider."""
    step, packing = math.lcm(TOKEN_MULTIPLE, config.mesh.sequence), config.packing
    most = min(packing.rows * packing.row_tokens // config.mesh.batch_shards, _MAX_WIDENING * packing.row_tokens)
    num = -(-config.model.max_tokens // step)
    while num * step <= most:
        yield num * step
        num = max(num + 1, num * 9 // 8)


def _row_counts(config: Config, width: int) -> Iterator[int]:
    """Yields multiples of what the mesh splits rows by, each about an eighth larger."""
    shards, packing, num = config.mesh.batch_shards, config.packing, 1
    while num * shards * width <= packing.rows * packing.row_tokens:
        yield num * shards
        num = max(num + 1, num * 9 // 8)
