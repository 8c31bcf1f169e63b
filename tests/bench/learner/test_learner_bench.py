"""The parts of the learner bench that decide its numbers: the workload, the medians, the attribution of time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.learner import ours as ours_learner
from tests.bench.learner.aims import AIMS, without_disturbed
from tests.bench.learner.profile import Span, model_flop, read_module, shares
from tests.bench.peers import models, workload


def sequences_of(packed):
    """(tokens, positions, is_response, behaviour logprobs, advantages) of every segment, as sortable tuples."""
    found = []
    for row in zip(*packed, strict=True):
        tokens, positions, segments, *rest = row
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            found.append(tuple(tuple(x[here].tolist()) for x in (tokens, positions, *rest)))
    return sorted(found)


@pytest.mark.parametrize("name", workload.BATCHES)
def test_packed_holds_every_sequence_once_and_whole(name):
    batch = workload.make_batch(name)
    packed = workload.packed(batch)
    want = []
    for group in range(0, len(batch.prompts), workload.GROUP_SIZE):
        rewards = [float(r) for r in batch.rewards[group : group + workload.GROUP_SIZE]]
        mean = sum(rewards) / len(rewards)
        std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        for i in range(group, group + workload.GROUP_SIZE):
            p, r = batch.prompts[i].tolist(), batch.responses[i].tolist()
            advantage = float(np.float32((batch.rewards[i] - mean) / (std + 1e-6)))
            behavior = [0.0] * len(p) + batch.behavior_logprobs[i].tolist()
            is_response, n = [False] * len(p) + [True] * len(r), len(p) + len(r)
            advantages = [0.0] * len(p) + [advantage] * len(r)
            want.append(tuple(map(tuple, (p + r, range(n), is_response, behavior, advantages))))
    got = sequences_of(packed)
    assert [g[:4] for g in got] == [w[:4] for w in sorted(want)]
    np.testing.assert_allclose(sum((g[4] for g in got), ()), sum((w[4] for w in sorted(want)), ()), rtol=1e-6)
    assert packed.segment_ids.astype(bool).sum() == batch.num_real_tokens


@pytest.mark.parametrize("name", [name for name, b in workload.BATCHES.items() if b.model == models.SMALL])
def test_our_groups_pack_to_the_same_update_in_one_micro_batch(name):
    batch = workload.make_batch(name)
    _, micros = ours_learner.micro_batches(batch)
    assert len(micros) == 1
    ours = micros[0].batch
    got = [ours.tokens, ours.positions, ours.segment_ids, ours.loss_mask, ours.behavior_logprobs, ours.advantages]
    assert sequences_of([np.asarray(x) for x in got]) == sequences_of(workload.packed(batch))
    assert ours.tokens.shape == workload.packed(batch).tokens.shape


def test_batches_are_the_measured_ones():
    batches = {name: workload.make_batch(name) for name in workload.BATCHES}
    assert batches["seed0"].num_real_tokens == 2377
    assert batches["full"].fill > 0.6
    rows = {name: workload.packed(batch).tokens.shape for name, batch in batches.items()}
    real = {"real": (32, 71), "real_apart": (32, 71)}
    assert rows == {"seed0": (5, 512), "seed1": (6, 512), "seed2": (6, 512), "full": (6, 1024), **real}
    prompts = {name: len({p.tobytes() for p in batch.prompts}) for name, batch in batches.items()}
    assert (prompts["real"], prompts["real_apart"]) == (4, 32)
    assert all(
        r.size == 24 and p.size == 47 for p, r in zip(batches["real"].prompts, batches["real"].responses, strict=True)
    )
    assert all(batches[name].fill < 0.4 for name in workload.MAIN)


def test_our_real_batch_has_one_micro_batch_with_little_padding_and_every_sequence():
    batch = workload.make_batch(workload.REAL_APART)
    _, micros = ours_learner.micro_batches(batch)
    ours = micros[0].batch
    assert len(micros) == 1 and np.size(ours.tokens) <= 1.02 * batch.num_real_tokens
    got = [ours.tokens, ours.positions, ours.segment_ids, ours.loss_mask, ours.behavior_logprobs, ours.advantages]
    assert sequences_of([np.asarray(x) for x in got]) == sequences_of(workload.packed(batch))


def test_our_real_batch_computes_each_prompt_once():
    """4 x (46 + 8 x 25) tokens: a prompt's last one is there once more before each of its responses."""
    _, micros = ours_learner.micro_batches(workload.make_batch(workload.REAL))
    (micro,) = micros
    assert (np.asarray(micro.batch.segment_ids) != 0).sum() == 984 and np.asarray(
        micro.batch.loss_mask
    ).sum() == 32 * 24


