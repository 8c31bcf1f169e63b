"""Packing of groups into fixed-shape micro-batches, with optional prompt sharing.

Whole sequences (prompt and response) are packed by first-fit-decreasing into rows of `row_tokens`, and `rows` rows make
a micro-batch. There is one shape, so there is one compilation; the rest goes to further micro-batches.

With `packing.share_prompts` a group's prompt is stored once per unit, before as many of its responses as fit the row.
Each response begins with a copy of the prompt's last token at the same position. The predecessor of a response's first
token is therefore in its own segment. Every token's loss and gradient are those of the whole sequences, from P - 1 +
sum(1 + T) tokens instead of sum(P + T).

Alignment: every array holds the values of the token at that position. `loss_mask[b, i]`, `behavior_logprobs[b, i]`,
`advantages[b, i]` and `token_versions[b, i]` describe `tokens[b, i]`; `loss_fn.py` shifts them to the model's output at
i - 1. A sequence starts with at least one prompt token, so a trained token always has its predecessor in its own
segment and row.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int8, Int16, Int32
from msgspec import UNSET

from bridge.rollout_types import Group, Rollout
from configs.sections import LossConfig, PackingConfig
from learner.model.routing_replay import RoutingShape
from learner.objective.advantages import token_advantages
from learner.objective.losses import token_weight
from learner.objective.reward_shaping import has_learning_signal, num_sampled, shaped_rewards, trained_tokens
from learner.update.first_fit import first_fit_decreasing
from learner.update.reductions import Moments

LEAST_SHARED = 3
"""Minimum tokens of a shared prompt: without its last token it has two, the minimum of a row's segment
(`learner/update/reductions.py`)."""


class PackUnit(NamedTuple):
    """Rollouts of a group that are packed together."""

    rollouts: Sequence[int]
    """Indices of the rollouts in the group."""
    shares: bool
    """True if their prompt is stored once, and its last token before each of them (`learner/update/packing.py`)."""
    size: int
    """Tokens of the row that it takes."""


def parts(group: Group, packing: PackingConfig) -> Iterator[PackUnit]:
    """Yields a group's rollouts in order: one by one, or with `packing.share_prompts` as many as fit a row."""
    prompt = group.prompt_tokens.size
    most = packing.max_row_sequences - 1
    if not packing.share_prompts or prompt < LEAST_SHARED or most < 1:
        for i, rollout in enumerate(group.rollouts):
            yield PackUnit([i], False, prompt + rollout.tokens.size)
        return
    together: list[int] = []
    size = prompt - 1
    for i, rollout in enumerate(group.rollouts):
        takes = 1 + rollout.tokens.size
        if together and (len(together) == most or size + takes > packing.row_tokens):
            yield PackUnit(together, True, size)
            together, size = [], prompt - 1
        together.append(i)
        size += takes
    yield PackUnit(together, True, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Micro-batch as the jitted step takes it: B rows of S tokens, and its share of the sums."""

    tokens: Int32[Array | np.ndarray, "B S"]
    positions: Int32[Array | np.ndarray, "B S"]
    """Position of each token, from 0 in every sequence."""
    segment_ids: Int32[Array | np.ndarray, "B S"]
    """Segment number along the row, from 1, per sequence or shared prompt; 0 is padding."""
    loss_mask: Bool[Array | np.ndarray, "B S"]
    behavior_logprobs: Float32[Array | np.ndarray, "B S"]
    advantages: Float32[Array | np.ndarray, "B S"]
    """Advantage of each trained token; with a critic its reward, until the critic replaces it (`critic_step.py`)."""
    token_versions: Int32[Array | np.ndarray, "B S"]
    token_weights: Float32[Array | np.ndarray, "B S"]
    """Factor of each token's loss from the normalization; 0 where loss_mask is False."""
    denominator: Float32[Array | np.ndarray, ""]
    """Batch's share of the divisor of the update's sum."""
    rewards: Moments
    response_tokens: Moments
    """Moments of the tokens that the policy sampled, over this batch's sequences; observed tokens are excluded."""
    num_groups: Int32[Array | np.ndarray, ""]
    """Groups whose last sequence is in this batch."""
    num_zero_variance_groups: Int32[Array | np.ndarray, ""]
    """Groups of `num_groups` without a learning signal (`reward_shaping.has_learning_signal`)."""
    num_truncated: Int32[Array | np.ndarray, ""]
    """Sequences of this batch that the token limit truncated."""
    teacher_ids: Int8[Array | np.ndarray, "B S"]
    """Number of the token's teacher (`LossConfig.teacher_number`); 0 for none, and where loss_mask is False."""
    teacher_logprobs: Float32[Array | np.ndarray, "B S"]
    """Logprobs by teachers on servers (`Rollout.teacher_logprobs`); 0 at other tokens."""
    prefix_ids: Int32[Array | np.ndarray, "B S"] | None = None
    """Segment of the shared prompt that a token also attends to, 0 for none; None if prompts are not shared."""
    group_ids: Int32[Array | np.ndarray, "B S"] | None = None
    """Number of a response's group in the micro-batch, from 1; 0 elsewhere. None without packing.whole_groups."""
    routed_experts: Int16[Array | np.ndarray, "B S layers k"] | None = None
    """Experts of each token by the engine's router, -1 where not captured; None without model.routing_replay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Packed batch and the host's information about it, which is never traced."""

    batch: PackedBatch
    ticket_ids: tuple[str, ...]
    """Groups fully consumed with this batch: each id is on the last batch that holds one of its sequences."""
    sum_squared_lengths: float
    """Sum of tokens^2 over its sequences, a shared prompt counted once: the cost of causal attention."""
    ends_pack: bool
    """True for the last batch of a pack; the learner may then have to wait for groups."""
    ends_update: bool
    ends_round: bool
    teachers: tuple[int, ...] = ()
    """Numbers in `batch.teacher_ids`, except 0."""


OnGroup = Callable[[Group, list[Float32[np.ndarray, " T"]]], None]
"""Callback for a packed group and the advantages of its responses' tokens."""


@dataclasses.dataclass(frozen=True)
class _Sequence:
    group: int
    prompt_tokens: Int32[np.ndarray, " P"]
    rollout: Rollout
    trained: Bool[np.ndarray, " T"]
    advantages: Float32[np.ndarray, " T"]
    teacher: int

    @property
    def size(self) -> int:
        return self.prompt_tokens.size + self.rollout.tokens.size


class _Unit(NamedTuple):
    """Packed unit: a sequence, or with `packing.share_prompts` several sequences of a group after their prompt."""

    sequences: Sequence[_Sequence]
    shares: bool
    size: int

    @property
    def group(self) -> int:
        return self.sequences[0].group

    @property
    def num_segments(self) -> int:
        return self.shares + len(self.sequences)

    @property
    def sum_squared_lengths(self) -> int:
        again = (len(self.sequences) - 1) * self.sequences[0].prompt_tokens.size ** 2 if self.shares else 0
        return sum(s.size**2 for s in self.sequences) - again


def pack_groups(
    groups: Sequence[Group],
    *,
    packing: PackingConfig,
    loss: LossConfig,
    max_response_tokens: int,
    masks_truncated: bool = False,
    routing: RoutingShape | None = None,
    ends_update: bool = False,
    ends_round: bool = False,
    teachers: Sequence[int] = (),
    on_group: OnGroup = lambda group, advantages: None,
) -> list[MicroBatch]:
    """Packs complete groups into as many micro-batches as they fill; the flags are set on the last one.

    Sequences are placed independently of their groups, so a group may be spread over several micro-batches, unless
    `packing.whole_groups` is set. Each group's advantages are computed here from its shaped rewards.

    Raises ValueError if there is no group, a sequence is longer than a row, or with `packing.whole_groups` a group does
    not fit a micro-batch.

    Args:
      max_response_tokens: constant of normalization=constant, and length at which the overlong penalty is full.
      masks_truncated: True if tokens of truncated responses are not trained (prompts.truncated_responses=mask). Their
        rewards still count in their groups' advantages.
      routing: sizes of the routing to replay; None replays none. A shared prompt has the routing of one response.
      teachers: number of each group's teacher, 0 for none; empty if no group has one.
    """
    if not groups:
        raise ValueError("pack_groups needs at least one group")
    units: list[_Unit] = []
    signal: list[bool] = []
    for i, group in enumerate(groups):
        _check_fits(group, packing)
        rewards = np.array([r.reward for r in group.rollouts], np.float64)
        lengths = np.array([num_sampled(r) for r in group.rollouts])
        shaped = shaped_rewards(rewards, lengths, loss, max_response_tokens)
        signal.append(has_learning_signal(group, loss, masks_truncated=masks_truncated))
        of_group = token_advantages(group.rollouts, shaped, loss)
        on_group(group, of_group)
        sequences = [
            _Sequence(
                group=i,
                prompt_tokens=group.prompt_tokens,
                rollout=rollout,
                trained=trained_tokens(rollout, masks_truncated=masks_truncated),
                advantages=own,
                teacher=teachers[i] if teachers else 0,
            )
            for rollout, own in zip(group.rollouts, of_group, strict=True)
        ]
        for part in parts(group, packing):
            units.append(_Unit([sequences[j] for j in part.rollouts], part.shares, part.size))
    chunks = list(_chunks(units, packing))
    last = {unit.group: n for n, chunk in enumerate(chunks) for row in chunk for unit in row}
    batches = []
    for n, chunk in enumerate(chunks):
        done = [i for i in range(len(groups)) if last[i] == n]
        batch = _pack_rows(chunk, packing, loss, max_response_tokens, routing)
        batch = dataclasses.replace(
            batch,
            num_groups=np.asarray(len(done), np.int32),
            num_zero_variance_groups=np.asarray(sum(not signal[i] for i in done), np.int32),
        )
        is_last = n == len(chunks) - 1
        batches.append(
            MicroBatch(
                batch=batch,
                ticket_ids=tuple(groups[i].ticket_id for i in done),
                sum_squared_lengths=float(sum(unit.sum_squared_lengths for row in chunk for unit in row)),
                ends_pack=is_last,
                ends_update=ends_update and is_last,
                ends_round=ends_round and is_last,
                teachers=tuple(np.unique(batch.teacher_ids[batch.teacher_ids > 0]).tolist()),
            )
        )
    return batches


def _chunks(units: list[_Unit], packing: PackingConfig) -> Iterator[list[list[_Unit]]]:
    """Yields the rows of each micro-batch; with `packing.whole_groups` as many whole groups as fit, in order."""
    if not packing.whole_groups:
        rows = _rows_of(units, packing)
        yield from (rows[i : i + packing.rows] for i in range(0, len(rows), packing.rows))
        return
    taken: list[_Unit] = []
    rows: list[list[_Unit]] = []
    for _, group in itertools.groupby(units, lambda unit: unit.group):
        of_group = list(group)
        tried = _rows_of(taken + of_group, packing)
        if taken and len(tried) > packing.rows:
            yield rows
            taken, tried = [], _rows_of(of_group, packing)
        if len(tried) > packing.rows:
            raise ValueError(
                f"packing.whole_groups: a group needs {len(tried)} rows of {packing.row_tokens} tokens, got "
                f"packing.rows={packing.rows}; raise it"
            )
        taken, rows = taken + of_group, tried
    yield rows


def _rows_of(units: list[_Unit], packing: PackingConfig) -> list[list[_Unit]]:
    rows = first_fit_decreasing([u.size for u in units], packing, num_segments=[u.num_segments for u in units])
    return [[units[j] for j in row] for row in rows]


def empty_batch(packing: PackingConfig, routing: RoutingShape | None = None) -> PackedBatch:
    """Returns a batch of padding only, with the shapes and dtypes of every batch."""
    return _pack_rows([], packing, LossConfig(), 1, routing)


def _check_fits(group: Group, packing: PackingConfig) -> None:
    longest = group.prompt_tokens.size + max(r.tokens.size for r in group.rollouts)
    if longest > packing.row_tokens:
        raise ValueError(
            f"ticket {group.ticket_id}: a sequence must fit a row of {packing.row_tokens} tokens, got {longest}; "
            "check model.max_tokens and packing.row_tokens"
        )


def _pack_rows(
    rows: list[list[_Unit]],
    packing: PackingConfig,
    loss: LossConfig,
    max_response_tokens: int,
    routing: RoutingShape | None,
) -> PackedBatch:
    def zeros(dtype: type[np.generic]) -> np.ndarray:
        return np.zeros((packing.rows, packing.row_tokens), dtype)

    tokens, positions, segments, prefixes, versions, group_ids = (zeros(np.int32) for _ in range(6))
    behavior, advantages, weights, taught = (zeros(np.float32) for _ in range(4))
    mask, teachers = zeros(np.bool_), zeros(np.int8)
    routed = None if routing is None else routing.nothing(packing.rows, packing.row_tokens)
    denominator = 0
    numbers: dict[int, int] = {}
    for b, row in enumerate(rows):
        for s, place in _places(row):
            start, end = place.start, place.start + s.size - place.first
            response = end - s.rollout.tokens.size
            weight, share = token_weight(loss.normalized_by, int(s.trained.sum()), max_response_tokens)
            denominator += share
            shared = slice(place.prefix_start, place.prefix_start + place.first)
            if place.prefix:
                tokens[b, shared] = s.prompt_tokens[: place.first]
                positions[b, shared] = np.arange(place.first)
                segments[b, shared] = place.prefix
            tokens[b, start:response] = s.prompt_tokens[place.first :]
            tokens[b, response:end] = s.rollout.tokens
            positions[b, start:end] = np.arange(place.first, s.size)
            segments[b, start:end] = place.segment
            prefixes[b, start:end] = place.prefix
            versions[b, response:end] = s.rollout.token_versions
            group_ids[b, response:end] = numbers.setdefault(s.group, len(numbers) + 1)
            mask[b, response:end] = s.trained
            behavior[b, response:end] = np.where(s.trained, s.rollout.behavior_logprobs, 0)
            advantages[b, response:end] = np.where(s.trained, s.advantages, 0)
            weights[b, response:end] = np.where(s.trained, weight, 0)
            teachers[b, response:end] = np.where(s.trained, s.teacher, 0)
            if s.rollout.teacher_logprobs is not UNSET:
                taught[b, response:end] = np.where(s.trained, s.rollout.teacher_logprobs, 0)
            if routed is not None and s.rollout.routed_experts is not UNSET:
                routed[b, start : end - 1] = s.rollout.routed_experts[place.first :]
                if place.prefix:
                    routed[b, shared] = s.rollout.routed_experts[: place.first]
    sequences = [s for row in rows for unit in row for s in unit.sequences]
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        segment_ids=segments,
        loss_mask=mask,
        behavior_logprobs=behavior,
        advantages=advantages,
        token_versions=versions,
        token_weights=weights,
        denominator=np.asarray(denominator, np.float32),
        rewards=Moments.of([s.rollout.reward for s in sequences]),
        response_tokens=Moments.of([num_sampled(s.rollout) for s in sequences]),
        num_groups=np.zeros((), np.int32),
        num_zero_variance_groups=np.zeros((), np.int32),
        num_truncated=np.asarray(sum(s.rollout.finish == "length" for s in sequences), np.int32),
        teacher_ids=teachers,
        teacher_logprobs=taught,
        prefix_ids=prefixes if packing.share_prompts else None,
        group_ids=group_ids if packing.whole_groups else None,
        routed_experts=routed,
    )


class _Place(NamedTuple):
    """Placement of a sequence in its row."""

    start: int
    segment: int
    first: int
    """Index of its first token that is stored with it; earlier tokens are in the shared prompt."""
    prefix: int
    """Segment of the shared prompt; 0 for none."""
    prefix_start: int


def _places(row: Sequence[_Unit]) -> Iterator[tuple[_Sequence, _Place]]:
    """Yields the sequences of a row's units with their placements, one after the other."""
    start, segment = 0, 0
    for unit in row:
        first, prefix, prefix_start = 0, 0, start
        if unit.shares:
            first, prefix = unit.sequences[0].prompt_tokens.size - 1, segment + 1
            start, segment = start + first, prefix
        for s in unit.sequences:
            segment += 1
            yield s, _Place(start, segment, first, prefix, prefix_start)
            start += s.size - first
