"""A user's own loss and advantage, tried before a run starts, and where their results enter."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.sections import LossConfig
from learner.objective.advantages import token_advantages
from learner.objective.check_custom import check
from learner.objective.effective_constants import effective_constants
from learner.objective.losses import Needs, needs
from learner.objective.reward_shaping import has_learning_signal
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.learner.objective.test_losses import inputs_of, run

HERE = __name__


def truncated(logprobs, inputs, *, max_weight=2.0):
    """The registry's truncated_is, as a user would write it."""
    weight = jnp.minimum(jnp.exp(jnp.minimum(logprobs - inputs.behavior_logprobs, 20.0)), max_weight)
    return -jax.lax.stop_gradient(weight) * inputs.advantages * logprobs, weight >= max_weight


def a_sum(logprobs, inputs):
    return jnp.sum(logprobs), logprobs > 0


def only_a_loss(logprobs, inputs):
    return logprobs


def ints(logprobs, inputs):
    return jnp.int32(logprobs), logprobs > 0


def clipped_as_floats(logprobs, inputs):
    return logprobs, logprobs


def not_finite(logprobs, inputs):
    return logprobs / inputs.advantages, logprobs > 0


def nan_gradient(logprobs, inputs):
    return jnp.sqrt(jnp.abs(logprobs - inputs.behavior_logprobs)), logprobs > 0  # finite on-policy, its slope is not


def numpy_only(logprobs, inputs):
    return np.exp(logprobs), logprobs > 0


def over_the_batch(logprobs, inputs):
    return (inputs.advantages - jnp.mean(inputs.advantages)) * logprobs, logprobs > 0


def median(rewards, config):
    return rewards - np.median(rewards)


def one_short(rewards, config):
    return rewards[1:]


def text(rewards, config):
    return "high"


def of_a_tokens_neighbor(rewards, config, *, rollouts):
    return [np.zeros(r.tokens.size + 1) for r in rollouts]


def a_matrix(rewards, config):
    return np.zeros((rewards.size, 1))


def integers(rewards, config):
    return np.zeros(rewards.shape, int)


def nan_advantages(rewards, config):
    return rewards / 0.0 * 0.0


def too_large(rewards, config):
    return rewards * 1e300


def raises(rewards, config):
    raise KeyError("no such\nproblem")


def in_place(rewards, config):
    rewards -= rewards.mean()
    return rewards


def clipped_from_proximal(logprobs, inputs, *, clip_low=0.2, clip_high=0.28, max_weight=5.0):
    """The registry's decoupled_ppo, as a user would write it."""
    ratio = jnp.exp(logprobs - inputs.proximal_logprobs)
    free, held = ratio * inputs.advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * inputs.advantages
    log_rho = inputs.proximal_logprobs - inputs.behavior_logprobs
    rho = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho), max_weight))
    return -rho * jnp.minimum(free, held), (held < free) | (log_rho > jnp.log(max_weight))


clipped_from_proximal.needs = ("proximal_logprobs",)


def of_sequences(logprobs, inputs, *, clip_low=3e-4, clip_high=4e-4):
    """The registry's gspo, as a user would write it."""
    ratio = jnp.exp(inputs.sequence_log_ratio + logprobs - jax.lax.stop_gradient(logprobs))
    free, held = ratio * inputs.advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * inputs.advantages
    return -jnp.minimum(free, held), held < free


of_sequences.needs = ("sequence_log_ratio",)


def of_turns(logprobs, inputs):
    ratio = jnp.exp(inputs.turn_log_ratio + logprobs - jax.lax.stop_gradient(logprobs))
    return -ratio * inputs.advantages, logprobs > 0


of_turns.needs = ("turn_log_ratio",)


def asks_for_weather(logprobs, inputs):
    return logprobs, logprobs > 0


asks_for_weather.needs = ("weather",)


def by_length(rewards, config, *, num_tokens, turn_rewards):
    return (rewards - rewards.mean()) / num_tokens + np.array([len(r) for r in turn_rewards])


def turn_reward_less_half(rewards, config, *, turn_rewards):
    return [np.float64(0.25) if r.size == 0 else r.astype(np.float64) - 0.5 for r in turn_rewards]


def token_number(rewards, config, *, rollouts):
    return [r.tokens.astype(np.float32) for r in rollouts]


def spoils_its_arguments(rewards, config, *, num_tokens, rollouts):
    num_tokens[:] = 0
    rollouts[0].loss_mask[:] = False
    return rewards - rewards.mean()


