import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.sections import CorrectionConfig
from learner.metrics.metric_names import METRICS
from learner.update.corrections import correct
from learner.update.diagnostics import LAG_BUCKETS, Merging, Stats, finalize, measure, merge
from learner.update.reductions import RANGE, RELATIVE_ERROR, Moments
from tests.learner.streams import config_of, pack, random_group, random_rollout

STEP = 6


def rollout(weights, versions, reward, mask=None):
    """A response whose tokens have these pi / mu when the current policy gives each token log(1/8)."""
    n = len(weights)
    return dataclasses.replace(
        random_rollout(np.random.default_rng(0), 1),
        tokens=np.arange(n, dtype=np.int32),
        loss_mask=np.ones(n, bool) if mask is None else np.array(mask, bool),
        behavior_logprobs=(np.log(1 / 8) - np.log(weights)).astype(np.float32),
        token_versions=np.array(versions, np.int32),
        reward=reward,
    )


def group(name, *rollouts):
    base = random_group(np.random.default_rng(0), name, max_prompt=1)
    return dataclasses.replace(base, rollouts=rollouts)


def measured(
    batch,
    *,
    clipped=None,
    dlogprobs=0.0,
    entropy=0.25,
    kl=0.0,
    teacher_kl: float | jax.Array = 0.0,
    step=STEP,
    correction=None,
):
    full = jnp.full(batch.tokens.shape, np.log(1 / 8), jnp.float32) + dlogprobs
    return measure(
        batch,
        logprobs=full,
        entropy=jnp.full(batch.tokens.shape, entropy, jnp.float32),
        clipped=jnp.zeros(batch.tokens.shape, bool) if clipped is None else clipped,
        kl=jnp.full(batch.tokens.shape, kl, jnp.float32),
        teacher_kl=jnp.where(jnp.asarray(batch.teacher_ids) > 0, teacher_kl, 0.0),
        step=jnp.int32(step),
        correction=correction,
    )


SPANNING = rollout([4, 1, 1, 0.5], [3, 4, 4, 6], reward=1.0)
FRESH = rollout([1], [6], reward=0.0)


@pytest.mark.heavy
def test_measure_response_over_three_versions_gives_the_numbers_by_hand():
    batch = pack(config_of(), [group("a", SPANNING, FRESH)])[0].batch
    clipped = batch.behavior_logprobs < np.log(1 / 16)  # the token of weight 4
    taught = batch.loss_mask & (batch.token_versions == STEP)  # two of the five tokens
    batch = dataclasses.replace(batch, teacher_ids=taught.astype(np.int8))
    got = finalize(measured(batch, clipped=jnp.asarray(clipped & batch.loss_mask), kl=0.125, teacher_kl=0.75))
    want = {
        "tokens": 5,
        "real_tokens": 7,  # and two prompts of one token
        "sequences": 2,
        "packing/fill": 7 / 32,
        "lag/mean": (3 + 2 + 2 + 0 + 0) / 5,
        "lag/max": 3,
        "ess": 7.5**2 / (5 * (16 + 1 + 1 + 0.25 + 1)),
        "ess_sequence": (2 + 1) ** 2 / (2 * (4 + 1)),  # products 4 * 1 * 1 * 0.5 and 1
        "ratio/mean": 7.5 / 5,
        "ratio/p01": 0.5,
        "ratio/p50": 1,
        "ratio/p99": 4,
        "lag/fraction_0": 2 / 5,
        "lag/fraction_1": 0,
        "lag/fraction_2-3": 3 / 5,
        "lag/fraction_4-7": 0,
        "lag/fraction_8_up": 0,
        "lag/ess_0": 1.5**2 / (2 * 1.25),
        "lag/ess_1": np.nan,
        "lag/ess_2-3": 6**2 / (3 * 18),
        "lag/ess_4-7": np.nan,
        "lag/ess_8_up": np.nan,
        "reference_kl": 0.125,
        "teacher_kl": 0.75,
        "mismatch_kl": -np.log(4 * 0.5) / 5,
        "mismatch_kl_k3": 7.5 / 5 - 1 - np.log(2) / 5,
        "max_abs_dlogprob": np.log(4),
        "max_abs_dlogprob_lag0": np.log(2),
        "clip_fraction": 1 / 5,
        "entropy": 0.25,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0,
        "reward/max": 1,
        "reward/zero_variance_groups": 0,
        "response/mean_tokens": 2.5,
        "response/max_tokens": 4,
        "response/truncated": 0,
    }
    assert got.keys() == want.keys()
    for name, value in want.items():
        rtol = 2e-2 if name.startswith("ratio/p") else 1e-5
        np.testing.assert_allclose(got[name], value, rtol=rtol, err_msg=name)


