"""How far off-policy an update is: statistics of one micro-batch, their merge, and the final numbers.

`merge(measure(a), measure(b))` equals `measure` of both together, whatever the split, so an update's numbers
do not depend on how its tokens were packed. All sums are plain sums except two. Importance weights are
summed in log space, where e^200 is as good as e^0. Means of host numbers travel as moments (Chan et al.
1979), because a float32 sum of squares loses the variance of large rewards.

w_t = pi_t / mu_t, current policy over behaviour policy (PipelineRL's w), untruncated. Lag of a token =
learner step now - its version.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, Int32, jaxtyped

from learner.packing import Moments, PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What is known of the tokens, sequences and groups so far; scalars only.

    The name says how a field merges: `log_sum_*` by logaddexp, `*max*` by maximum, moments as moments, all
    others add.
    """

    num_slots: Int32[Array, ""]
    """Places in the packed rows, padding included."""
    num_real_tokens: Int32[Array, ""]
    """Prompt and response tokens, the ones the model computes for a reason."""
    num_tokens: Int32[Array, ""]
    """Tokens that train (loss_mask)."""
    num_lag0_tokens: Int32[Array, ""]
    num_clipped_tokens: Int32[Array, ""]
    num_groups: Int32[Array, ""]
    num_zero_variance_groups: Int32[Array, ""]
    lag_sum: Float[Array, ""]
    lag_max: Int32[Array, ""]
    entropy_sum: Float[Array, ""]
    log_w_sum: Float[Array, ""]
    k3_sum: Float[Array, ""]
    """Sum of w - 1 - log w."""
    log_sum_w: Float[Array, ""]
    """log of the sum of w over tokens; -inf of none."""
    log_sum_w2: Float[Array, ""]
    """log of the sum of w^2 over tokens."""
    num_sequences: Int32[Array, ""]
    log_sum_sequence_w: Float[Array, ""]
    """log of the sum over sequences of prod_t w_t."""
    log_sum_sequence_w2: Float[Array, ""]
    max_abs_log_w: Float[Array, ""]
    max_abs_log_w_lag0: Float[Array, ""]
    rewards: Moments
    response_tokens: Moments

    @classmethod
    def zeros(cls) -> "Stats":
        """The statistics of nothing: the neutral element of `merge`."""
        zero = jnp.float32(0)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.type is Moments:
                values[field.name] = Moments(count=zero, mean=zero, sum_squares=zero)
            elif field.name.startswith("log_sum"):
                values[field.name] = jnp.float32(-jnp.inf)
            else:
                is_count = field.name.startswith(("num_", "lag_max"))
                values[field.name] = jnp.int32(0) if is_count else zero
        return cls(**values)


@jaxtyped(typechecker=beartype)
def measure(
    batch: PackedBatch,
    *,
    logprobs: Float[Array, "B S"],
    entropy: Float[Array, "B S"],
    clipped: Bool[Array, "B S"],
    step: Int[Array, ""],
) -> Stats:
    """The statistics of one micro-batch trained at learner step `step`."""
    mask = jnp.asarray(batch.loss_mask)
    log_w = jnp.where(mask, logprobs - batch.behavior_logprobs, 0.0)
    lag = jnp.where(mask, step - batch.token_versions, 0)
    fresh = mask & (lag == 0)
    sequence_log_w, is_sequence = _sequence_sums(log_w, batch)

    def count(where: Array) -> Array:
        return jnp.sum(where, dtype=jnp.int32)

    def log_sum(x: Array, where: Array) -> Array:
        return jax.nn.logsumexp(x, where=where)

    return Stats(
        num_slots=jnp.int32(mask.size),
        num_real_tokens=count(jnp.asarray(batch.segment_ids) > 0),
        num_tokens=count(mask),
        num_lag0_tokens=count(fresh),
        num_clipped_tokens=count(clipped & mask),
        num_groups=jnp.asarray(batch.num_groups),
        num_zero_variance_groups=jnp.asarray(batch.num_zero_variance_groups),
        lag_sum=jnp.sum(lag.astype(jnp.float32)),
        lag_max=jnp.max(lag),
        entropy_sum=jnp.sum(jnp.where(mask, entropy, 0.0)),
        log_w_sum=jnp.sum(log_w),
        # expm1 keeps the digits that exp(x) - 1 loses at x near 0, where an on-policy run lives.
        k3_sum=jnp.sum(jnp.expm1(log_w) - log_w),
        log_sum_w=log_sum(log_w, mask),
        log_sum_w2=log_sum(2 * log_w, mask),
        num_sequences=count(is_sequence),
        log_sum_sequence_w=log_sum(sequence_log_w, is_sequence),
        log_sum_sequence_w2=log_sum(2 * sequence_log_w, is_sequence),
        max_abs_log_w=jnp.max(jnp.abs(log_w)),
        max_abs_log_w_lag0=jnp.max(jnp.where(fresh, jnp.abs(log_w), 0.0)),
        rewards=jax.tree.map(jnp.asarray, batch.rewards),
        response_tokens=jax.tree.map(jnp.asarray, batch.response_tokens),
    )