def own(loss=None, advantage=None, **fields):
    names = {"name": loss and f"{HERE}:{loss}", "advantage": advantage and f"{HERE}:{advantage}"}
    return LossConfig(**{field: name for field, name in names.items() if name}, **fields)


@pytest.mark.heavy
def test_check_good_functions_and_names_of_ours_pass():
    check(own("truncated", "median"), group_size=1)
    check(own("of_turns"), group_size=4)
    check(own("truncated", kl_coef=0.1, entropy_coef=0.1, max_weight=3.0), group_size=4)
    check(LossConfig(), group_size=4)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            "a_sum",
            "must return (loss, clipped), jax arrays of floats and of booleans, "
            "both of the logprobs' shape [8], got float",
        ),
        ("only_a_loss", "got float32[8]"),
        ("ints", "got int32[8], bool[8]"),
        ("clipped_as_floats", "got float32[8], float32[8]"),
        ("not_finite", "must be finite, and its gradient too"),
        ("nan_gradient", "must be finite, and its gradient too"),
        ("numpy_only", "fails on a sample of tokens: TracerArrayConversionError: "),
        ("over_the_batch", "must be elementwise, for it is taken over any chunk of tokens"),
    ],
)
def test_check_loss_that_can_not_be_trained_with_is_refused_by_name(loss, said):
    with pytest.raises(ValueError) as e:
        check(own(loss), group_size=4)
    assert str(e.value).startswith(f"loss.name={HERE}:{loss} ") and said in str(e.value)


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        (
            "one_short",
            "must return K=4 finite floats as a numpy array, or a list of K arrays with a float per turn or "
            "per token of each response, got 3 values",
        ),
        ("text", "of each response, got str"),
        ("a_matrix", "of each response, got float64[4, 1]"),
        ("integers", "got int64[] for a response of 1 turns and 1 tokens"),
        ("of_a_tokens_neighbor", "got float64[2] for a response of 1 turns and 1 tokens"),
        ("nan_advantages", "per token of each response, got nan"),
        ("too_large", "per token of each response, got 3"),
        ("raises", "fails on a group of rewards from 0 to 1: KeyError: 'no such"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_check_advantage_that_is_none_is_refused_by_name(advantage, said):
    with pytest.raises(ValueError) as e:
        check(own(advantage=advantage), group_size=4)
    assert str(e.value).startswith(f"loss.advantage={HERE}:{advantage} ") and said in str(e.value)


def test_check_unread_constant_is_refused():
    with pytest.raises(ValueError, match="loss.clip_low=0.1 has no effect with .*:truncated, which reads max_weight"):
        check(own("truncated", clip_low=0.1), group_size=4)


def response(reward, mask=(1, 1), turns=()):
    turn_rewards = np.array(turns, np.float32)
    return make_rollout(len(mask), loss_mask=np.array(mask, bool), reward=reward, turn_rewards=turn_rewards)


def group_of(rollouts):
    return make_group(make_ticket(), rollouts=tuple(rollouts))


def advantages_of(name, group):
    return token_advantages(group, np.array([r.reward for r in group]), own(advantage=name))


def test_advantages_of_ones_own_are_its_and_checked():
    group = [response(reward) for reward in (0.0, 1.0, 5.0)]
    got = advantages_of("median", group)
    np.testing.assert_array_equal(got, [[-1, -1], [0, 0], [4, 4]])
    assert got[0].dtype == np.float32
    with pytest.raises(ValueError, match="one_short must return K=3 finite floats"):
        advantages_of("one_short", group)
    np.testing.assert_array_equal(advantages_of("median", [response(0.1)] * 3), np.zeros((3, 2)))


def test_advantage_function_that_writes_into_its_arguments_leaves_them_alone():
    rewards = np.array([0.0, 2.0])
    group = [response(reward) for reward in rewards]
    np.testing.assert_array_equal(token_advantages(group, rewards, own(advantage="in_place")), [[-1, -1], [1, 1]])
    np.testing.assert_array_equal(rewards, [0, 2])
    advantages_of("spoils_its_arguments", group)
    assert group[0].loss_mask.all()


def test_advantage_of_ones_own_may_be_of_turns_and_of_tokens():
    # Equal rewards, but turns that differ: a function that reads turns or rollouts is asked.
    group = [response(1.0, [1, 0, 1, 1], [0.0, 1.0]), response(1.0, [1, 1, 0, 1], [1.0, 0.0]), response(1.0)]
    of_turns = advantages_of("turn_reward_less_half", group)
    of_tokens = advantages_of("token_number", group)
    wanted = [[-0.5, -0.5, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5], [0.25, 0.25]]
    for got, want in zip(of_turns, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, r in zip(of_tokens, group, strict=True):
        np.testing.assert_array_equal(got, r.tokens)
    np.testing.assert_array_equal(np.concatenate(advantages_of("median", group)), 0)
    assert has_learning_signal(group_of(group), own(advantage="token_number"), masks_truncated=False)
    assert not has_learning_signal(group_of(group), own(advantage="median"), masks_truncated=False)


def test_token_loss_of_ones_own_equals_the_built_in_of_its_equation():
    rng = np.random.default_rng(0)
    logp, mu, adv = (rng.uniform(-3, 0, (2, 5)).astype(np.float32) for _ in range(3))
    mine, ours = own("truncated", max_weight=1.5), LossConfig(name="truncated_is", max_weight=1.5)
    (got, grad), (want, want_grad) = (run(logp, inputs_of(c, mu, adv), c) for c in (mine, ours))
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-6)
    np.testing.assert_array_equal(got.clipped, want.clipped)
    assert got.clipped.any() and not got.clipped.all()


@pytest.mark.parametrize(
    ("loss", "built_in", "wanted"),
    [
        ("truncated", LossConfig(name="truncated_is", max_weight=2.0), Needs(False, False, False, False)),
        ("clipped_from_proximal", LossConfig(name="decoupled_ppo", clip_high=0.28), Needs(True, False, False, False)),
        ("of_sequences", LossConfig(name="gspo"), Needs(False, False, True, False)),
    ],
)
def test_loss_of_ones_own_gets_what_it_names_and_equals_the_built_in(loss, built_in, wanted):
    mine = own(loss)
    check(mine, group_size=4)
    assert needs(mine) == needs(built_in) == wanted
    rng = np.random.default_rng(0)
    logprobs, mu, proximal = rng.uniform(-4, -0.5, (3, 40)).astype(np.float32)
    adv, seq = rng.normal(size=(2, 40)).astype(np.float32)
    inputs = inputs_of(mine, mu, adv, np.ones(40, bool), prox=proximal, seq=seq * 1e-3)
    (got, got_slope), (want, want_slope) = (run(logprobs, inputs, config) for config in (mine, built_in))
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_slope, want_slope, rtol=1e-5, atol=1e-6)


