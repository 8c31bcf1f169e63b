import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.sections import PackingConfig
from learner.objective.advantages import group_advantages
from learner.update.first_fit import first_fit_decreasing
from learner.update.packing import pack_groups
from tests.learner.streams import config_of, pack, random_group, random_groups, random_rollout

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=40)
ARRAYS = ("tokens", "positions", "segment_ids", "loss_mask", "behavior_logprobs")
ARRAYS += ("advantages", "token_versions", "token_weights")
KEYS = ("tokens", "loss_mask", "behavior_logprobs", "advantages", "token_versions")


def segments_of(batch):
    """Every packed sequence as {array name: its values}, read back from the arrays."""
    for b in range(batch.tokens.shape[0]):
        ids = batch.segment_ids[b]
        for s in range(1, ids.max() + 1):
            where = np.nonzero(ids == s)[0]
            assert where.size and np.array_equal(where, np.arange(where[0], where[-1] + 1))  # contiguous
            yield {name: getattr(batch, name)[b, where] for name in ARRAYS}


def group_of_lengths(name, lengths, prompt=1):
    rng = np.random.default_rng(0)
    base = random_group(rng, name, max_prompt=1)
    rollouts = []
    for i, n in enumerate(lengths):
        r = random_rollout(rng, 1, reward=float(i))
        rollouts.append(
            dataclasses.replace(
                r,
                **{f: np.resize(getattr(r, f), n - prompt) for f in ("tokens", "loss_mask")},
                behavior_logprobs=np.zeros(n - prompt, np.float32),
                token_versions=np.zeros(n - prompt, np.int32),
            )
        )
    return dataclasses.replace(base, rollouts=tuple(rollouts))


@given(lengths=LENGTHS)
def test_first_fit_decreasing_places_each_once_within_the_row(lengths):
    rows = first_fit_decreasing(lengths, PackingConfig(rows=1, row_tokens=16, max_row_sequences=3))
    assert all(len(row) <= 3 for row in rows)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 16 for row in rows)
    # First fit: whatever opens a row fitted in none before it.
    for n, row in enumerate(rows):
        for earlier in rows[:n]:
            longer = sum(lengths[i] for i in earlier if lengths[i] >= lengths[row[0]])
            assert longer + lengths[row[0]] > 16 or len(earlier) == 3


@given(seed=st.integers(0, 10**6), num_groups=st.integers(1, 6), name=st.sampled_from(["grpo", "mean_baseline"]))
def test_pack_groups_holds_every_sequence_exactly_once(seed, num_groups, name):
    config = config_of(advantage=name)
    groups = random_groups(seed, num_groups)
    found, want = collections.Counter(), collections.Counter()
    for micro in pack(config, groups):
        for s in segments_of(micro.batch):
            np.testing.assert_array_equal(s["positions"], np.arange(s["positions"].size))
            found[tuple(s[k].tobytes() for k in KEYS)] += 1
        padding = micro.batch.segment_ids == 0
        for array in ARRAYS:
            assert not np.asarray(getattr(micro.batch, array))[padding].any(), array
    for g in groups:
        rewards = np.array([r.reward for r in g.rollouts])
        for r, advantage in zip(g.rollouts, group_advantages(rewards, config.loss), strict=True):
            p = np.zeros(g.prompt_tokens.size)
            arrays = {
                "tokens": np.concatenate([g.prompt_tokens, r.tokens]),
                "loss_mask": np.concatenate([p.astype(bool), r.loss_mask]),
                "behavior_logprobs": np.concatenate([p, r.behavior_logprobs]).astype(np.float32),
                "advantages": np.concatenate([p, np.where(r.loss_mask, advantage, 0)]).astype(np.float32),
                "token_versions": np.concatenate([p, r.token_versions]).astype(np.int32),
            }
            want[tuple(arrays[k].tobytes() for k in KEYS)] += 1
    assert found == want


@given(seed=st.integers(0, 10**6), num_groups=st.integers(1, 6), rows=st.integers(1, 5))
def test_pack_groups_has_one_shape_and_marks_each_ticket_once_with_its_last_batch(seed, num_groups, rows):
    config = config_of(rows=rows)
    groups = [
        dataclasses.replace(g, prompt_tokens=np.array([100 + i], np.int32))  # tells whose a sequence is
        for i, g in enumerate(random_groups(seed, num_groups))
    ]
    batches = pack(config, groups, ends_update=True, ends_round=True)
    shapes = {tuple((getattr(m.batch, a).shape, getattr(m.batch, a).dtype) for a in ARRAYS) for m in batches}
    assert len(shapes) == 1 and batches[0].batch.tokens.shape == (rows, 16)
    for flags in ([m.ends_update for m in batches], [m.ends_round for m in batches]):
        assert flags == [False] * (len(batches) - 1) + [True]
    last = {}
    for n, micro in enumerate(batches):
        for s in segments_of(micro.batch):
            last[groups[s["tokens"][0] - 100].ticket_id] = n
    assert [sorted(m.ticket_ids) for m in batches] == [
        sorted(t for t in last if last[t] == n) for n in range(len(batches))
    ]
    assert [int(m.batch.num_groups) for m in batches] == [len(m.ticket_ids) for m in batches]
    assert [int(m.batch.num_zero_variance_groups) for m in batches] == ["flat" in m.ticket_ids for m in batches]
    rewards = [r.reward for g in groups for r in g.rollouts]
    assert sum(float(m.batch.rewards.count) for m in batches) == len(rewards)