@pytest.mark.heavy
def test_mean_of_the_kl_to_a_teacher_is_over_tokens_that_are_not_rejected():
    batch = pack(config_of(), [group("a", SPANNING, FRESH)])[0].batch
    batch = dataclasses.replace(batch, teacher_ids=batch.loss_mask.astype(np.int8))
    log_ratio = np.where(batch.loss_mask, np.log(1 / 8) - batch.behavior_logprobs, np.float32(0))
    asked = CorrectionConfig(reject="token", max_ratio=2.0)  # the token of weight 4 is outside
    mask, segment_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids)
    found = correct(jnp.asarray(log_ratio), mask, segment_ids, None, asked)
    got = finalize(measured(batch, teacher_kl=jnp.where(found.kept, 0.75, 0.0), correction=found))
    assert int(found.kept.sum()) == 4 and float(got["teacher_kl"]) == pytest.approx(0.75)


@pytest.mark.heavy
def test_lag_buckets_each_lag_counts_in_its_own():
    lags = [0, 1, 2, 3, 4, 7, 8, 40]
    (micro,) = pack(config_of(), [group("a", rollout([1] * 8, sorted(50 - n for n in lags), 0.0))])
    got = finalize(measured(micro.batch, step=50))
    counts = {name: round(8 * float(got[f"lag/fraction_{name}"])) for name in LAG_BUCKETS}
    assert counts == {"0": 1, "1": 1, "2-3": 2, "4-7": 2, "8_up": 2}


@pytest.mark.heavy
@given(log_w=st.lists(st.floats(-30, 30) | st.floats(-0.01, 0.01), min_size=1, max_size=12))
def test_ratio_quantiles_match_numpy_to_the_stated_resolution(log_w):
    (micro,) = pack(config_of(), [group("a", rollout([1] * len(log_w), [STEP] * len(log_w), 0.0))])
    mu = np.zeros(micro.batch.tokens.shape, np.float32)
    mu[micro.batch.loss_mask] = np.log(1 / 8) - np.array(log_w)
    got = finalize(measured(dataclasses.replace(micro.batch, behavior_logprobs=mu)))
    for percent in (1, 50, 99):
        want = np.clip(np.percentile(log_w, percent, method="inverted_cdf"), -RANGE, RANGE)
        off = abs(np.log(float(got[f"ratio/p{percent:02}"])) - want)
        assert off <= RELATIVE_ERROR * 1.01 * abs(want) + 2.5e-5


@pytest.mark.parametrize("log_w", [[88.5], [89.0, 0.1], [1000.0, 0.0, -3.0], [20.5], [19.0, -50.0]])
def test_mismatch_of_any_ratio_is_finite_and_exact_where_float32_holds_it(log_w):
    (micro,) = pack(config_of(), [group("a", rollout([1] * len(log_w), [STEP] * len(log_w), 0.0))])
    mu = np.zeros(micro.batch.tokens.shape, np.float32)
    mu[micro.batch.loss_mask] = np.log(1 / 8) - np.array(log_w)
    got = finalize(measured(dataclasses.replace(micro.batch, behavior_logprobs=mu)))
    x = np.array(log_w)
    low = np.minimum(x, 20.0)
    want = np.mean(np.expm1(low) - low + np.expm1(20.0) * (x - low))  # the tangent at 20, from there on
    np.testing.assert_allclose(got["mismatch_kl_k3"], want, rtol=1e-4)
    for name in ("mismatch_kl", "mismatch_kl_k3", "ratio/mean", "ratio/p99", "ess", "max_abs_dlogprob"):
        assert np.isfinite(got[name]), name