def merge(a: Stats, b: Stats) -> Stats:
    """The statistics of both together; associative and commutative up to rounding."""
    merged = {}
    for field in dataclasses.fields(Stats):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, Moments):
            merged[field.name] = _merge_moments(x, y)
        elif field.name.startswith("log_sum"):
            merged[field.name] = jnp.logaddexp(x, y)
        elif "max" in field.name:
            merged[field.name] = jnp.maximum(x, y)
        else:
            merged[field.name] = x + y
    return Stats(**merged)


def finalize(stats: Stats) -> dict[str, Array]:
    """The numbers of an update by their names in `learner/metrics.py`, and `real_tokens` for the loop's use.

    `ess` is (sum w)^2 / (N sum w^2) over the update's tokens, `ess_sequence` the same over sequences with
    w = prod_t w_t (PipelineRL, eq. 6); 1 on-policy. The learner-engine mismatch is KL(mu || pi), estimated
    from mu's samples: `mismatch_kl` (k1) is mean(log mu - log pi), unbiased; `mismatch_kl_k3` is
    mean(w - 1 - log w), never negative and of lower variance (Schulman's note). `max_abs_dlogprob_lag0` looks
    at tokens of the current weights only, so it shows the engine's error without the policy's change; NaN
    if there are none.
    """
    tokens = jnp.maximum(stats.num_tokens, 1).astype(jnp.float32)
    sequences = jnp.maximum(stats.num_sequences, 1).astype(jnp.float32)
    log_ess = 2 * stats.log_sum_w - jnp.log(tokens) - stats.log_sum_w2
    log_ess_sequence = 2 * stats.log_sum_sequence_w - jnp.log(sequences) - stats.log_sum_sequence_w2
    return {
        "tokens": stats.num_tokens,
        "real_tokens": stats.num_real_tokens,
        "sequences": stats.num_sequences,
        "packing/fill": stats.num_real_tokens / jnp.maximum(stats.num_slots, 1),
        "ess": jnp.exp(log_ess),
        "ess_sequence": jnp.exp(log_ess_sequence),
        "ratio/mean": jnp.exp(stats.log_sum_w - jnp.log(tokens)),
        "lag/mean": stats.lag_sum / tokens,
        "lag/max": stats.lag_max,
        "mismatch_kl": -stats.log_w_sum / tokens,
        "mismatch_kl_k3": stats.k3_sum / tokens,
        "max_abs_dlogprob": stats.max_abs_log_w,
        "max_abs_dlogprob_lag0": jnp.where(stats.num_lag0_tokens > 0, stats.max_abs_log_w_lag0, jnp.nan),
        "clip_fraction": stats.num_clipped_tokens / tokens,
        "entropy": stats.entropy_sum / tokens,
        "reward/mean": jnp.asarray(stats.rewards.mean),
        "reward/std": _std(stats.rewards),
        "reward/zero_variance_groups": stats.num_zero_variance_groups / jnp.maximum(stats.num_groups, 1),
        "response/mean_tokens": jnp.asarray(stats.response_tokens.mean),
    }


def _sequence_sums(log_w: Float[Array, "B S"], batch: PackedBatch) -> tuple[Array, Array]:
    """Per sequence, [B, segments]: sum_t log w_t, and whether there is such a sequence."""
    segment_ids = jnp.asarray(batch.segment_ids)
    num_segments = log_w.shape[1] // 2 + 1  # a sequence has a prompt and a response token; 0 is padding

    def one_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, num_segments=num_segments)

    sums = jax.vmap(one_row)(log_w, segment_ids)
    trained = jax.vmap(one_row)(jnp.asarray(batch.loss_mask).astype(jnp.int32), segment_ids)
    return sums, trained > 0


def _merge_moments(a: Moments, b: Moments) -> Moments:
    """Chan, Golub, LeVeque (1979): M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / n."""
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1)
    delta = b.mean - a.mean
    return Moments(
        count=count,
        mean=a.mean + delta * share,
        sum_squares=a.sum_squares + b.sum_squares + delta**2 * a.count * share,
    )


def _std(moments: Moments) -> Array:
    return jnp.sqrt(moments.sum_squares / jnp.maximum(moments.count, 1))