def test_pack_groups_group_over_the_budget_is_split_and_marked_with_its_last_batch():
    config = config_of(rows=1)
    big = group_of_lengths("big", [16, 15, 14])
    small = group_of_lengths("small", [2])
    batches = pack(config, [big, small], ends_update=True)
    # rows: 16 | 15 | 14 + 2 (first fit); one row a batch
    assert [m.ticket_ids for m in batches] == [(), (), ("big", "small")]
    assert [m.ends_update for m in batches] == [False, False, True]
    assert [int(m.batch.num_groups) for m in batches] == [0, 0, 2]
    assert [float(m.batch.rewards.count) for m in batches] == [1, 1, 2]


@pytest.mark.parametrize(
    "normalization,weight,denominator",
    [("token", [1, 1], 4), ("sequence", [1, 1 / 3], 2), ("sequence_sum", [1, 1], 2), ("constant", [1, 1], 24)],
)
def test_pack_groups_normalisation_weights_and_denominator(normalization, weight, denominator):
    config = config_of(normalization=normalization)
    (micro,) = pack(config, [group_of_lengths("g", [2, 4])])
    sequences = sorted(segments_of(micro.batch), key=lambda s: s["tokens"].size)
    for s, w in zip(sequences, weight, strict=True):
        np.testing.assert_allclose(s["token_weights"], np.where(s["loss_mask"], np.float32(w), 0))
    assert float(micro.batch.denominator) == denominator


def episode(mask, turn_rewards, reward):
    size = len(mask)
    return dataclasses.replace(
        random_rollout(np.random.default_rng(0), 1),
        tokens=np.arange(size, dtype=np.int32),
        loss_mask=np.array(mask, bool),
        behavior_logprobs=np.zeros(size, np.float32),
        token_versions=np.zeros(size, np.int32),
        turn_rewards=np.array(turn_rewards, np.float32),
        reward=reward,
    )


def test_pack_groups_by_turns_each_token_has_its_turns_advantage():
    group = dataclasses.replace(
        group_of_lengths("g", [2]),
        rollouts=(episode([0, 1, 1, 0, 1], [1.0, 0.0], 1.0), episode([1, 0, 0, 1, 0, 1], [0.0, 2.0, 0.0], 3.0)),
    )
    (micro,) = pack(config_of(advantage="turn_grpo", advantage_eps=0.5), [group])
    # Returns 1, 0; and with 1 of a verifier's at the end 3, 3, 1.
    returns = np.array([1, 0, 3, 3, 1])
    a = (returns - returns.mean()) / (returns.std(ddof=1) + 0.5)
    longer, shorter = segments_of(micro.batch)  # longest first
    np.testing.assert_allclose(shorter["advantages"], [0, 0, a[0], a[0], 0, a[1]], rtol=1e-6)
    np.testing.assert_allclose(longer["advantages"], [0, a[2], 0, 0, a[3], 0, a[4]], rtol=1e-6)
    (summed,) = pack(config_of(), [group])
    longer, shorter = segments_of(summed.batch)
    assert np.unique(shorter["advantages"]).size == np.unique(longer["advantages"]).size == 2  # and 0 where observed


def test_pack_groups_observed_tokens_are_computed_but_make_no_response_longer():
    quiet, talked = episode([1, 1], [0.0], 1.0), episode([1, 1] + [0] * 6, [0.0], 1.0)
    group = dataclasses.replace(group_of_lengths("g", [2]), rollouts=(quiet, talked))
    shaping: dict[str, Any] = dict(overlong_buffer_tokens=6, overlong_penalty=2.0, length_penalty=1.0)  # of 12 tokens
    (micro,) = pack(config_of(**shaping), [group])
    assert not micro.batch.advantages.any()  # two sampled tokens each: nothing tells them apart
    assert float(micro.batch.response_tokens.mean) == float(micro.batch.response_tokens.maximum) == 2
    assert micro.sum_squared_lengths == 3**2 + 9**2  # attention reads all of it