def test_ratio_median_on_policy_is_exactly_one():
    (micro,) = pack(config_of(), [group("a", rollout([1, 1, 1], [6, 6, 6], 0.0))])
    assert float(finalize(measured(micro.batch))["ratio/p50"]) == 1.0


def test_finalize_of_nothing_is_undefined_where_a_number_would_mislead():
    got = finalize(Stats.zeros())
    for name in ("ess", "ratio/p50", "lag/ess_0", "reward/min", "reward/max", "response/max_tokens"):
        assert np.isnan(got[name]), name


@pytest.mark.heavy
def test_measure_under_jit_gives_the_same_numbers():
    groups = [random_group(np.random.default_rng(i), f"t{i}") for i in range(3)]
    batch = pack(config_of(rows=16), groups)[0].batch
    want = finalize(measured(batch))
    got = finalize(jax.jit(measured)(batch))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_finalize_names_are_the_metrics_that_the_writer_knows():
    assert finalize(Stats.zeros(), corrects=True).keys() - {"real_tokens"} <= METRICS.keys()


def test_measure_masked_tokens_do_not_count():
    masked = rollout([100, 1, 7], [0, 5, 6], reward=0.0, mask=[False, True, False])
    (micro,) = pack(config_of(), [group("a", masked, FRESH)])
    got = finalize(measured(micro.batch))
    assert int(got["tokens"]) == 2 and int(got["lag/max"]) == 1
    np.testing.assert_allclose([got["ess"], got["ess_sequence"], got["lag/mean"]], [1, 1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(got["max_abs_dlogprob"], 0, atol=1e-6)


@pytest.mark.parametrize("masks_truncated", [False, True])
def test_measure_counts_truncated_responses_whether_or_not_they_train(masks_truncated):
    cut = dataclasses.replace(rollout([4, 1, 1], [3, 4, 4], reward=1.0), finish="length")
    (micro,) = pack(config_of(), [group("a", cut, FRESH, FRESH, FRESH)], masks_truncated=masks_truncated)
    got = finalize(measured(micro.batch))
    assert float(got["response/truncated"]) == 0.25 and float(got["reward/mean"]) == 0.25
    trained = {"tokens": 3, "sequences": 3, "ess": 1, "lag/max": 0, "max_abs_dlogprob": 0}
    every = {"tokens": 6, "sequences": 4, "ess": 9**2 / (6 * 21), "lag/max": 3, "max_abs_dlogprob": np.log(4)}
    for name, value in (trained if masks_truncated else every).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_measure_on_policy_has_ess_one_and_no_mismatch():
    (micro,) = pack(config_of(), [group("a", rollout([1, 1, 1], [6, 6, 6], 0.0), FRESH)])
    got = finalize(measured(micro.batch))
    for name, value in {"ess": 1, "ess_sequence": 1, "mismatch_kl": 0, "mismatch_kl_k3": 0, "lag/max": 0}.items():
        np.testing.assert_allclose(got[name], value, atol=1e-6, err_msg=name)
    assert float(got["reward/zero_variance_groups"]) == 1


def test_measure_no_fresh_token_leaves_lag0_mismatch_undefined():
    (micro,) = pack(config_of(), [group("a", rollout([1, 2], [0, 1], 0.0))])
    assert np.isnan(finalize(measured(micro.batch))["max_abs_dlogprob_lag0"])


def test_measure_weights_beyond_float32_keep_their_ess():
    # w = e^200 twice and e^0 once: ESS = (2 e^200)^2 / (3 * 2 e^400) = 2/3.
    huge = rollout([1, 1, 1], [6, 6, 6], 0.0)
    huge = dataclasses.replace(huge, behavior_logprobs=np.float32(np.log(1 / 8) - [200, 200, 0]))
    (micro,) = pack(config_of(), [group("a", huge)])
    np.testing.assert_allclose(finalize(measured(micro.batch))["ess"], 2 / 3, rtol=1e-4)


@pytest.mark.heavy
@given(seed=st.integers(0, 10**6), order=st.permutations(range(4)), cut=st.integers(0, 4))
def test_merge_of_any_split_equals_the_numbers_of_all_tokens_at_once(seed, order, cut):
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, f"t{i}", rewards=rng.choice([1000.0, 1000.1], 3)) for i in range(4)]
    teachers = {g.ticket_id: int(rng.integers(2)) for g in groups}

    def pack_some(config, some):
        return pack(config, some, teachers=[teachers[g.ticket_id] for g in some])

    (whole,) = pack_some(config_of(rows=16), groups)
    want = finalize(measured(whole.batch, kl=0.5, teacher_kl=0.75))
    stats = Stats.zeros()
    for part in ([groups[i] for i in order[:cut]], [groups[i] for i in order[cut:]]):
        for micro in pack_some(config_of(), part) if part else []:
            stats = merge(stats, measured(micro.batch, kl=0.5, teacher_kl=0.75))
    got = finalize(stats)
    for name in want.keys() - {"packing/fill"}:
        # float32 keeps 1000.1 to 6e-5, which is what limits the rewards' std of 0.05
        rtol, atol = (5e-3, 1e-4) if name == "reward/std" else (2e-5, 1e-6)
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol, err_msg=name)
    np.testing.assert_allclose(want["reward/std"], np.std([r.reward for g in groups for r in g.rollouts]), rtol=1e-5)


