"""Critic: a value head on a decoder of its own, in place of the output head, or on the policy's."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from configs.schema import Config
from learner.model.architecture import Architecture
from learner.model.check_teachers import check_tokens
from learner.model.decoder import Params, abstract_params

HEAD = "value_head"
"""Name of the head in the critic's parameters: a kernel [1, D] and a bias [1]."""


def critic_architecture(config: Config, policy: Architecture) -> Architecture | None:
    """Returns the architecture of the run's critic without an output head, or None if the run has no critic.

    Raises FileNotFoundError if critic.path lacks a config.json, and ValueError if the critic's model is unsupported,
    has fewer words than the policy's, or holds too few tokens.
    """
    if not config.loss.uses_critic:
        return None
    if not config.critic.path:
        return dataclasses.replace(policy, tie_word_embeddings=True)  # A tied model has no head of its own.
    try:
        found = Architecture.from_hf(pathlib.Path(config.critic.path))
    except ValueError as e:
        raise ValueError(f"critic.path {config.critic.path}: {e}") from e
    if found.vocab_size < policy.vocab_size:
        raise ValueError(
            f"critic.path {config.critic.path}: vocab_size must be at least {policy.vocab_size} as in the run's model, "
            f"got {found.vocab_size}; use a model with the policy's tokenizer"
        )
    if found.max_position_embeddings < config.model.max_tokens:
        raise ValueError(
            f"critic.path {config.critic.path}: max_position_embeddings must be at least model.max_tokens "
            f"({config.model.max_tokens}), got {found.max_position_embeddings}"
        )
    return dataclasses.replace(found, tie_word_embeddings=True)


def check_critic(config: Config, policy: Architecture, policy_folder: pathlib.Path) -> None:
    """Raises like `critic_architecture`, and ValueError if `critic.path` has another tokenizer than the policy."""
    if critic_architecture(config, policy) is not None and config.critic.path:
        check_tokens("critic.path", pathlib.Path(config.critic.path), policy_folder)


def zero_head(architecture: Architecture, dtype: DTypeLike) -> Params:
    """Returns a value head of zeros: all values are 0 at first, whatever the hidden states are."""
    return {"kernel": jnp.zeros((1, architecture.hidden_size), dtype), "bias": jnp.zeros(1, dtype)}


def with_head(decoder: Params, head: Params) -> Params:
    """Returns a decoder's parameters with a value head in place of the output head, if it has one."""
    return decoder_params(decoder) | {HEAD: head}


def decoder_params(params: Params) -> Params:
    """Returns the parameters without an output or value head: those that give hidden states."""
    return {name: part for name, part in params.items() if name not in (HEAD, "lm_head")}


def abstract_critic(architecture: Architecture, config: Config) -> Params:
    """Returns the critic's parameters as `jax.ShapeDtypeStruct`, without allocation; only the head on the policy."""
    dtype = config.model.param_dtype
    head = jax.eval_shape(lambda: zero_head(architecture, dtype))
    return {HEAD: head} if config.critic.backbone == "policy" else with_head(abstract_params(architecture, dtype), head)


def values_of(params: Params, hidden: Float[Array, "B S D"]) -> Float32[Array, "B S"]:
    """Returns w h + b in float32: the value of the state that ends with each token."""
    head = params[HEAD]
    kernel, bias = (head[name].astype(jnp.float32) for name in ("kernel", "bias"))
    return jnp.einsum("bsd,d->bs", hidden.astype(jnp.float32), kernel[0]) + bias[0]
