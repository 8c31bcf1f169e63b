"""Off-policy diagnostics: statistics per micro-batch that merge exactly, and the metrics of an update.

`merge(measure(a), measure(b))` equals `measure` of both together for any split, so an update's metrics do not depend on
its packing. All fields are plain sums except three kinds. Importance weights are summed in log space, which avoids
overflow. Quantiles are from a histogram with fixed bins. Means of host numbers are moments.

w_t = pi_t / mu_t, current policy over behavior policy (PipelineRL's w), untruncated. Lag of a token = learner step -
its version.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, Int32, jaxtyped

from learner.objective.kl_estimators import k3
from learner.update import reductions
from learner.update.corrections import Correction, count_by_group
from learner.update.packing import PackedBatch
from learner.update.reductions import NUM_BINS, Moments, count_log_ratios, quantile, segment_sums

MAX_EXPONENT = 88.0
"""Largest log of a mean ratio that is reported: float32 overflows beyond e^88."""
LAG_BUCKETS: dict[str, int] = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8_up": 8}
"""Name of each lag bucket -> its lowest lag, in steps."""


@dataclasses.dataclass(frozen=True)
class Merging:
    """Merge function of a field, and its value for no data."""

    both: Callable[[Any, Any], Any]
    nothing: Callable[[], Any]


def _merging(
    both: Callable[[Any, Any], Any], start: float, dtype: Any = jnp.float32, shape: tuple[int, ...] = ()
) -> dict[str, Merging]:
    return {"merging": Merging(both, lambda: jnp.full(shape, start, dtype))}


_LAGS = (len(LAG_BUCKETS),)
_COUNT = _merging(jnp.add, 0, jnp.int32)
_COUNT_BY_LAG = _merging(jnp.add, 0, jnp.int32, _LAGS)
_COUNT_BY_BIN = _merging(jnp.add, 0, jnp.int32, (NUM_BINS,))
_SUM = _merging(jnp.add, 0)
_LOG_SUM = _merging(jnp.logaddexp, -jnp.inf)
_LOG_SUM_BY_LAG = _merging(jnp.logaddexp, -jnp.inf, shape=_LAGS)
_LARGEST = _merging(jnp.maximum, 0)
_LARGEST_LOG = _merging(jnp.maximum, -jnp.inf)
_LARGEST_COUNT = _merging(jnp.maximum, 0, jnp.int32)
_MOMENTS = {"merging": Merging(reductions.merge, Moments.zeros)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of tokens, sequences and groups: scalars, and short vectors of counts and sums.

    Each field's metadata defines how it merges.
    """

    num_slots: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Slots of the packed rows, including padding."""
    num_real_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Prompt and response tokens, without padding."""
    num_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Trained tokens (loss_mask)."""
    num_lag0_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    num_clipped_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    num_groups: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    num_zero_variance_groups: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    num_truncated: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Sequences truncated by the token limit."""
    lag_sum: Float[Array, ""] = dataclasses.field(metadata=_SUM)
    lag_max: Int32[Array, ""] = dataclasses.field(metadata=_LARGEST_COUNT)
    entropy_sum: Float[Array, ""] = dataclasses.field(metadata=_SUM)
    log_w_sum: Float[Array, ""] = dataclasses.field(metadata=_SUM)
    k3_sum: Float[Array, ""] = dataclasses.field(metadata=_SUM)
    """Sum of w - 1 - log w; beyond w = e^20 by the tangent at that point."""
    log_sum_w: Float[Array, ""] = dataclasses.field(metadata=_LOG_SUM)
    """log of the sum of w over tokens; -inf if empty."""
    log_sum_w2: Float[Array, ""] = dataclasses.field(metadata=_LOG_SUM)
    """log of the sum of w^2 over tokens."""
    num_sequences: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    log_sum_sequence_w: Float[Array, ""] = dataclasses.field(metadata=_LOG_SUM)
    """log of the sum over sequences of prod_t w_t."""
    log_sum_sequence_w2: Float[Array, ""] = dataclasses.field(metadata=_LOG_SUM)
    reference_kl_sum: Float[Array, ""] = dataclasses.field(metadata=_SUM)
    teacher_kl_sum: Float[Array, ""] = dataclasses.field(metadata=_SUM)
    num_teacher_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Trained tokens with a teacher."""
    num_tokens_by_lag: Int32[Array, " buckets"] = dataclasses.field(metadata=_COUNT_BY_LAG)
    """Trained tokens by `LAG_BUCKETS`."""
    log_sum_w_by_lag: Float[Array, " buckets"] = dataclasses.field(metadata=_LOG_SUM_BY_LAG)
    log_sum_w2_by_lag: Float[Array, " buckets"] = dataclasses.field(metadata=_LOG_SUM_BY_LAG)
    num_tokens_by_log_w: Int32[Array, " bins"] = dataclasses.field(metadata=_COUNT_BY_BIN)
    """Trained tokens by the bins of learner/update/reductions.py."""
    max_abs_log_w: Float[Array, ""] = dataclasses.field(metadata=_LARGEST)
    max_abs_log_w_lag0: Float[Array, ""] = dataclasses.field(metadata=_LARGEST)
    rewards: Moments = dataclasses.field(metadata=_MOMENTS)
    response_tokens: Moments = dataclasses.field(metadata=_MOMENTS)
    num_masked_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Kept tokens whose correction weight is 0."""
    num_rejected_tokens: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    num_rejected_sequences: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    """Sequences without a kept token."""
    num_vetoed_sequences: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    num_vetoed_groups: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)
    log_sum_correction: Float[Array, ""] = dataclasses.field(metadata=_LOG_SUM)
    """log of the sum over trained tokens of the correction's ratio."""
    max_log_correction: Float[Array, ""] = dataclasses.field(metadata=_LARGEST_LOG)

    @classmethod
    def zeros(cls) -> "Stats":
        """Returns the statistics of no data: the neutral element of `merge`."""
        return _zeros(cls)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueStats:
    """Statistics of a critic over actions; they merge as `Stats`."""

    returns: Moments = dataclasses.field(metadata=_MOMENTS)
    """Targets of the values."""
    values: Moments = dataclasses.field(metadata=_MOMENTS)
    """Values before the update."""
    errors: Moments = dataclasses.field(metadata=_MOMENTS)
    """Differences between returns and these values."""
    num_clipped: Int32[Array, ""] = dataclasses.field(metadata=_COUNT)

    @classmethod
    def zeros(cls) -> "ValueStats":
        """Returns the statistics of no data: the neutral element of `merge`."""
        return _zeros(cls)