def test_loss_of_ones_own_that_asks_for_what_there_is_not_is_refused_by_name():
    with pytest.raises(
        ValueError, match="its attribute `needs` must be a tuple of some of proximal_logprobs, sequence"
    ):
        check(own("asks_for_weather"), group_size=4)
    with pytest.raises(ValueError, match="loss.proximal=round has no effect with .*truncated, which does not name"):
        check(own("truncated", proximal="round"), group_size=4)
    check(own("clipped_from_proximal", proximal="round"), group_size=4)


def test_effective_constants_of_ones_own_keep_a_clip_that_it_may_read_of_any_ratio():
    got = effective_constants(own("clipped_from_proximal"), temperature=1.0)
    assert (got["clip_low"], got["clip_high"], got["proximal"]) == (0.2, 0.28, "batch")


def test_advantage_of_ones_own_gets_the_sampled_tokens_and_the_turns_that_it_names():
    group = [response(1.0, [1, 1, 1, 1], []), response(0.0, [1, 0, 1], [0.0, 0.0])]
    config = own(advantage="by_length")
    check(config, group_size=2)
    got = token_advantages(group, np.array([1.0, 0.0]), config)
    np.testing.assert_allclose(got[0], [0.5 / 4] * 4)
    np.testing.assert_allclose(got[1], [-0.5 / 2 + 2] * 3)


def test_effective_constants_name_ones_own_functions():
    got = effective_constants(own("truncated", "median"), temperature=1.0)
    assert got == {
        "name": f"{HERE}:truncated",
        "max_weight": 2.0,
        "advantage": f"{HERE}:median",
        "normalization": "token",
        "temperature": 1.0,
    }


@pytest.mark.heavy
def test_check_command_says_it_in_its_last_line(tmp_path):
    (tmp_path / "mine.py").write_text("print('hello')\ndef f(logprobs):\n    return logprobs\n")
    done = subprocess.run(
        [sys.executable, "-m", "learner.objective.check_custom"],
        input=json.dumps({"loss": {"name": "mine:f"}, "group_size": 4}),
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: loss.name=mine:f: expected a function (logprobs, inputs, *")
