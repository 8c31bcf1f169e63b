"""GAE over packed rows against loops over single sequences in float64, as TRL and verl write them."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.sections import LossConfig
from learner.objective.advantages import token_advantages
from learner.objective.gae import actions_of, gae, value_loss
from tests.bridge.factories import make_rollout


class Sequence(NamedTuple):
    """A prompt of one token and a response: which tokens are sampled, and each token's reward and value."""

    mask: np.ndarray
    rewards: np.ndarray
    values: np.ndarray


def sequence_of(rng, size, *, at_turn_ends=False) -> Sequence:
    mask = np.append(False, rng.random(size) < 0.6)
    mask[rng.integers(1, size + 1)] = True
    rewards = rng.normal(size=size + 1) * mask
    if at_turn_ends:
        rewards *= ~np.append(mask[1:], False)
    return Sequence(mask, rewards, rng.normal(size=size + 1))


def token_book(s: Sequence, gamma: float, lam: float) -> np.ndarray:
    """The loop of verl, which keeps the next value and advantage where the token is observed; TRL's without those."""
    advantages, last, following = np.zeros(s.mask.size), 0.0, 0.0
    for t in reversed(range(s.mask.size)):
        if s.mask[t]:
            delta = s.rewards[t] + gamma * following - s.values[t]
            last, following = delta + gamma * lam * last, s.values[t]
            advantages[t] = last
    return advantages


def turn_book(s: Sequence, gamma: float, lam: float) -> np.ndarray:
    """An action is a run of sampled tokens: its value is that before its first, its reward the sum of its tokens'."""
    turns = [[t for t, _ in run] for sampled, run in itertools.groupby(enumerate(s.mask), lambda x: x[1]) if sampled]
    values = [s.values[turn[0]] for turn in turns]
    deltas = [
        s.rewards[turn].sum() + (gamma * values[n + 1] if n + 1 < len(turns) else 0.0) - values[n]
        for n, turn in enumerate(turns)
    ]
    advantages = np.zeros(s.mask.size)
    for n, turn in enumerate(turns):
        advantages[turn] = sum((gamma * lam) ** (m - n) * deltas[m] for m in range(n, len(turns)))
    return advantages


def packed(rows: list[list[Sequence]]) -> tuple[Any, ...]:
    """Mask, rewards, values and segments of rows with padding; NaN where nothing may be read."""
    size = max(sum(s.mask.size for s in row) for row in rows) + 2
    mask, segments = np.zeros((len(rows), size), bool), np.zeros((len(rows), size), np.int32)
    rewards, values = np.full((2, len(rows), size), np.nan, np.float32)
    for b, row in enumerate(rows):
        start = 0
        for n, s in enumerate(row):
            place = slice(start, start := start + s.mask.size)
            mask[b, place], segments[b, place] = s.mask, n + 1
            rewards[b, place] = np.where(s.mask, s.rewards, np.nan)
            values[b, place] = np.where(s.mask, s.values, np.nan)
    return mask, np.where(mask, rewards, 0), np.where(mask, values, 0), segments


@functools.partial(jax.jit, static_argnames=("gamma", "lam", "by_turn"))
def jitted(mask, rewards, values, segments, *, gamma, lam, by_turn):
    actions = actions_of(mask, segments, by_turn=by_turn)
    return jnp.where(mask, gae(values, rewards, actions, segments, discount=gamma, gae_lambda=lam), 0)


def of_rows(rows, **settings) -> np.ndarray:
    return np.asarray(jitted(*packed(rows), **settings))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), by_turn=st.booleans())
@example(seed=0, by_turn=False)
@example(seed=1, by_turn=True)
def test_gae_of_packed_sequences_is_the_loop_over_each(seed, by_turn):
    gamma, lam = 0.9, 0.95  # constants of the compiled function
    rng = np.random.default_rng(seed)
    rows = [[sequence_of(rng, size, at_turn_ends=by_turn) for size in sizes] for sizes in ([5, 1, 8], [12])]
    found = of_rows(rows, gamma=gamma, lam=lam, by_turn=by_turn)
    book = turn_book if by_turn else token_book
    for got, row in zip(found, rows, strict=True):
        want = np.concatenate([book(s, gamma, lam) for s in row])
        np.testing.assert_allclose(got[: want.size], want, rtol=1e-5, atol=1e-5)


def test_gae_with_lambda_and_gamma_1_is_the_reward_minus_the_value_of_eq_4():
    s = Sequence(np.array([False, True, False, True]), np.array([0, 0, 0, 2.0]), np.array([9, 0.5, 9, 1.5]))
    (found,) = of_rows([[s, s]], gamma=1.0, lam=1.0, by_turn=False)
    np.testing.assert_allclose(found, [0, 1.5, 0, 0.5, 0, 1.5, 0, 0.5, 0, 0])


def test_value_loss_with_a_clip_is_that_of_ppo2_and_has_no_gradient_beyond_it():
    values, old, returns = np.array([[1.0, 3.0, -2.0, 0.4], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, -9.0]])
    want, slope = [], []
    for v, o, g in zip(values, old, returns, strict=True):
        bounded = min(max(v, o - 0.5), o + 0.5)
        want.append(max((v - g) ** 2, (bounded - g) ** 2) / 2)
        slope.append(0.0 if (bounded - g) ** 2 > (v - g) ** 2 else v - g)
    arrays = [np.asarray(x, np.float32) for x in (values, old, returns)]

    @jax.jit
    def found(values, old, returns):
        def total(v):
            loss, clipped = value_loss(v, old, returns, value_clip=0.5)
            return loss.sum(), (loss, clipped)

        return jax.grad(total, has_aux=True)(values), value_loss(values, old, returns, value_clip=None)[0]

    (gradient, (loss, clipped)), free = found(*arrays)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6)
    np.testing.assert_array_equal(clipped, np.array(slope) == 0)
    np.testing.assert_allclose(free, (values - returns) ** 2 / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("turn_rewards", "finish", "want"),
    [
        ([], "stop", [0, 0, 0, 0, 2.5, 0]),
        ([], "length", [0, 0, 0, 0, 2.5, 0]),
        ([0.5, 1.5], "stop", [0, 0.5, 0, 0, 2.0, 0]),
    ],
)
def test_rewards_for_a_critic_are_at_the_last_sampled_tokens(turn_rewards, finish, want):
    mask = np.array([True, True, False, True, True, False])
    turns = np.array(turn_rewards, np.float32)
    rollout = make_rollout(6, loss_mask=mask, finish=finish, reward=2.0, turn_rewards=turns)
    # A shaped reward of 2.5, of which the turns make 2.0.
    (found,) = token_advantages([rollout], np.array([2.5]), LossConfig(advantage="gae"))
    np.testing.assert_allclose(found, want)
