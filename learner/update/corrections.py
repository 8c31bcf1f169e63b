"""Correction between the engine's policy mu and the learner's policy pi on packed rows: weights, rejection and veto.

x_t = log pi_t - log mu_t of a trained token. The ratio of a level is exp of x_t itself (token), or of the sum or mean
of x over the trained tokens of a turn or sequence. A turn is a run of trained tokens without an observed token between
them. All sums are by segment, so they do not depend on where packing puts a sequence.

The weights are those of truncated and masked importance sampling (IMPALA; flash-rl; IcePop). Rejection and veto remove
tokens from the loss and from its normalization.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from configs.sections import CorrectionConfig
from configs.sections.correction import Level
from configs.sections.loss_table import Normalization
from learner.update.reductions import at_tokens, segment_means, segment_sums


class Correction(NamedTuple):
    """Correction of each token of a micro-batch; all constants."""

    weight: Float[Array, "B S"] | None
    """Factor of the policy loss; None without `CorrectionConfig.weight`."""
    bounded: Bool[Array, "B S"]
    """True at trained tokens whose weight is not their ratio, because a bound was reached."""
    kept: Bool[Array, "B S"]
    """True at trained tokens that are not rejected."""
    vetoed: Bool[Array, "B S"]
    """True at trained tokens that are rejected by the veto."""
    log_ratio: Float[Array, "B S"]
    """Log of the ratio of the configured level: the weight's, else that of the rejection, else the token's."""


@jaxtyped(typechecker=beartype)
def correct(
    log_ratio: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
    segment_ids: Int[Array, "B S"],
    group_ids: Int[Array, "B S"] | None,
    config: CorrectionConfig,
) -> Correction:
    """Returns the correction of a micro-batch.

    With the bounds lo and hi and the ratio w of a level: weight = min(max(w, lo), hi) (truncate), or w for lo <= w <=
    hi and 0 elsewhere (mask). A token is kept if lo' <= w' <= hi' for the ratio w' of the rejection, and no token of
    its sequence or group has a ratio below the veto's bound. `log_ratio` is x, in nats, read at trained tokens only.
    `veto=group` requires `group_ids`.
    """
    x = jnp.where(mask, log_ratio, 0.0)

    def of_level(level: Level) -> Float[Array, "B S"]:
        if level in ("off", "token"):
            return x
        ids = turn_ids(mask) if level.startswith("turn") else segment_ids
        if level.endswith("mean"):
            return segment_means(x, mask, ids)
        return at_tokens(segment_sums(x, ids), ids)

    of_weight, of_rejection = of_level(config.weight), of_level(config.reject)
    bounded = mask & _is_outside(of_weight, config.min_weight, config.max_weight) & (config.weight != "off")
    kept = mask
    if config.reject != "off":
        kept = kept & ~_is_outside(of_rejection, config.min_ratio, config.max_ratio)
    vetoed = _vetoed(x, mask, segment_ids, group_ids, config)
    return Correction(
        weight=None if config.weight == "off" else _weight(of_weight, config),
        bounded=bounded,
        kept=kept & ~vetoed,
        vetoed=vetoed,
        log_ratio=of_rejection if config.weight == "off" else of_weight,
    )


def _weight(log_ratio: Array, config: CorrectionConfig) -> Array:
    weight = jnp.exp(jnp.clip(log_ratio, _log(config.min_weight), _log(config.max_weight)))
    if config.outside == "truncate":
        return weight
    return jnp.where(_is_outside(log_ratio, config.min_weight, config.max_weight), 0.0, weight)


def _is_outside(log_ratio: Array, least: float, most: float) -> Array:
    return (log_ratio < _log(least)) | (log_ratio > _log(most))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _vetoed(x: Array, mask: Array, segment_ids: Array, group_ids: Array | None, config: CorrectionConfig) -> Array:
    is_low = mask & (x < _log(config.veto_ratio))
    match config.veto:
        case "off":
            return jnp.zeros_like(mask)
        case "sequence":
            return mask & (at_tokens(segment_sums(is_low.astype(jnp.int32), segment_ids), segment_ids) > 0)
        case "group":
            assert group_ids is not None  # the config requires packing.whole_groups
            return mask & (count_by_group(is_low, group_ids)[group_ids] > 0)


def count_by_group(where: Bool[Array, "B S"], group_ids: Int[Array, "B S"]) -> Int[Array, " groups"]:
    """Returns the number of tokens of each group of the micro-batch, over all rows; entry 0 is padding."""
    # A sequence has at least two tokens, so there are at most half as many groups.
    return jnp.zeros(where.size // 2 + 1, jnp.int32).at[group_ids].add(where.astype(jnp.int32))


def turn_ids(mask: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns the number of each trained token's turn along the row, from 1; 0 at other tokens.

    The first token of a sequence is never trained. A run of trained tokens is therefore in one sequence, and a row of S
    tokens has at most S / 2 turns.
    """
    starts = mask & ~jnp.roll(mask, 1, axis=1)
    return jnp.where(mask, jnp.cumsum(starts, axis=1, dtype=jnp.int32), 0)


def normalize(
    kept: Bool[Array, "B S"], segment_ids: Int[Array, "B S"], normalization: Normalization, max_response_tokens: int
) -> tuple[Float[Array, "B S"], Float[Array, ""]]:
    """Returns the token weights and the divisor of the kept tokens: `losses.token_weight` of each segment."""
    counts = segment_sums(kept.astype(jnp.float32), segment_ids)
    num_sequences = jnp.sum(counts > 0).astype(jnp.float32)
    weights = kept.astype(jnp.float32)
    match normalization:
        case "token":
            return weights, jnp.sum(counts)
        case "sequence":
            return weights / jnp.maximum(at_tokens(counts, segment_ids), 1), num_sequences
        case "sequence_sum":
            return weights, num_sequences
        case "constant":
            return weights, num_sequences * max_response_tokens
