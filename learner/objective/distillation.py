"""On-policy distillation: how a teacher pi_T changes the loss of a token that the policy pi sampled.

`distilled` needs the teacher's logprob of the sampled token alone. `divergence` compares the distributions at the
sampled token's state, and so has a gradient also for tokens that the policy does not sample.
"""

import jax
import jax.numpy as jnp
from jaxtyping import (
    Array,  # pyright: ignore[reportUnknownVariableType]
    Float,  # pyright: ignore[reportUnknownVariableType]
)

from configs.sections.teacher import Divergence

_LEAST_REST = 1e-6
"""Least probability of the tokens that are merged into one; a float32 sum of probabilities is no more exact."""


def distilled(advantages: Array, teacher_kl: Array, coef: float) -> Array:
    """Returns the advantages of on-policy distillation, A_t - beta sg(log pi(y_t) - log pi_T(y_t)).

    pi_T is the teacher (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; the reverse KL of GKD, arXiv
    2306.13649). Of a state s, grad KL(pi(.|s), pi_T(.|s)) = E_{y ~ pi}[(log pi(y|s) - log pi_T(y|s)) grad log pi(y|s)],
    since E[grad log pi] = 0. A loss whose gradient is -w A grad log pi, with w = pi / mu, therefore descends beta times
    the reverse KL at the sampled states. pi is the current policy: with mu instead, the result would be the gradient of
    no KL, because mu is an older policy and an engine rounds otherwise.

    `teacher_kl` is log pi - log pi_T of the sampled tokens, in nats, and 0 without a teacher; beta is `coef`.
    """
    return advantages - coef * jax.lax.stop_gradient(teacher_kl)


def divergence(
    logprobs: Float[Array, "*shape K"], teacher_logprobs: Float[Array, "*shape K"], kind: Divergence
) -> Float[Array, "*shape"]:
    """Returns the KL between the policy and a teacher at each state, in nats, over K tokens and the rest as one token.

    reverse_kl: KL(pi, pi_T) = sum_k p_k log(p_k / q_k). forward_kl: KL(pi_T, pi) = sum_k q_k log(q_k / p_k) (GKD, arXiv
    2306.13649, section 3). k also runs over the rest, p_0 = 1 - sum p_k. Merged tokens make a KL no larger (data
    processing inequality), and with K = V the result is the KL over the vocabulary. Differentiable in `logprobs`, which
    are log pi of the teacher's K likeliest tokens; `teacher_logprobs` are log pi_T of the same tokens.
    """
    log_p, log_q = (
        jnp.concatenate([x, jnp.log(jnp.maximum(1 - jnp.exp(x).sum(-1, keepdims=True), _LEAST_REST))], axis=-1)
        for x in (logprobs, teacher_logprobs)
    )
    if kind == "reverse_kl":
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
