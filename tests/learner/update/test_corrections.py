"""Corrections against float64 numpy over sequences alone, whose turns, masks and bounds are told apart by hand."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from configs.sections import CorrectionConfig
from learner.objective.losses import token_weight
from learner.update.corrections import correct, normalize, turn_ids

LEVELS = ("token", "turn", "turn_mean", "sequence", "sequence_mean")
SEQUENCES = (
    # Runs of (untrained, trained) tokens; the last two of them are of one group, and so are the first two.
    ((2, 3), (1, 2)),
    ((1, 1),),
    ((3, 2), (2, 1), (1, 4)),
    ((2, 0),),  # a response that is not trained
)
GROUPS = (1, 1, 2, 2)
SHAPE = (4, 32)
LONGEST = 13


def pack(order, width, x_of):
    """Rows of (x, mask, segment, group, sequence) with the sequences in this order, as many as `width` tokens hold."""
    x, mask, segments, groups, owner = (np.zeros(SHAPE, t) for t in (np.float32, bool, np.int32, np.int32, int))
    owner[:] = -1
    row, start, segment = 0, 0, 0
    for i in order:
        trained = np.concatenate([np.arange(u + t) >= u for u, t in SEQUENCES[i]])
        if start + trained.size > width:
            row, start, segment = row + 1, 0, 0
        place, segment = slice(start, start + trained.size), segment + 1
        mask[row, place], segments[row, place], owner[row, place] = trained, segment, i
        x[row, place] = np.where(trained, x_of[i], 99.0)  # what is untrained must not be read
        groups[row, place] = np.where(np.arange(trained.size) >= SEQUENCES[i][0][0], GROUPS[i], 0)
        start += trained.size
    return x, mask, segments, groups, owner


def x_values(seed, scale):
    rng = np.random.default_rng(seed)
    return [rng.normal(scale=scale, size=sum(u + t for u, t in s)).astype(np.float32) for s in SEQUENCES]


def oracle(i, x, config):
    """(weight, kept) of the trained tokens of a sequence, in float64; the veto of its own tokens alone."""
    turns, start = [], 0
    for untrained, trained in SEQUENCES[i]:
        turns.append(x[start + untrained : start + untrained + trained].astype(np.float64))
        start += untrained + trained
    flat = np.concatenate(turns)

    def ratios(level):
        match level:
            case "token":
                return np.exp(flat)
            case "turn":
                return np.concatenate([np.full(t.size, math.exp(t.sum())) for t in turns])
            case "turn_mean":
                return np.concatenate([np.full(t.size, math.exp(t.mean()) if t.size else 0) for t in turns])
            case "sequence":
                return np.full(flat.size, math.exp(flat.sum()))
            case "sequence_mean":
                return np.full(flat.size, math.exp(flat.mean()) if flat.size else 0)
            case _:
                raise AssertionError(level)

    weight = np.ones(flat.size)
    if config.weight != "off":
        weight = ratios(config.weight)
        inside = (weight >= config.min_weight) & (weight <= config.max_weight)
        cut = np.minimum(np.maximum(weight, config.min_weight), config.max_weight)
        weight = np.where(inside, weight, 0) if config.outside == "mask" else cut
    kept = np.ones(flat.size, bool)
    if config.reject != "off":
        of_rejection = ratios(config.reject)
        kept = (of_rejection >= config.min_ratio) & (of_rejection <= config.max_ratio)
    return weight, kept, bool((np.exp(flat) < config.veto_ratio).any()) and config.veto != "off"


def check(config, seed, scale, order=(0, 1, 2, 3), width=16):
    xs = x_values(seed, scale)
    x, mask, segments, groups, owner = pack(order, width, xs)
    got = correct(jnp.asarray(x), jnp.asarray(mask), jnp.asarray(segments), jnp.asarray(groups), config)
    each = [oracle(i, xs[i], config) for i in range(len(SEQUENCES))]
    for i, (weight, kept, veto) in enumerate(each):
        vetoed = veto or (config.veto == "group" and any(e[2] and GROUPS[j] == GROUPS[i] for j, e in enumerate(each)))
        here = mask & (owner == i)
        np.testing.assert_array_equal(np.asarray(got.kept)[here], kept & (not vetoed))
        np.testing.assert_array_equal(np.asarray(got.vetoed)[here], vetoed)
        if config.weight != "off":
            np.testing.assert_allclose(np.asarray(got.weight)[here], weight, rtol=1e-6)
    assert not np.asarray(got.kept)[~mask].any() and not np.asarray(got.bounded)[~mask].any()
    return got, mask


CASES: list[dict[str, Any]] = [  # with the settings that docs/migrate.md compares
    *(dict(weight=level, outside=outside, min_weight=low, max_weight=high)
      for level, outside, (low, high) in itertools.product(LEVELS, ("truncate", "mask"), ((0.0, 1.3), (0.8, 1.2)))),
    *(dict(reject=level, min_ratio=low, max_ratio=high)
      for level, (low, high) in itertools.product(LEVELS, ((0.0, 1.2), (0.8, 1.3)))),
    *(dict(veto=veto, veto_ratio=0.75) for veto in ("sequence", "group")),
    dict(weight="token", min_weight=0.8, max_weight=1.2, reject="token", min_ratio=0.8, max_ratio=1.2),
    dict(weight="token", reject="sequence_mean", min_ratio=0.9, max_ratio=1.1, veto="sequence", veto_ratio=0.75),
]  # fmt: skip


@pytest.mark.parametrize("fields", CASES, ids=lambda f: "-".join(map(str, f.values())))
def test_correction_equals_float64_numpy_of_each_sequence_alone(fields):
    got, mask = check(CorrectionConfig(**fields), seed=3, scale=0.2)
    # The case is one: it changes some tokens and leaves others.
    changed = np.asarray(got.bounded | (jnp.asarray(mask) & ~got.kept))
    assert 0 < changed.sum() < mask.sum()


@given(
    seed=st.integers(0, 10**6),
    order=st.permutations(range(len(SEQUENCES))),
    width=st.integers(LONGEST, SHAPE[1]),
    level=st.sampled_from(LEVELS),
)
@example(seed=0, order=[3, 2, 1, 0], width=SHAPE[1], level="turn")  # all in one row
@example(seed=1, order=[0, 1, 2, 3], width=LONGEST, level="sequence")
def test_correction_of_a_sequence_does_not_depend_on_its_place(seed, order, width, level):
    config = CorrectionConfig(weight=level, reject=level, min_ratio=0.7, max_ratio=1.4, veto="group", veto_ratio=0.6)
    check(config, seed, 0.3, order, width)


def test_turn_is_a_run_of_trained_tokens():
    mask = jnp.array([[0, 1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(turn_ids(mask), [[0, 1, 1, 0, 2, 0, 3, 3], [0, 0, 0, 0, 0, 0, 0, 1]])


@pytest.mark.parametrize("x", [200.0, -200.0])
def test_extreme_ratios_stay_finite(x):
    ones, mask = jnp.ones((1, 4), jnp.int32), jnp.array([[False, True, True, True]])
    for level, outside in itertools.product(LEVELS, ("truncate", "mask")):
        config = CorrectionConfig(weight=level, outside=outside, max_weight=1e15)
        weight = np.asarray(correct(jnp.full((1, 4), x), mask, ones, None, config).weight)
        assert np.isfinite(weight).all() and (weight >= 0).all()


@pytest.mark.parametrize("normalization", ["token", "sequence", "sequence_sum", "constant"])
def test_normalization_counts_kept_tokens_as_packing_counts_trained_ones(normalization):
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0]])
    kept = np.array([[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]], bool)  # all of a sequence is rejected
    weights, divisor = normalize(jnp.asarray(kept), jnp.asarray(segments), normalization, 7)
    (two, one, none), shares = zip(*(token_weight(normalization, n, 7) for n in (2, 1, 0)), strict=True)
    np.testing.assert_allclose(weights, [[0, two, two, none, none, none], [0, one, 0, 0, 0, 0]], rtol=1e-6)
    assert float(divisor) == sum(shares)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(max_weight=3.0), "loss.correction.max_weight=3.0 has no effect without loss.correction.weight"),
        (dict(outside="mask"), "loss.correction.outside=mask has no effect without loss.correction.weight"),
        (dict(weight="token", min_ratio=0.1), "min_ratio=0.1 has no effect without loss.correction.reject"),
        (dict(reject="token", veto_ratio=0.1), "veto_ratio=0.1 has no effect without loss.correction.veto"),
        (dict(policy="current"), "policy=current has no effect without loss.correction.weight, reject or veto"),
        (dict(weight="turn", min_weight=2.0), "min_weight must be below loss.correction.max_weight, got 2 and 2"),
        (dict(reject="turn", min_ratio=3.0), "min_ratio must be below loss.correction.max_ratio, got 3 and 2"),
        (dict(reject="token", max_ratio=0.0), r"loss.correction.max_ratio must be > 0, got 0.0"),
    ],
)
def test_correction_config_that_has_no_effect_or_no_range_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        CorrectionConfig(**fields)
