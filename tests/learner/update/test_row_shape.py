"""packing.auto: what is chosen, when it changes, and that training doesn't depend on it."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.sections import MeshConfig, PackingConfig
from learner.update.packing import pack_groups
from learner.update.row_shape import MAX_CHANGES, RowShape, is_allowed, num_slots, propose
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
    shape = propose([71] * 32, auto())
    assert shape.rows * shape.row_tokens == 2304
    assert shape.row_tokens // 71 * shape.rows >= 32


def test_propose_within_less_room_takes_more_micro_batches():
    # At most 1024 slots. By hand: four times 576 hold 8 each, 2304 slots; three times 832 hold 11 each, 2496.
    shape = propose([71] * 32, auto(rows=2))
    assert (shape.rows, shape.row_tokens) == (1, 576)


@pytest.mark.parametrize("rows", [4, 9, 64])
def test_propose_for_mixed_lengths_is_never_worse_than_the_configured_shape(rows):
    rng = np.random.default_rng(rows)
    lengths = np.clip(rng.lognormal(np.log(150), 0.7, 64).round(), 32, 512).astype(int).tolist()
    config = auto(rows=rows, max_tokens=512, sequences=64)
    shape = propose(lengths, config)
    assert is_allowed(shape, config) and shape.rows * shape.row_tokens <= rows * 512
    assert num_slots([lengths], shape) <= num_slots([lengths], config.packing)
    assert num_slots([lengths], shape) <= 1.2 * sum(lengths)


def test_propose_keeps_to_the_mesh():
    config = auto(mesh=MeshConfig(fsdp=2, sequence=3), row_tokens=513, max_tokens=100)
    shape = propose([71] * 32, config)
    assert shape.rows % 2 == 0 and shape.row_tokens % 3 == 0 and shape.row_tokens >= 100


def test_propose_where_no_multiple_fits_is_the_configured_shape():
    config = auto(rows=1, row_tokens=40, max_tokens=40)
    assert propose([20] * 32, config) == config.packing


def test_shape_stays_while_lengths_do_and_changes_a_bounded_number_of_times():
    shape = RowShape(auto(max_tokens=512))
    first = shape.take(groups_of(71), ends_update=True)
    assert shape.take(groups_of(71), ends_update=True) == first
    seen = {(first.rows, first.row_tokens)}
    for length in (500, 40, 300, 71, 450, 20, 512) * 2:
        shape.take(groups_of(length), ends_update=True)
        now = shape.take(groups_of(length), ends_update=True)
        seen.add((now.rows, now.row_tokens))
    assert 1 < len(seen) <= 1 + MAX_CHANGES


def test_restart_goes_on_with_the_checkpoints_shape_and_its_changes():
    config = auto(max_tokens=512)
    shape = RowShape(config)
    shape.take(groups_of(71), ends_update=True)
    shape.take(groups_of(500), ends_update=True)
    restarted = RowShape(config)
    restarted.set_state(shape.get_state())
    assert restarted.packing == shape.packing and restarted.get_state() == shape.get_state()
    for length in (40, 500, 71):
        took = [s.take(groups_of(length), ends_update=True) for s in (shape, restarted)]
        assert took[0] == took[1]


def test_restart_with_less_room_forgets_a_shape_that_is_too_large():
    shape = RowShape(auto())
    shape.take(groups_of(71), ends_update=True)
    smaller = RowShape(auto(rows=2))
    smaller.set_state(shape.get_state())
    assert smaller.take(groups_of(71), ends_update=True).rows * smaller.packing.row_tokens <= 1024


def test_without_auto_the_configured_shape_is_used_and_nothing_is_looked_at():
    config = config_of()
    shape = RowShape(config)
    assert shape.take([], ends_update=True) == config.packing == shape.packing
    shape.set_state({"shape": [1, 64], "num_changes": 1})
    assert shape.packing == config.packing


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