S = TypeVar("S", bound=Stats | ValueStats)


def _zeros(kind: type[S]) -> S:
    return kind(**{field.name: field.metadata["merging"].nothing() for field in dataclasses.fields(kind)})


@jaxtyped(typechecker=beartype)
def measure(
    batch: PackedBatch,
    *,
    logprobs: Float[Array, "B S"],
    entropy: Float[Array, "B S"],
    clipped: Bool[Array, "B S"],
    kl: Float[Array, "B S"],
    teacher_kl: Float[Array, "B S"],
    step: Int[Array, ""],
    correction: Correction | None = None,
) -> Stats:
    """Returns the statistics of one micro-batch; `step` is the learner's before the update.

    Arrays are read only where the batch's loss_mask is True. Log-probabilities, `entropy`, `kl` (to the reference
    policy) and `teacher_kl` (policy to teacher) are in nats per token; the last two and `clipped` are from the loss
    (`losses.TokenLoss`). Without a `correction` its statistics are 0.
    """
    mask = jnp.asarray(batch.loss_mask)
    log_w = jnp.where(mask, logprobs - batch.behavior_logprobs, 0.0)
    lag = jnp.where(mask, step - batch.token_versions, 0)
    fresh = mask & (lag == 0)
    segment_ids = jnp.asarray(batch.segment_ids)
    sequence_log_w = segment_sums(log_w, segment_ids)
    is_sequence = segment_sums(mask.astype(jnp.int32), segment_ids) > 0
    lowest = jnp.array(list(LAG_BUCKETS.values()))
    bucket = jnp.searchsorted(lowest, lag, side="right") - 1
    in_bucket = mask & (bucket == jnp.arange(lowest.size)[:, None, None])

    def count(where: Array) -> Array:
        return jnp.sum(where, dtype=jnp.int32)

    def log_sum(x: Array, where: Array) -> Array:
        return jax.nn.logsumexp(x, where=where)

    def log_sum_by_lag(x: Array) -> Array:
        return jax.nn.logsumexp(jnp.broadcast_to(x, in_bucket.shape), axis=(1, 2), where=in_bucket)

    return Stats(
        num_slots=jnp.int32(mask.size),
        num_real_tokens=count(segment_ids > 0),
        num_tokens=count(mask),
        num_lag0_tokens=count(fresh),
        num_clipped_tokens=count(clipped & mask),
        num_groups=jnp.asarray(batch.num_groups),
        num_zero_variance_groups=jnp.asarray(batch.num_zero_variance_groups),
        num_truncated=jnp.asarray(batch.num_truncated),
        lag_sum=jnp.sum(lag.astype(jnp.float32)),
        lag_max=jnp.max(lag),
        entropy_sum=jnp.sum(jnp.where(mask, entropy, 0.0)),
        log_w_sum=jnp.sum(log_w),
        k3_sum=jnp.sum(k3(-log_w)),
        log_sum_w=log_sum(log_w, mask),
        log_sum_w2=log_sum(2 * log_w, mask),
        num_sequences=count(is_sequence),
        log_sum_sequence_w=log_sum(sequence_log_w, is_sequence),
        log_sum_sequence_w2=log_sum(2 * sequence_log_w, is_sequence),
        reference_kl_sum=jnp.sum(jnp.where(mask, kl, 0.0)),
        teacher_kl_sum=jnp.sum(jnp.where(mask, teacher_kl, 0.0)),
        num_teacher_tokens=count(
            (mask if correction is None else correction.kept) & (jnp.asarray(batch.teacher_ids) > 0)
        ),
        num_tokens_by_lag=jnp.sum(in_bucket, axis=(1, 2), dtype=jnp.int32),
        log_sum_w_by_lag=log_sum_by_lag(log_w),
        log_sum_w2_by_lag=log_sum_by_lag(2 * log_w),
        num_tokens_by_log_w=count_log_ratios(log_w, mask),
        max_abs_log_w=jnp.max(jnp.abs(log_w)),
        max_abs_log_w_lag0=jnp.max(jnp.where(fresh, jnp.abs(log_w), 0.0)),
        rewards=jax.tree.map(jnp.asarray, batch.rewards),
        response_tokens=jax.tree.map(jnp.asarray, batch.response_tokens),
        **_measure_correction(batch, correction),
    )