@pytest.mark.parametrize(
    "normalization,denominator", [("token", 1 + 3), ("sequence", 2), ("sequence_sum", 2), ("constant", 24)]
)
def test_pack_groups_masked_responses_train_nothing_but_count_in_their_groups_advantages(normalization, denominator):
    config = config_of(normalization=normalization)
    whole = group_of_lengths("g", [2, 4, 6])  # rewards 0, 1, 2
    *done, last = whole.rollouts
    cut = dataclasses.replace(whole, rollouts=(*done, dataclasses.replace(last, finish="length")))
    (plain,), (masked,) = pack(config, [whole]), pack(config, [cut], masks_truncated=True)
    kept = [s for s in segments_of(masked.batch) if s["loss_mask"].any()]
    for got, want in zip(kept, [s for s in segments_of(plain.batch) if s["tokens"].size < 6], strict=True):
        for name in ARRAYS:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    np.testing.assert_allclose([s["advantages"].min() for s in kept], [0, -1], atol=1e-5)  # longest first
    (hidden,) = (s for s in segments_of(masked.batch) if not s["loss_mask"].any())
    assert hidden["tokens"].size == 6
    for name in ("advantages", "token_weights", "behavior_logprobs"):
        assert not hidden[name].any(), name
    assert float(masked.batch.denominator) == denominator
    assert float(masked.batch.rewards.count) == 3 and int(masked.batch.num_truncated) == 1
    assert int(pack(config, [cut])[0].batch.num_truncated) == 1 and int(plain.batch.num_truncated) == 0
    assert float(pack(config, [cut])[0].batch.denominator) == float(plain.batch.denominator) != denominator


def test_pack_groups_of_masked_responses_alone_is_an_update_of_nothing():
    whole = group_of_lengths("g", [2, 4])
    cut = dataclasses.replace(whole, rollouts=tuple(dataclasses.replace(r, finish="length") for r in whole.rollouts))
    for normalization in ("token", "sequence", "sequence_sum", "constant"):
        (micro,) = pack(config_of(normalization=normalization), [cut], masks_truncated=True)
        assert float(micro.batch.denominator) == 0 and not micro.batch.token_weights.any()
        assert np.isfinite(micro.batch.token_weights).all() and not micro.batch.loss_mask.any()
        assert int(micro.batch.num_groups) == int(micro.batch.num_zero_variance_groups) == 1


def test_pack_groups_sequence_longer_than_a_row_is_refused_by_ticket():
    config = config_of()
    group = group_of_lengths("r3-t7", [17])
    with pytest.raises(ValueError, match=r"ticket r3-t7: .* 16 tokens, got 17"):
        pack(config, [group])


def test_pack_groups_nothing_to_pack_is_refused():
    with pytest.raises(ValueError, match="at least one group"):
        pack(config_of(), [])


def test_pack_groups_lognormal_update_computes_few_tokens_beside_the_real_ones():
    """The bound of a stream whose learner has work waiting."""
    rng, config = np.random.default_rng(0), config_of(rows=8, row_tokens=2048)
    lengths = np.clip(rng.lognormal(np.log(300), 0.8, (64, 8)), 2, 2000).astype(int)
    groups = [group_of_lengths(str(i), row.tolist()) for i, row in enumerate(lengths)]
    batches = pack(config, groups)
    slots = sum(m.batch.tokens.size for m in batches)
    assert slots / sum(g.num_tokens for g in groups) <= 1.06
    assert sorted(i for m in batches for i in m.ticket_ids) == sorted(g.ticket_id for g in groups)


@given(seed=st.integers(0, 10**6), num_groups=st.integers(1, 6), rows=st.integers(3, 6))
def test_pack_groups_whole_groups_are_each_in_one_micro_batch(seed, num_groups, rows):
    config, groups = config_of(), random_groups(seed, num_groups)
    packing = PackingConfig(rows=rows, row_tokens=16, whole_groups=True)
    micros = pack_groups(groups, packing=packing, loss=config.loss, max_response_tokens=12)
    ended = []
    for micro in micros:
        batch = micro.batch
        assert batch.group_ids is not None and not batch.group_ids[batch.segment_ids == 0].any()
        sequences = collections.defaultdict(list)
        for b, s in {(b, s) for b, row in enumerate(batch.segment_ids) for s in row if s}:
            (number,) = set(batch.group_ids[b, batch.segment_ids[b] == s]) - {0}
            response = (batch.segment_ids[b] == s) & (batch.group_ids[b] == number)
            sequences[number].append(batch.tokens[b, response].tobytes())
        # The groups of a micro-batch are those that end in it, each with all its responses.
        ended += micro.ticket_ids
        of_batch = [g for g in groups if g.ticket_id in micro.ticket_ids]
        want = [sorted(r.tokens.tobytes() for r in g.rollouts) for g in of_batch]
        assert sorted(map(sorted, sequences.values())) == sorted(want)
    assert sorted(ended) == sorted(g.ticket_id for g in groups)


def test_pack_groups_group_that_fits_no_micro_batch_is_refused():
    packing = PackingConfig(rows=2, row_tokens=16, whole_groups=True)
    group = group_of_lengths("t", [16, 9, 9])
    with pytest.raises(ValueError, match="packing.whole_groups: a group needs 3 rows of 16 tokens, got packing.rows=2"):
        pack_groups([group], packing=packing, loss=config_of().loss, max_response_tokens=12)