def test_models_are_the_published_sizes():
    assert sum(int(np.prod(s)) for s in models.tensor_shapes(models.MODELS[models.SMALL]).values()) == 16258304
    assert sum(int(np.prod(s)) for s in models.tensor_shapes(models.MODELS[models.SMOLLM2]).values()) == 134515008


def test_padded_keeps_prompts_left_padded_and_responses_right_padded():
    batch = workload.make_batch("seed1")
    padded = workload.padded(batch)
    for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        assert padded.prompts[i].tolist() == [0] * (128 - prompt.size) + prompt.tolist()
        assert padded.responses[i].tolist() == response.tolist() + [0] * (384 - response.size)
        assert padded.behavior_logprobs[i, : response.size].tolist() == batch.behavior_logprobs[i].tolist()


def test_ratio_of_disturbed_timings_meets_no_aim():
    ratios = {key: aim for key, aim in AIMS.items() if key.startswith("vs_")}
    torch = without_disturbed(ratios, {"disturbed": ["torch_packed_seed1"]})
    assert not torch["vs_torch_packed"].of(9.0)["met"] and torch["vs_torch_real"].of(1.2)["met"]
    assert torch["vs_tunix_packed"].of(2.5)["met"]
    assert not without_disturbed(ratios, {"disturbed": ["ours_real"]})["vs_torch_real"].of(9.0)["met"]


def test_shares_split_an_instant_between_what_runs_then():
    a, b = ("m", "a"), ("m", "b")
    got = shares([Span(a, 0.0, 4.0), Span(b, 1.0, 3.0), Span(a, 10.0, 11.0)])
    assert got == pytest.approx({a: 1 + 1 + 1 + 1, b: 1})


def test_read_module_counts_a_matmuls_flops_and_finds_its_source():
    def f(x, y):
        return jnp.tanh(x @ y).T @ x

    x, y = jnp.ones((33, 170)), jnp.ones((170, 90))
    text = jax.jit(f).lower(x, y).compile().as_text() or ""
    operations = read_module(text, "jit_f")
    entry = text[text.index("ENTRY") :]
    flops = [o.flop for name, o in operations.items() if f"%{name} = " in entry]
    assert sum(flops) == 2 * 33 * 170 * 90 + 2 * 90 * 33 * 170
    assert {o.part for o in operations.values()} == {"other"}


def test_model_flop_is_six_a_token_and_parameter_plus_causal_pairs():
    batch = workload.make_batch("seed0")
    kernels = 8 * (256 * 64 * (4 + 2 + 2) + 64 * 4 * 256 + 3 * 256 * 1024)
    scored = sum(r.size for r in batch.responses)
    sizes = [p.size + r.size for p, r in zip(batch.prompts, batch.responses, strict=True)]
    pairs = sum(i + 1 for n in sizes for i in range(n))
    want = 6 * 2377 * kernels + 6 * scored * 32768 * 256 + 3 * 2 * 2 * pairs * 4 * 64 * 8
    assert model_flop(batch, models.MODELS[models.SMALL]) == pytest.approx(want)