def _measure_correction(batch: PackedBatch, correction: Correction | None) -> dict[str, Array]:
    mask, segment_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids)
    if correction is None:
        nothing = jnp.zeros_like(mask)
        correction = Correction(None, nothing, mask, nothing, jnp.zeros(mask.shape))

    def num_sequences(where: Array) -> Array:
        return jnp.sum(segment_sums((mask & where).astype(jnp.int32), segment_ids) > 0, dtype=jnp.int32)

    num_vetoed_groups = jnp.int32(0)
    if batch.group_ids is not None:
        of_group = count_by_group(correction.vetoed, jnp.asarray(batch.group_ids))
        num_vetoed_groups = jnp.sum(of_group > 0, dtype=jnp.int32)
    is_zero = jnp.zeros_like(mask) if correction.weight is None else correction.weight == 0
    return {
        "num_masked_tokens": jnp.sum(correction.kept & is_zero, dtype=jnp.int32),
        "num_rejected_tokens": jnp.sum(mask & ~correction.kept, dtype=jnp.int32),
        "num_rejected_sequences": num_sequences(mask) - num_sequences(correction.kept),
        "num_vetoed_sequences": num_sequences(correction.vetoed),
        "num_vetoed_groups": num_vetoed_groups,
        "log_sum_correction": jax.nn.logsumexp(correction.log_ratio, where=mask),
        "max_log_correction": jnp.max(correction.log_ratio, where=mask, initial=-jnp.inf),
    }


def merge(a: S, b: S) -> S:
    """Merges statistics of one kind; associative and commutative up to rounding."""
    return type(a)(
        **{
            field.name: field.metadata["merging"].both(getattr(a, field.name), getattr(b, field.name))
            for field in dataclasses.fields(a)
        }
    )


