"""Policy losses and loss normalization.

All functions are elementwise over arrays of one shape, in nats, aligned at the token itself, so a loss may be computed
over rows or any chunk of tokens. Averaging happens elsewhere: `packing.py` assigns token weights, and `train_step.py`
sums and divides once per update.

pi is the policy and mu the engine's (behavior) policy. pi_prox is the learner's policy before the updates of a batch, a
round or a published version, and pi_ref is the reference. Without a proximal policy r = pi / mu. A is the advantage,
and sg stops the gradient.

`token_loss` is the entry point. It clears masked positions first, so the functions below need no mask, and adds the
entropy bonus and the KL penalty to every loss.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import (
    Array,  # pyright: ignore[reportUnknownVariableType]
    Bool,  # pyright: ignore[reportUnknownVariableType]
    Float,  # pyright: ignore[reportUnknownVariableType]
    jaxtyped,  # pyright: ignore[reportUnknownVariableType]
)

from configs import custom_functions
from configs.sections import LossConfig
from configs.sections.loss_table import CUSTOM_LOSS, Normalization
from learner.objective.distillation import distilled
from learner.objective.kl_estimators import KL_ESTIMATORS, MAX_LOG_RATIO


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Inputs of a loss per token, except the policy's logprob: all of one shape, all constants."""

    behavior_logprobs: Float[Array, "*shape"]
    """log mu, as sampled by the engine."""
    advantages: Float[Array, "*shape"]
    loss_mask: Bool[Array, "*shape"]
    """True at trained tokens; elsewhere the loss and its gradient are exactly 0, whatever the other fields are."""
    proximal_logprobs: Float[Array, "*shape"] | None = None
    """log pi_prox; see `LossConfig.proximal`."""
    reference_logprobs: Float[Array, "*shape"] | None = None
    """log pi_ref."""
    teacher_logprobs: Float[Array, "*shape"] | None = None
    """log pi_T of the token's teacher; not read at tokens without one."""
    has_teacher: Bool[Array, "*shape"] | None = None
    """True at tokens with a teacher."""
    sequence_log_ratio: Float[Array, "*shape"] | None = None
    """Mean of log pi - log mu over the trained tokens of the token's sequence."""
    turn_log_ratio: Float[Array, "*shape"] | None = None
    """Mean of log pi - log mu over the trained tokens of the token's turn."""
    correction_weight: Float[Array, "*shape"] | None = None
    """Factor of the loss, without the KL penalty and the entropy bonus; see `CorrectionConfig.weight`."""