def test_stats_every_field_says_how_it_merges():
    assert [f.name for f in dataclasses.fields(Stats) if not isinstance(f.metadata.get("merging"), Merging)] == []


def test_merge_takes_the_largest_of_peaks_adds_logarithms_as_such_and_adds_the_rest():
    one, two = (jax.tree.map(lambda x, n=n: jnp.full_like(x, n), Stats.zeros()) for n in (1, 2))
    peaks = {"lag_max", "max_abs_log_w", "max_abs_log_w_lag0", "max_log_correction"}
    logs = {f"log_sum{of}{power}" for of in ("_w", "_sequence_w") for power in ("", "2")}
    logs |= {"log_sum_w_by_lag", "log_sum_w2_by_lag", "log_sum_correction"}
    for field in dataclasses.fields(Stats):
        if field.name not in ("rewards", "response_tokens"):
            want = 2 if field.name in peaks else np.log(np.e + np.e**2) if field.name in logs else 3
            got = np.asarray(getattr(merge(one, two), field.name))
            np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6, err_msg=field.name)


@pytest.mark.heavy
def test_merge_with_nothing_changes_no_bit_and_no_dtype():
    groups = [random_group(np.random.default_rng(i), f"t{i}") for i in range(3)]
    stats = measured(pack(config_of(rows=16), groups)[0].batch, kl=0.5)
    for merged in (merge(Stats.zeros(), stats), merge(stats, Stats.zeros())):
        assert jax.tree.structure(merged) == jax.tree.structure(stats)
        for got, want in zip(jax.tree.leaves(merged), jax.tree.leaves(stats), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got, want)


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_moments_of_values_are_numpys(values):
    m = Moments.of(values)
    assert float(m.count) == len(values)
    if values:
        np.testing.assert_allclose(m.mean, np.mean(values), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(m.sum_squares, np.var(values) * len(values), rtol=1e-6, atol=1e-6)