def finalize(stats: Stats, *, corrects: bool = False) -> dict[str, Array]:
    """Returns the metrics of an update by their names in `metrics/metric_names.py`, and `real_tokens` for the loop.

    The metrics of the correction are included if `corrects` is set.

    `ess` is (sum w)^2 / (N sum w^2) over the update's tokens; `ess_sequence` is over sequences with w = prod_t w_t
    (PipelineRL, eq. 6). Both are 1 on-policy. The learner-engine mismatch is KL(mu || pi), estimated from samples of
    mu. `mismatch_kl` (k1) is mean(log mu - log pi), unbiased. `mismatch_kl_k3` is mean(w - 1 - log w), never negative
    and of lower variance (Schulman's note), with w linear beyond e^20, so that it is finite. `max_abs_dlogprob_lag0`
    covers only tokens of the current weights, so it excludes the policy's change; NaN if there are none.
    """
    tokens = jnp.maximum(stats.num_tokens, 1).astype(jnp.float32)
    reward_min, reward_max = stats.rewards.extremes
    return {
        "tokens": stats.num_tokens,
        "real_tokens": stats.num_real_tokens,
        "sequences": stats.num_sequences,
        "packing/fill": stats.num_real_tokens / jnp.maximum(stats.num_slots, 1),
        "ess": _ess(stats.num_tokens, stats.log_sum_w, stats.log_sum_w2),
        "ess_sequence": _ess(stats.num_sequences, stats.log_sum_sequence_w, stats.log_sum_sequence_w2),
        "ratio/mean": jnp.exp(jnp.minimum(stats.log_sum_w - jnp.log(tokens), MAX_EXPONENT)),
        "ratio/p01": jnp.exp(quantile(stats.num_tokens_by_log_w, 1)),
        "ratio/p50": jnp.exp(quantile(stats.num_tokens_by_log_w, 50)),
        "ratio/p99": jnp.exp(quantile(stats.num_tokens_by_log_w, 99)),
        "lag/mean": stats.lag_sum / tokens,
        "lag/max": stats.lag_max,
        **_by_lag("lag/fraction_{}", stats.num_tokens_by_lag / tokens),
        **_by_lag("lag/ess_{}", _ess(stats.num_tokens_by_lag, stats.log_sum_w_by_lag, stats.log_sum_w2_by_lag)),
        "mismatch_kl": -stats.log_w_sum / tokens,
        "mismatch_kl_k3": stats.k3_sum / tokens,
        "reference_kl": stats.reference_kl_sum / jnp.maximum(tokens - stats.num_rejected_tokens, 1),
        "teacher_kl": stats.teacher_kl_sum / jnp.maximum(stats.num_teacher_tokens, 1),
        "max_abs_dlogprob": stats.max_abs_log_w,
        "max_abs_dlogprob_lag0": jnp.where(stats.num_lag0_tokens > 0, stats.max_abs_log_w_lag0, jnp.nan),
        "clip_fraction": stats.num_clipped_tokens / tokens,
        "entropy": stats.entropy_sum / tokens,
        "reward/mean": jnp.asarray(stats.rewards.mean),
        "reward/std": stats.rewards.std,
        "reward/min": reward_min,
        "reward/max": reward_max,
        "reward/zero_variance_groups": stats.num_zero_variance_groups / jnp.maximum(stats.num_groups, 1),
        "response/mean_tokens": jnp.asarray(stats.response_tokens.mean),
        "response/max_tokens": stats.response_tokens.extremes[1],
        "response/truncated": stats.num_truncated / jnp.maximum(stats.response_tokens.count, 1),
        **(_correction_metrics(stats) if corrects else {}),
    }


def _correction_metrics(stats: Stats) -> dict[str, Array]:
    tokens, sequences = jnp.maximum(stats.num_tokens, 1), jnp.maximum(stats.num_sequences, 1)
    mean = stats.log_sum_correction - jnp.log(tokens.astype(jnp.float32))
    return {
        "correction/masked_tokens": stats.num_masked_tokens / tokens,
        "correction/rejected_tokens": stats.num_rejected_tokens / tokens,
        "correction/rejected_sequences": stats.num_rejected_sequences / sequences,
        "correction/vetoed_sequences": stats.num_vetoed_sequences / sequences,
        "correction/vetoed_groups": stats.num_vetoed_groups / jnp.maximum(stats.num_groups, 1),
        "correction/ratio_mean": jnp.exp(jnp.minimum(mean, MAX_EXPONENT)),
        "correction/ratio_max": jnp.exp(jnp.minimum(stats.max_log_correction, MAX_EXPONENT)),
    }


def finalize_values(stats: ValueStats) -> dict[str, Array]:
    """Returns the metrics of an update's critic, by their names without `critic/`."""
    spread = stats.returns.sum_squares
    return {
        "explained_variance": jnp.where(spread > 0, 1 - stats.errors.sum_squares / spread, jnp.nan),
        "mean_value": jnp.asarray(stats.values.mean),
        "mean_return": jnp.asarray(stats.returns.mean),
        "clip_fraction": stats.num_clipped / jnp.maximum(stats.returns.count, 1),
    }


def _ess(count: Array, log_sum: Array, log_sum_squares: Array) -> Array:
    """Returns (sum w)^2 / (N sum w^2) from the logarithms; NaN if empty."""
    log_ess = 2 * log_sum - jnp.log(count.astype(jnp.float32)) - log_sum_squares
    return jnp.where(count > 0, jnp.exp(log_ess), jnp.nan)


def _by_lag(name: str, values: Array) -> dict[str, Array]:
    return {name.format(bucket): value for bucket, value in zip(LAG_BUCKETS, values, strict=True)}
