"""packing.auto: what is chosen, when it changes, and that training doesn't depend on it."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from configs.sections import LossConfig, MeshConfig, PackingConfig, SftConfig
from learner.update.auto_shape import MIN_UPDATES, NUM_SEEN, AutoShape, first_packs, propose
from learner.update.packing import pack_groups
from tests.learner.streams import config_of, fresh_params, random_groups, steps_of


def auto(rows=8, row_tokens=512, *, max_tokens=96, sequences=32, mesh=None):
    config = config_of()
    return dataclasses.replace(
        config,
        packing=PackingConfig(rows=rows, row_tokens=row_tokens, auto=True),
        model=dataclasses.replace(config.model, max_tokens=max_tokens),
        sampling=dataclasses.replace(config.sampling, max_response_tokens=max_tokens - 1),
        rounds=dataclasses.replace(
            config.rounds, groups_per_round=sequences // 4, groups_per_update=sequences // 4, samples_per_group=4
        ),
        mesh=mesh or config.mesh,
    )


def groups_of(length, num_groups=8):
    """Groups of four responses, each `length` tokens long with its prompt."""
    made = []
    for i, group in enumerate(random_groups(0, num_groups)):
        size = length - group.prompt_tokens.size
        rollouts = tuple(
            dataclasses.replace(
                r,
                tokens=np.ones(size, np.int32),
                loss_mask=np.ones(size, np.bool_),
                behavior_logprobs=np.full(size, -1.0, np.float32),
                token_versions=np.zeros(size, np.int32),
            )
            for r in (group.rollouts * 4)[:4]
        )
        made.append(dataclasses.replace(group, ticket_id=f"t{i}", rollouts=rollouts))
    return made


def test_propose_for_32_samples_of_71_tokens_wastes_no_sequences_room():
    # By hand: 32 x 71 = 2272 tokens; 4 rows of 576 hold 8 each. Rows of 512 hold 7: five of them, 2560.
    shape = propose([[71] * 32], auto())
    assert shape.rows * shape.row_tokens == 2304
    assert shape.row_tokens // 71 * shape.rows >= 32


def test_propose_within_less_room_takes_more_micro_batches():
    # At most 1024 slots. By hand: four times 576 hold 8 each, 2304 slots; three times 832 hold 11 each, 2496.
    shape = propose([[71] * 32], auto(rows=2))
    assert (shape.rows, shape.row_tokens) == (1, 576)


def test_propose_keeps_to_the_mesh():
    config = auto(mesh=MeshConfig(fsdp=2, sequence=3), row_tokens=513, max_tokens=100)
    shape = propose([[71] * 32], config)
    assert shape.rows % 2 == 0 and shape.row_tokens % 3 == 0 and shape.row_tokens >= 100


def test_propose_where_no_multiple_fits_is_the_configured_shape():
    config = auto(rows=1, row_tokens=40, max_tokens=40)
    assert propose([[20] * 32], config) == config.packing


def test_propose_for_groups_that_come_one_by_one_has_no_room_for_more():
    # By hand: a group of 8 x 71 = 568 tokens fills a row of 576; all at once would take 2304 for each of them.
    shape = propose([[71] * 8] * 4, auto())
    assert (shape.rows, shape.row_tokens) == (1, 576)


def test_first_updates_of_a_supervised_run_have_its_rows_and_not_a_groups():
    config = auto(sequences=4)
    config = dataclasses.replace(
        config,
        loss=LossConfig(name="sft"),
        sft=SftConfig(rows_per_update=24),
        sampling=dataclasses.replace(config.sampling, temperature=1.0),
        rounds=dataclasses.replace(config.rounds, groups_per_round=1, groups_per_update=1),
    )
    assert max(map(len, first_packs([[40]] * 5, config))) == 24


def test_micro_batches_are_larger_where_products_are_bfloat16():
    config = auto(rows=64, row_tokens=1024, max_tokens=1024)
    fast = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype="bfloat16"))
    # By hand, 59 rows in all: one at a time is least with 64; six at a time are 11 x (6144 + 768), less than 59 x 1792.
    packs = [[1024] * n for n in (17, 19, 23)]
    assert propose(packs, config).rows == 1
    assert propose(packs, fast).rows > 4


# Mixed lengths, trained as a learner does that streams. The oracle of a shape's cost counts the micro-batches that
# pack_groups makes, and the choice is held against a grid of shapes that it doesn't know.
GRID = ((1, 1536), (2, 1536), (4, 1536), (1, 2048), (2, 2048), (4, 2048), (8, 2048), (16, 2048))
WORKLOADS = {"4x8": (4, 0.4), "8x8": (8, 0.5), "16x8": (16, 0.5), "even": (4, 0.1)}
ARRIVALS = ("whole", "bursts", "single")


def mixed(num_groups, *, max_tokens=1536):
    """A configuration for updates of so many groups of 8, with far more room than they need."""
    config = auto(16, 2048, max_tokens=max_tokens)
    rounds = dataclasses.replace(
        config.rounds, groups_per_round=4 * num_groups, groups_per_update=num_groups, samples_per_group=8
    )
    return dataclasses.replace(config, rounds=rounds)


def mixed_groups(rng, num_groups, sigma, median=100.0) -> list[Any]:
    """Groups of 8 responses of lognormal length, by a lognormal median of their own; `take` needs lengths alone."""

    def group() -> Any:
        own, prompt = median * np.exp(rng.normal(0, sigma)), rng.integers(40, 120)
        sizes = np.clip(own * np.exp(rng.normal(0, sigma, 8)), 4, 1024).astype(int)
        rollouts = [SimpleNamespace(tokens=np.zeros(n, np.int32)) for n in sizes]
        return SimpleNamespace(prompt_tokens=np.zeros(prompt, np.int32), rollouts=rollouts)

    return [group() for _ in range(num_groups)]


def arriving(rng, groups, how):
    """An update's groups as the learner finds them: all, some, or one at a time."""
    packs = []
    while groups:
        num = {"whole": len(groups), "bursts": int(rng.integers(1, len(groups) + 1)), "single": 1}[how]
        packs, groups = [*packs, groups[:num]], groups[num:]
    return packs


