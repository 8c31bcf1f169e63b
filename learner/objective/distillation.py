"""On-policy distillation: how a teacher pi_T changes the loss of a token."""

import jax
from jaxtyping import (
    Array,  # pyright: ignore[reportUnknownVariableType]
)


def distilled(advantages: Array, teacher_kl: Array, coef: float) -> Array:
    """Returns the advantages of on-policy distillation, A_t - beta sg(log pi(y_t) - log pi_T(y_t)).

    pi_T is the teacher (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; the reverse KL of GKD, arXiv
    2306.13649). Of a state s, grad KL(pi(.|s), pi_T(.|s)) = E_{y ~ pi}[(log pi(y|s) - log pi_T(y|s)) grad log pi(y|s)],
    since E[grad log pi] = 0. A loss whose gradient is -w A grad log pi, with w = pi / mu, therefore descends beta times
    the reverse KL at the sampled states. pi is the current policy: with mu instead, the result would be the gradient of
    no KL, because mu is an older policy and an engine rounds otherwise.

    Args:
      advantages: A of the rewards.
      teacher_kl: log pi - log pi_T of the sampled tokens, in nats; 0 without a teacher.
      coef: beta.
    """
    return advantages - coef * jax.lax.stop_gradient(teacher_kl)
