"""Log-probabilities and entropies of tokens, without the [tokens, vocabulary] array.

With 150,000 words the logits of one packed row outweigh the model's activations, so they are made a chunk
of tokens at a time, used and dropped. Forward keeps two numbers a token; backward makes each chunk's logits
once more: four head matmuls in all (forward, again, d_hidden, d_head).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " N"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Log softmax(hidden head^T / temperature)[target], and the entropy of that distribution, in nats.

    Both are float32 and both can be differentiated, with respect to `hidden` and `head`. The matmuls run in
    hidden's dtype with float32 sums; the softmax is float32.

    Args:
      hidden: final hidden states.
      head: output head, or the embedding of a tied model.
      targets: a token id in [0, V) each; ids outside can't be checked under jit and give garbage.
      temperature: what the behaviour policy sampled with; divides the logits.
      chunk: tokens whose logits exist at once, over all devices: chunk * V * 4 bytes.

    Raises:
      ValueError: temperature or chunk not positive, or shapes that don't agree.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be >= 1, got {chunk}")
    if hidden.ndim != 2 or head.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"wanted [N, D], [V, D], [N]; got {hidden.shape}, {head.shape}, {targets.shape}")
    if hidden.shape[1] != head.shape[1]:
        raise ValueError(f"hidden is {hidden.shape[1]} wide, head is {head.shape[1]}")
    return _logprobs(hidden, head, targets, float(temperature), min(chunk, max(hidden.shape[0], 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _logprobs(hidden, head, targets, temperature: float, chunk: int):
    return _forward(hidden, head, targets, temperature, chunk)[0]


def _forward(hidden, head, targets, temperature: float, chunk: int):
    weight = head.astype(hidden.dtype)

    def one_chunk(_, xs):
        h, target = xs
        logits = _logits(h, weight, temperature)
        peak = logits.max(-1)
        exps = jnp.exp(logits - peak[:, None])
        total = exps.sum(-1)
        log_total = peak + jnp.log(total)
        picked = jnp.where(_is_target(target, logits), logits, 0.0).sum(-1)
        # H = log Z - E[logit]; shifted by the peak so that two large numbers don't cancel.
        entropy = jnp.log(total) - (exps * (logits - peak[:, None])).sum(-1) / total
        return None, (picked - log_total, entropy, log_total)

    _, outs = jax.lax.scan(one_chunk, None, (_chunks(hidden, chunk), _chunks(targets, chunk)))
    logprobs, entropy, log_total = (_unchunk(x, hidden.shape[0]) for x in outs)
    return (logprobs, entropy), (hidden, head, targets, log_total, entropy)


def _backward(temperature: float, chunk: int, saved: tuple[Any, ...], cotangents):
    hidden, head, targets, log_total, entropy = saved
    weight = head.astype(hidden.dtype)

    def one_chunk(d_head, xs):
        h, target, log_z, ent, d_logprob, d_entropy = xs
        logits = _logits(h, weight, temperature)
        logp = logits - log_z[:, None]
        # d logprob = onehot - p;  d entropy = -p (log p + H).
        d_logits = -jnp.exp(logp) * (d_logprob[:, None] + d_entropy[:, None] * (logp + ent[:, None]))
        d_logits += jnp.where(_is_target(target, logits), d_logprob[:, None], 0.0)
        d_logits = (d_logits / temperature).astype(hidden.dtype)
        d_head += jnp.einsum("cv,cd->vd", d_logits, h, preferred_element_type=jnp.float32)
        return d_head, d_logits @ weight

    xs = tuple(_chunks(x, chunk) for x in (hidden, targets, log_total, entropy, *cotangents))
    d_head, d_hidden = jax.lax.scan(one_chunk, jnp.zeros(head.shape, jnp.float32), xs)
    return _unchunk(d_hidden, hidden.shape[0]), d_head.astype(head.dtype), None


_logprobs.defvjp(_forward, _backward)


def _logits(h: Array, weight: Array, temperature: float) -> Array:
    """Float32 [chunk, V]."""
    return jnp.einsum("cd,vd->cv", h, weight, preferred_element_type=jnp.float32) / temperature


def _is_target(target: Array, logits: Array) -> Array:
    """A one-hot mask: unlike a gather it stays local when the vocabulary is sharded."""
    return target[:, None] == jax.lax.broadcasted_iota(target.dtype, logits.shape, 1)


def _chunks(x: Array, chunk: int) -> Array:
    """[N, ...] -> [num_chunks, chunk, ...]; chunk s takes tokens s, s + num_chunks, s + 2 num_chunks ...

    The stride keeps every device busy in every chunk when N is sharded: consecutive tokens would make each
    chunk the business of one device.
    """
    num_chunks = max(-(-x.shape[0] // chunk), 1)
    x = jnp.pad(x, [(0, num_chunks * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(chunk, num_chunks, *x.shape[1:]).swapaxes(0, 1)


def _unchunk(x: Array, length: int) -> Array:
    """The inverse of `_chunks`, padding dropped."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:length]