def slots_and_overhead(pack, rows, width):
    """First fit decreasing, written apart: slots of a pack's micro-batches and 64 for each."""
    free: list[int] = []
    for size in sorted((g.prompt_tokens.size + r.tokens.size for g in pack for r in g.rollouts), reverse=True):
        fitting = [i for i, room in enumerate(free) if room >= size]
        if fitting:
            free[fitting[0]] -= size
        else:
            free.append(width - size)
    return -(-len(free) // rows) * (rows * width + 64)


def train(shape, rng, how, updates):
    """What each update cost with the shapes it was given, and the shapes."""
    costs, shapes = [], []
    for groups in updates:
        packs, cost = arriving(rng, groups, how), 0
        for i, pack in enumerate(packs):
            used = shape.choose(pack, ends_update=i == len(packs) - 1)
            cost += slots_and_overhead(pack, used.rows, used.row_tokens)
            shapes.append((used.rows, used.row_tokens))
        costs.append(cost)
    return costs, shapes


@pytest.mark.heavy
@pytest.mark.parametrize("how", ARRIVALS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_settled_shape_is_within_a_twentieth_of_the_best_for_updates_it_has_not_seen(workload, how):
    num_groups, sigma = WORKLOADS[workload]
    rng, config = np.random.default_rng(1), mixed(num_groups)
    shape = AutoShape(config)
    train(shape, rng, how, [mixed_groups(rng, num_groups, sigma) for _ in range(4 * NUM_SEEN)])
    settled = (shape.packing.rows, shape.packing.row_tokens)
    unseen = [arriving(rng, mixed_groups(rng, num_groups, sigma), how) for _ in range(40)]

    def cost(rows, width):
        return sum(slots_and_overhead(pack, rows, width) for packs in unseen for pack in packs)

    assert cost(*settled) <= 1.05 * min(cost(*one) for one in GRID)
    assert cost(*settled) <= cost(16, 2048)


@pytest.mark.heavy
@pytest.mark.parametrize("workload", WORKLOADS)
def test_whole_course_from_the_first_update_is_near_the_best_fixed_shape(workload):
    num_groups, sigma = WORKLOADS[workload]
    rng = np.random.default_rng(2)
    updates = [mixed_groups(rng, num_groups, sigma) for _ in range(60)]
    costs, _ = train(AutoShape(mixed(num_groups)), rng, "whole", updates)
    fixed = [sum(slots_and_overhead(groups, *one) for groups in updates) for one in GRID]
    assert sum(costs) <= 1.08 * min(fixed)


@pytest.mark.heavy
@pytest.mark.parametrize("how", ARRIVALS)
def test_shape_follows_lengths_that_grow_with_few_changes(how):
    rng, num = np.random.default_rng(3), 200
    updates = [mixed_groups(rng, 8, 0.3, median=40.0 * 1.015**u) for u in range(num)]  # 40 to 790 tokens
    costs, shapes = train(AutoShape(mixed(8)), rng, how, updates)
    late = [arriving(rng, mixed_groups(rng, 8, 0.3, median=40.0 * 1.015**u), how) for u in range(num - 40, num)]
    for rows, width in GRID:
        fixed = sum(slots_and_overhead(pack, rows, width) for packs in late for pack in packs)
        assert sum(costs[-40:]) <= 1.08 * fixed
    changes = [i for i in range(1, len(shapes)) if shapes[i] != shapes[i - 1]]
    assert len(changes) <= 1 + num / MIN_UPDATES


@pytest.mark.heavy
def test_shape_changes_at_most_once_in_so_many_updates_whatever_comes():
    shape, changed = AutoShape(auto(max_tokens=512)), []
    before = shape.choose(groups_of(71), ends_update=True)
    for update in range(1, 300):
        length = (500, 40, 300, 71, 450, 20, 512)[update // 10 % 7]
        now = shape.choose(groups_of(length), ends_update=True)
        if now != before:
            changed.append(update)
        before = now
    assert 1 < len(changed) <= 1 + 300 // MIN_UPDATES
    assert all(b - a >= MIN_UPDATES for a, b in zip(changed, changed[1:], strict=False))


def test_shape_stays_while_lengths_do():
    shape = AutoShape(auto(max_tokens=512))
    first = shape.choose(groups_of(71), ends_update=True)
    assert all(shape.choose(groups_of(71), ends_update=True) == first for _ in range(3 * NUM_SEEN))


@pytest.mark.parametrize("num_before", [1, 5, 11, 30])
def test_restart_goes_on_with_the_same_shapes(num_before):
    config, rng = mixed(4, max_tokens=1152), np.random.default_rng(4)
    shape = AutoShape(config)
    updates = [mixed_groups(rng, 4, 0.4, median=60.0 if u < 35 else 650.0) for u in range(80)]
    train(shape, rng, "whole", updates[:num_before])
    restarted = AutoShape(config)
    restarted.set_state(json.loads(json.dumps(shape.get_state())))
    assert restarted.packing == shape.packing and restarted.get_state() == shape.get_state()
    rest = [train(s, rng, "whole", updates[num_before:]) for s in (shape, restarted)]
    assert rest[0] == rest[1] and len(set(rest[0][1])) > 1


def test_restart_with_less_room_forgets_a_shape_that_is_too_large():
    shape = AutoShape(auto())
    shape.choose(groups_of(71), ends_update=True)
    smaller = AutoShape(auto(rows=2))
    smaller.set_state(shape.get_state())
    assert smaller.choose(groups_of(71), ends_update=True).rows * smaller.packing.row_tokens <= 1024


def test_without_auto_the_configured_shape_is_used_and_nothing_is_looked_at():
    config = config_of()
    shape = AutoShape(config)
    assert shape.choose([], ends_update=True) == config.packing == shape.packing
    shape.set_state({"shape": [1, 64], "num_held": 0, "num_seen": 0, "packs": []})
    assert shape.packing == config.packing


@pytest.mark.heavy
@pytest.mark.parametrize("shape", [(8, 64), (1, 256)])
def test_update_in_another_shape_has_the_same_gradient(shape):
    """The steps take a shape that they were not built with; it is one more compilation each."""
    config = config_of()
    want_steps, steps = steps_of(config), steps_of(config)
    results = []
    for used, packing in ((want_steps, config.packing), (steps, PackingConfig(rows=shape[0], row_tokens=shape[1]))):
        state = used.init(fresh_params())
        for micro in pack_groups(
            random_groups(0, 4),
            packing=packing,
            loss=config.loss,
            max_response_tokens=config.sampling.max_response_tokens,
            ends_update=True,
        ):
            state = used.accumulate(state, micro.batch)
        results.append(jax.device_get(state.accumulator))
    got, want = results[1], results[0]
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5), got.grads, want.grads)
    np.testing.assert_allclose(got.denominator, want.denominator)
    assert steps.num_compilations == 1