class TokenLoss(NamedTuple):
    """Loss of each token."""

    loss: Float[Array, "*shape"]
    clipped: Bool[Array, "*shape"]
    """True where the correction changed the token's gradient; the mean over trained tokens is the clip fraction."""
    kl: Float[Array, "*shape"]
    """KL estimate against the reference, without its coefficient; 0 without a reference."""
    teacher_kl: Float[Array, "*shape"]
    """log pi - log pi_T, or the divergence from the teacher; 0 without one."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """Optional inputs that a configuration reads."""

    proximal: bool
    reference: bool
    sequence_ratio: bool
    turn_ratio: bool = False
    teacher: bool = False
    divergence: bool = False
    """True if a token's divergence from its teacher is required in place of the teacher's logprob."""

    @property
    def has_teacher(self) -> bool:
        """True if the tokens with a teacher are required."""
        return self.teacher or self.divergence

    @property
    def ratios(self) -> bool:
        """True if the log-ratio of other tokens is required."""
        return self.sequence_ratio or self.turn_ratio


def needs(config: LossConfig) -> Needs:
    """Returns the optional fields of `TokenInputs` that are required."""
    return Needs(
        proximal="proximal_logprobs" in config.optional_inputs or config.corrects_by_proximal,
        reference=config.kl_coef > 0,
        sequence_ratio="sequence_log_ratio" in config.optional_inputs,
        turn_ratio="turn_log_ratio" in config.optional_inputs,
        teacher=config.teacher_coef > 0 and not config.compares_distributions,
        divergence=config.compares_distributions,
    )


Terms = tuple[Array, Array]
"""Loss and clip mask, both [*shape]."""


def reinforce_loss(logprobs: Array, inputs: TokenInputs) -> Terms:
    """Computes REINFORCE (Williams, 1992): l = -A log pi."""
    return -inputs.advantages * logprobs, jnp.zeros_like(inputs.loss_mask)  # pyright: ignore[reportUnknownMemberType]


def ppo_clip_loss(
    logprobs: Array, inputs: TokenInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Terms:
    """Computes PPO's clipped surrogate around pi_prox (Schulman et al. 2017, eq. 7), without a correction for mu.

    l = -min(r A, clip(r, 1 - e_low, 1 + e_high) A), r = pi / pi_prox.
    """
    assert inputs.proximal_logprobs is not None
    return _surrogate(logprobs - inputs.proximal_logprobs, inputs.advantages, clip_low, clip_high, dual_clip)


def truncated_is_loss(logprobs: Array, inputs: TokenInputs, *, max_weight: float) -> Terms:
    """Computes REINFORCE with truncated importance weights (PipelineRL, eq. 5; IMPALA).

    l = -sg(min(c, pi / mu)) A log pi, with per-token pi / mu as in PipelineRL's public code; the paper's equation has
    the ratio of a whole sequence.
    """
    weight, above = _truncated(logprobs - inputs.behavior_logprobs, max_weight)
    return -jax.lax.stop_gradient(weight) * inputs.advantages * logprobs, above


def grpo_clip_loss(
    logprobs: Array, inputs: TokenInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Terms:
    """Computes the clipped surrogate of PPO and GRPO (DeepSeekMath, eq. 3); clip_high > clip_low is DAPO's clip-higher.

    l = -min(r A, clip(r, 1 - e_low, 1 + e_high) A), r = pi / mu. With dual clip (Ye et al. 2020) and A < 0, l =
    -max(that minimum, c A). Dr.GRPO differs only in advantage and normalization.
    """
    return _surrogate(logprobs - inputs.behavior_logprobs, inputs.advantages, clip_low, clip_high, dual_clip)


def gspo_loss(logprobs: Array, inputs: TokenInputs, *, clip_low: float, clip_high: float) -> Terms:
    """Computes the clipped surrogate of a sequence's ratio per token (GSPO, eq. 5 and 7; GSPO-token, section 4.3).

    l_t = -min(s_t A, clip(s_t, 1 - e_low, 1 + e_high) A), s_t = sg(s) pi_t / sg(pi_t), s = exp(mean_t log(pi_t /
    mu_t)). s_t has the value of s, and its mean gradient over the sequence is the gradient of s. The loss averaged per
    sequence (normalization=sequence) is therefore the sequence objective in value and gradient.
    """
    assert inputs.sequence_log_ratio is not None  # token_loss has checked it
    log_s = jax.lax.stop_gradient(inputs.sequence_log_ratio) + logprobs - jax.lax.stop_gradient(logprobs)
    return _surrogate(log_s, inputs.advantages, clip_low, clip_high)


def decoupled_ppo_loss(
    logprobs: Array,
    inputs: TokenInputs,
    *,
    max_weight: float,
    clip_low: float = 1.0,
    clip_high: float = float("inf"),
    dual_clip: float | None = None,
) -> Terms:
    """Computes decoupled PPO: clip against pi_prox, correct for mu (AReaL, section 5.2; ROLL Flash, section 2.2).

    l = -sg(min(rho, C)) min(r A, clip(r, 1 - e_low, 1 + e_high) A), r = pi / pi_prox, rho = pi_prox / mu.

    TIS (flash-rl, slime) is the same equation with a lower C. AReaL's code drops tokens with rho above its cap; here
    rho is truncated, as in ROLL Flash.
    """
    assert inputs.proximal_logprobs is not None
    weight, above = _truncated(inputs.proximal_logprobs - inputs.behavior_logprobs, max_weight)
    log_ratio = logprobs - inputs.proximal_logprobs
    loss, clipped = _surrogate(log_ratio, inputs.advantages, clip_low, clip_high, dual_clip)
    return jax.lax.stop_gradient(weight) * loss, clipped | above


def masked_is_loss(
    logprobs: Array,
    inputs: TokenInputs,
    *,
    min_weight: float,
    max_weight: float,
    clip_low: float = 1.0,
    clip_high: float = float("inf"),
    dual_clip: float | None = None,
) -> Terms:
    """Computes decoupled PPO without tokens whose rho is outside [lo, hi] (IcePop; slime).

    l = -sg(M(rho)) min(r A, clip(r, 1 - e_low, 1 + e_high) A), M(x) = x for lo <= x <= hi and 0 elsewhere.
    """
    assert inputs.proximal_logprobs is not None
    rho = _ratio(inputs.proximal_logprobs - inputs.behavior_logprobs)
    outside = (rho < min_weight) | (rho > max_weight)
    log_ratio = logprobs - inputs.proximal_logprobs
    loss, clipped = _surrogate(log_ratio, inputs.advantages, clip_low, clip_high, dual_clip)
    return jax.lax.stop_gradient(jnp.where(outside, 0.0, rho)) * loss, clipped | outside


def cispo_loss(logprobs: Array, inputs: TokenInputs, *, clip_low: float, clip_high: float) -> Terms:
    """Computes REINFORCE with a clipped weight, so that no token loses its gradient (MiniMax-M1, section 3.1).

    l = -sg(clip(r, 1 - e_low, 1 + e_high)) A log pi, r = pi / mu.
    """
    ratio = _ratio(logprobs - inputs.behavior_logprobs)
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jax.lax.stop_gradient(weight) * inputs.advantages * logprobs, weight != ratio


def topr_loss(logprobs: Array, inputs: TokenInputs, *, min_weight: float, max_weight: float) -> Terms:
    """Computes tapered off-policy REINFORCE (TOPR) per token, as ROLL Flash; the paper's ratio is per sequence.

    l = -A log pi where A > 0, and -sg(clip(r, lo, hi)) A log pi where A <= 0, r = pi / mu.
    """
    ratio = _ratio(logprobs - inputs.behavior_logprobs)
    tapered = jnp.clip(ratio, min_weight, max_weight)
    is_positive = inputs.advantages > 0
    weight = jnp.where(is_positive, 1.0, tapered)
    return -jax.lax.stop_gradient(weight) * inputs.advantages * logprobs, ~is_positive & (tapered != ratio)


def sft_loss(logprobs: Array, inputs: TokenInputs) -> Terms:
    """Computes the negative log-likelihood of supervised fine-tuning: l = -log pi."""
    return -logprobs, jnp.zeros_like(logprobs, jnp.bool_)  # pyright: ignore[reportUnknownMemberType]


LOSSES: dict[str, Callable[..., Terms]] = {
    "reinforce": reinforce_loss,
    "ppo_clip": ppo_clip_loss,
    "grpo_clip": grpo_clip_loss,
    "dapo": grpo_clip_loss,
    "dr_grpo": grpo_clip_loss,
    "truncated_is": truncated_is_loss,
    "gspo": gspo_loss,
    "decoupled_ppo": decoupled_ppo_loss,
    "tis": decoupled_ppo_loss,
    "masked_is": masked_is_loss,
    "cispo": cispo_loss,
    "topr": topr_loss,
    "sft": sft_loss,
}
"""Losses by `LossConfig.name`. Each, like a custom loss, takes the constants of `LossConfig.constants` by name."""


@jaxtyped(typechecker=beartype)
def token_loss(
    logprobs: Float[Array, "*shape"],
    entropy: Float[Array, "*shape"],
    inputs: TokenInputs,
    config: LossConfig,
    divergence: Float[Array, "*shape"] | None = None,
) -> TokenLoss:
    """Returns the configured loss of each token with correction, distillation, entropy bonus and KL penalty.

    loss = w l - entropy_coef H(pi) + kl_coef k(log pi - log pi_ref) + teacher_coef D, l of the advantages of
    `distilled` without a divergence D from the teacher; differentiable in logprobs, entropy and divergence only.

    Raises ValueError if a required input is missing or differs in shape from the logprobs, or if a custom loss cannot
    be loaded or does not return a loss and a clip mask of that shape.
    """
    _check(logprobs.shape, inputs, config, has_divergence=divergence is not None)
    mask = inputs.loss_mask

    def clear(x: Array) -> Array:
        # Cleared before any arithmetic: clearing afterwards would leave 0 * NaN in the gradient.
        return jnp.where(mask, x, 0.0)

    def constant(x: Array) -> Array:
        return x if x.dtype == jnp.bool_ else jax.lax.stop_gradient(clear(x))

    logprobs = clear(logprobs)
    inputs = jax.tree.map(constant, inputs)
    kl = teacher_kl = jnp.zeros_like(logprobs)  # pyright: ignore[reportUnknownMemberType]
    if inputs.teacher_logprobs is not None and inputs.has_teacher is not None:
        teacher_kl = jnp.where(inputs.has_teacher, logprobs - inputs.teacher_logprobs, 0.0)
        advantages = distilled(inputs.advantages, teacher_kl, config.teacher_coef)
        inputs = dataclasses.replace(inputs, advantages=advantages)
    loss, clipped = _terms(logprobs, inputs, config)
    if inputs.correction_weight is not None:
        loss = inputs.correction_weight * loss
    if inputs.reference_logprobs is not None:
        kl = KL_ESTIMATORS[config.kl_estimator](logprobs - inputs.reference_logprobs)
    if config.kl_coef:
        loss = loss + config.kl_coef * kl
    if divergence is not None and inputs.has_teacher is not None:
        teacher_kl = jnp.where(mask & inputs.has_teacher, divergence, 0.0)
        loss = loss + config.teacher_coef * teacher_kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * clear(entropy)
    return TokenLoss(loss=clear(loss), clipped=mask & clipped, kl=clear(kl), teacher_kl=clear(teacher_kl))


def _terms(logprobs: Array, inputs: TokenInputs, config: LossConfig) -> Terms:
    if not custom_functions.is_custom(config.name):
        return LOSSES[config.name](logprobs, inputs, **config.constants)
    returned: object = custom_functions.load("loss.name", config.name, CUSTOM_LOSS)(
        logprobs, inputs, **config.constants
    )
    match returned:
        case (jax.Array() as loss, jax.Array() as clipped) if (
            loss.shape == clipped.shape == logprobs.shape
            and jnp.issubdtype(loss.dtype, jnp.floating)
            and clipped.dtype == jnp.bool_
        ):
            return loss, clipped
        case _:
            raise ValueError(
                f"loss.name={config.name} must return (loss, clipped), jax arrays of floats and of booleans, both of "
                f"the logprobs' shape {list(logprobs.shape)}, got {_described(returned)}"
            )


def _described(returned: object) -> str:
    parts = cast(tuple[object, ...], returned) if isinstance(returned, tuple) else (returned,)
    return ", ".join(f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__ for x in parts)


def _ratio(log_ratio: Array) -> Array:
    """Returns the exponential, capped at e^20; at the cap it has no gradient."""
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def _truncated(log_ratio: Array, max_weight: float) -> Terms:
    """Returns the ratio truncated at `max_weight`, and where it was truncated."""
    log_max = min(math.log(max_weight), MAX_LOG_RATIO)
    # exp(min(x, log c)) equals min(c, exp(x)) without overflow.
    return jnp.exp(jnp.minimum(log_ratio, log_max)), log_ratio > log_max


def _surrogate(
    log_ratio: Array, advantages: Array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Terms:
    ratio = _ratio(log_ratio)
    free = ratio * advantages
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < free
    objective = jnp.where(clipped, bounded, free)
    if dual_clip is not None:
        floor = dual_clip * advantages
        too_low = (advantages < 0) & (objective < floor)
        objective, clipped = jnp.where(too_low, floor, objective), clipped | too_low
    return -objective, clipped


def _check(shape: tuple[int, ...], inputs: TokenInputs, config: LossConfig, *, has_divergence: bool) -> None:
    wanted = dict.fromkeys(sorted(config.optional_inputs), f"loss.name={config.name}")
    if config.kl_coef > 0:
        wanted["reference_logprobs"] = f"loss.kl_coef={config.kl_coef}"
    needed, setting = needs(config), f"loss.teacher_coef={config.teacher_coef}"
    if needed.teacher:
        wanted["teacher_logprobs"] = setting
    if needed.has_teacher:
        wanted["has_teacher"] = setting
    if needed.divergence != has_divergence:
        raise ValueError(
            f"loss.teacher_divergence={config.teacher_divergence}: expected a divergence from the teacher "
            f"to be {'given' if needed.divergence else 'left out'}"
        )
    for name, setting in wanted.items():
        if getattr(inputs, name) is None:
            raise ValueError(f"{setting} needs TokenInputs.{name}, got None (see losses.needs)")
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if value is not None and value.shape != shape:
            raise ValueError(f"TokenInputs.{field.name}: expected the logprobs' shape {shape}, got {value.shape}")


def token_weight(normalization: Normalization, num_trained: int, max_response_tokens: int) -> tuple[float, int]:
    """Returns (w, d): the weight of each of a sequence's n trained tokens, and the sequence's share of the divisor.

    An update's loss is sum_t w_t l_t / sum_s d_s, with m sequences and L = max_response_tokens:

    token (DAPO, eq. 12): w = 1, d = n; the mean over tokens.
    sequence (GRPO, DeepSeekMath eq. 3; GSPO, eq. 5): w = 1 / n, d = 1; the mean over sequences of their means.
    sequence_sum (PipelineRL, eq. 5): w = 1, d = 1; 1 / m sum_j sum_t, the gradient of a sequence's log-probability.
    constant (Dr.GRPO): w = 1, d = L.

    A sequence without trained tokens adds nothing to either sum: the mean is over trained sequences.
    """
    if num_trained == 0:
        return 0.0, 0
    match normalization:
        case "token":
            return 1.0, num_trained
        case "sequence":
            return 1.0 / num_trained, 1
        case "sequence_sum":
            return 1.0, 1
        case "constant":
            return 1.0, max_response_tokens
