"""Log-probabilities, entropies and loss of sampled tokens, without a [tokens, vocabulary] array.

With 150,000 words, the logits of one packed row are larger than the model's activations. They are therefore computed
per chunk of scored tokens and dropped after use. Each device first orders its scored tokens, then visits them in
chunks. The number of chunks depends on the batch, the shapes do not.

A token's loss depends only on its own logits, so its gradient is computed in the same visit. `token_loss_sum` needs
three head matmuls (logits, d_hidden, d_head); differentiating through log-probabilities needs four.

On a mesh the batch axes split the rows, `sequence` splits their tokens, and `tensor` splits the vocabulary. The head is
gathered once in the compute dtype, and its gradient is reduced once, after the last chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from learner.distributed.sharding import BATCH_AXES, FSDP, axes_size

TokenLossFn = Callable[[Array, Array, Array | None, Any], tuple[Array, Any]]
"""Elementwise (logprobs [n], entropies [n], logprobs of `others` [n, K], inputs) -> (loss to sum [n], more per-token
outputs [n])."""

ROWS = PartitionSpec(BATCH_AXES, "sequence")


class Scores(NamedTuple):
    """Logprob and entropy of each scored token, in nats; 0 elsewhere."""

    logprobs: Float[Array, "B S"]
    entropy: Float[Array, "B S"]


class TopTokens(NamedTuple):
    """Likeliest tokens at each scored position, the likeliest first; 0 elsewhere."""

    tokens: Int[Array | np.ndarray, "B S K"]
    logprobs: Float[Array | np.ndarray, "B S K"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Settings that turn hidden states into logits of scored tokens."""

    temperature: float = 1.0
    """Sampling temperature of the behavior policy; divides the logits."""
    soft_cap: float | None = None
    """Cap of logits z, which become soft_cap * tanh(z / soft_cap) before the temperature; None disables it."""
    chunk: int = 128
    """Tokens per device whose logits exist at once: chunk * (V / tensor) * 4 bytes, a few times."""
    words_last: bool = False
    """True to sum the head's gradient as [D, V] and transpose it at the end. A CPU's matmul kernel then writes the sum
    1.4 times as fast; elsewhere the transpose has no benefit."""
    mesh: Mesh | None = None
    """Device mesh; None means one device."""
    is_trained: bool = True
    """False if the head is frozen: its gradient, as large as the head, is not computed."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be > 0, got {self.soft_cap}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be >= 1, got {self.chunk}")

    @property
    def is_spread(self) -> bool:
        """True if there are several devices to sum over; a sum over one device would still copy its operand."""
        return self.mesh is not None and self.mesh.size > 1


def token_scores(
    head: Head,
    hidden: Float[Array, "B S D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
) -> Scores:
    """Returns log softmax(hidden weight^T / temperature)[target], and the entropy of that distribution.

    `hidden[b, i]` predicts `targets[b, i]`. Target ids outside [0, V) are not detected under jit and give wrong
    results. Not differentiable; `token_loss_sum` provides gradients. The matmul runs in hidden's dtype with float32
    sums, and the softmax in float32. Raises ValueError if shapes do not match.
    """
    _check(hidden, weight, targets, mask)

    def local(hidden, weight, targets, mask) -> Scores:
        def visit(done, take, put):
            logits = _Logits(head, take(hidden), weight, take(targets))
            return put(done, Scores(logits.logprobs, logits.entropy))

        zeros = jnp.zeros(mask.size, jnp.float32)
        return _unflatten(_walk(head.chunk, mask, Scores(zeros, zeros), visit), mask.shape)

    hidden, weight = jax.lax.stop_gradient((hidden, weight.astype(hidden.dtype)))
    specs = (PartitionSpec(BATCH_AXES, "sequence", None), _weight_spec(head, weight), ROWS, ROWS)
    return _on_mesh(head, local, specs, ROWS)(hidden, weight, targets, mask)


def top_tokens(
    head: Head, hidden: Float[Array, "B S D"], weight: Float[Array, "V D"], mask: Bool[Array, "B S"], *, k: int
) -> TopTokens:
    """Returns the k <= V likeliest tokens by softmax(hidden weight^T / temperature), and their logprobs in nats.

    Not differentiable. Arguments and errors as in `token_scores`.
    """
    _check(hidden, weight, mask, mask)

    def local(hidden, weight, mask) -> TopTokens:
        def visit(done, take, put):
            h = take(hidden)
            return put(done, TopTokens(*_Logits(head, h, weight, jnp.zeros(h.shape[0], jnp.int32)).top(k)))

        start = TopTokens(jnp.zeros((mask.size, k), jnp.int32), jnp.zeros((mask.size, k), jnp.float32))
        return _unflatten(_walk(head.chunk, mask, start, visit), mask.shape)

    hidden, weight = jax.lax.stop_gradient((hidden, weight.astype(hidden.dtype)))
    specs = (PartitionSpec(BATCH_AXES, "sequence", None), _weight_spec(head, weight), ROWS)
    return _on_mesh(head, local, specs, ROWS)(hidden, weight, mask)


def token_loss_sum(
    head: Head,
    loss: TokenLossFn,
    hidden: Float[Array, "B S D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    inputs: Any,
    others: Int[Array, "B S K"] | None = None,
) -> tuple[Float[Array, ""], tuple[Scores, Any]]:
    """Returns the sum of `loss` over the scored tokens, and (scores, the loss's other outputs), [B, S] each.

    Differentiable once with respect to `hidden` and `weight`; the forward pass computes the gradient. Other arguments
    and errors are as in `token_scores`.

    Args:
      loss: elementwise; differentiated with respect to logprobs, entropies and the logprobs of `others`.
      inputs: tree of [B, S, ...] arrays, passed to `loss` per chunk.
      others: further token ids whose logprobs `loss` gets, different ones at each position; None: it gets None.
    """
    _check(hidden, weight, targets, mask)

    @jax.custom_vjp
    def total(hidden, weight):
        return forward(hidden, weight)[0]

    def forward(hidden, weight):
        value, outputs, d_hidden, d_weight = _loss_and_gradients(
            head, loss, hidden, weight, targets, mask, inputs, others
        )
        return (value, outputs), (d_hidden, d_weight)

    def backward(gradients, cotangents):
        return tuple(None if g is None else g * cotangents[0].astype(g.dtype) for g in gradients)

    total.defvjp(forward, backward)
    return total(hidden, weight)


def _loss_and_gradients(head: Head, loss: TokenLossFn, hidden, weight, targets, mask, inputs, others):
    weight_spec, dtype = _weight_spec(head, weight), weight.dtype
    mesh = head.mesh if head.is_spread else None
    scatter = FSDP if mesh is not None and weight.shape[1] % axes_size(mesh, FSDP) == 0 else ()

    def weight_gradient(d_logits: Array, h: Array) -> Array:
        if not head.words_last:
            return jnp.einsum("cv,cd->vd", d_logits, h, preferred_element_type=jnp.float32)
        # The barrier keeps XLA from folding the transpose back into the product.
        rows = jax.lax.optimization_barrier(h.T)
        return jnp.einsum("dc,cv->dv", rows, d_logits, preferred_element_type=jnp.float32)

    def local(hidden, weight, targets, mask, inputs, others):
        def visit(done, take, put):
            value, outputs, d_hidden, d_weight = done
            h = take(hidden)
            chunk_inputs, chunk_others = jax.tree.map(take, (inputs, others))
            logits = _Logits(head, h, weight, take(targets), chunk_others)

            def chunk_loss(logprobs, entropy, of_others):
                each, more = loss(logprobs, entropy, of_others, chunk_inputs)
                return each.sum(), more

            (chunk_value, more), cotangents = jax.value_and_grad(chunk_loss, argnums=(0, 1, 2), has_aux=True)(
                logits.logprobs, logits.entropy, logits.of_others
            )
            d_logits = logits.gradient(*cotangents).astype(h.dtype)
            d_h = jnp.einsum("cv,vd->cd", d_logits, weight, preferred_element_type=jnp.float32)
            return (
                value + chunk_value,
                put(outputs, (Scores(logits.logprobs, logits.entropy), more)),
                put(d_hidden, d_h.astype(d_hidden.dtype)),
                None if d_weight is None else d_weight + weight_gradient(d_logits, h),
            )

        zeros = jnp.zeros(mask.size, jnp.float32)
        one_each = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[2:]), x.dtype), inputs)
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        ones = None if others is None else jax.ShapeDtypeStruct((1, others.shape[-1]), jnp.float32)
        more = jax.tree.map(lambda x: jnp.zeros(mask.size, x.dtype), jax.eval_shape(loss, one, one, ones, one_each)[1])
        # d_hidden is summed over vocabulary shards in float32.
        h_dtype = jnp.float32 if _is_split(head, "tensor") else hidden.dtype
        d_weight_shape = weight.shape[::-1] if head.words_last else weight.shape
        start = (
            jnp.float32(0),
            (Scores(zeros, zeros), more),
            jnp.zeros((mask.size, hidden.shape[-1]), h_dtype),
            jnp.zeros(d_weight_shape, jnp.float32) if head.is_trained else None,
        )
        value, outputs, d_hidden, d_weight = _walk(head.chunk, mask, start, visit)
        d_hidden = _sum_over(head, "tensor", d_hidden).astype(hidden.dtype)
        value = _sum_over(head, (*BATCH_AXES, "sequence"), value)
        if d_weight is None:
            return value, _unflatten(outputs, mask.shape), d_hidden.reshape(hidden.shape), None
        d_weight = d_weight.T if head.words_last else d_weight
        if scatter:
            d_weight = jax.lax.psum_scatter(d_weight, scatter, scatter_dimension=1, tiled=True)
            d_weight = jax.lax.psum(d_weight, "data")
        else:
            d_weight = _sum_over(head, (*BATCH_AXES, "sequence"), d_weight)
        return value, _unflatten(outputs, mask.shape), d_hidden.reshape(hidden.shape), d_weight.astype(dtype)

    rows3 = PartitionSpec(BATCH_AXES, "sequence", None)
    run = _on_mesh(
        head,
        local,
        (rows3, weight_spec, ROWS, ROWS, ROWS, ROWS),
        (PartitionSpec(), ROWS, rows3, PartitionSpec(*weight_spec[:1], scatter or None)),
    )
    return run(hidden, weight.astype(hidden.dtype), targets, mask, inputs, others)


class _Logits:
    """Float32 logits [n, V / tensor] of a chunk, and the values computed from them."""

    def __init__(self, head: Head, h: Array, weight: Array, targets: Array, others: Array | None = None) -> None:
        self._head, self._temperature = head, head.temperature
        self._first_word = jax.lax.axis_index("tensor") * weight.shape[0] if _is_split(head, "tensor") else 0

        def places(words: Array) -> Array:
            # Words of other shards are out of bounds: they read as 0 and are not written.
            return jnp.where(words >= self._first_word, words - self._first_word, weight.shape[0])

        self._own = places(targets)[:, None]
        self._others = None if others is None else places(others)
        logits = jnp.einsum("cd,vd->cv", h, weight, preferred_element_type=jnp.float32)
        self._slope = None
        if head.soft_cap is not None:
            squashed = jnp.tanh(logits / head.soft_cap)
            logits, self._slope = head.soft_cap * squashed, 1 - squashed * squashed
        logits = logits / head.temperature
        self._shifted = logits - _max_over(head, "tensor", logits.max(-1, keepdims=True))
        self._exps = jnp.exp(self._shifted)

        def picked(places: Array) -> Array:
            return jnp.take_along_axis(self._shifted, places, 1, mode="fill", fill_value=0)

        of_others = None if self._others is None else picked(self._others)
        sums = (self._exps.sum(-1), picked(self._own)[:, 0], of_others, (self._exps * self._shifted).sum(-1))
        self._total, of_targets, of_others, weighted = _sum_over(head, "tensor", sums)
        self.logprobs = of_targets - jnp.log(self._total)
        self.of_others = None if of_others is None else of_others - jnp.log(self._total)[:, None]
        # H = log Z - E[logit], both relative to the peak, to avoid cancellation of large numbers.
        self.entropy = jnp.log(self._total) - weighted / self._total

    def top(self, k: int) -> tuple[Array, Array]:
        """Returns the k likeliest words [n, k] and their logprobs [n, k], of all shards."""
        values, words = jax.lax.top_k(self._shifted, min(k, self._shifted.shape[1]))
        words = (words + self._first_word).astype(jnp.int32)
        if _is_split(self._head, "tensor"):
            values, words = jax.lax.all_gather((values, words), "tensor", axis=1, tiled=True)
            values, best = jax.lax.top_k(values, k)
            words = jnp.take_along_axis(words, best, 1)
        return words, values - jnp.log(self._total)[:, None]

    def gradient(self, d_logprob: Array, d_entropy: Array, d_others: Array | None) -> Array:
        """Returns the gradient of hidden weight^T: d logprob = onehot - p, d entropy = -p (log p + H)."""
        # -p (d_logprob + d_entropy (log p + H)) with log p = shifted - log total; per-token factors are computed first.
        scale = -1 / (self._temperature * self._total)
        d_logprobs = d_logprob if d_others is None else d_logprob + d_others.sum(-1)
        constant = d_logprobs + d_entropy * (self.entropy - jnp.log(self._total))
        d_logits = self._exps * ((constant * scale)[:, None] + (d_entropy * scale)[:, None] * self._shifted)
        rows = jnp.arange(d_logits.shape[0])
        d_logits = d_logits.at[rows, self._own[:, 0]].add(d_logprob / self._temperature, mode="drop")
        if d_others is not None:
            d_logits = d_logits.at[rows[:, None], self._others].add(d_others / self._temperature, mode="drop")
        return d_logits if self._slope is None else d_logits * self._slope


def _walk(chunk: int, mask: Array, start: Any, visit: Callable[..., Any]) -> Any:
    """Folds `visit(carry, take, put)` over chunks of the masked tokens, in order.

    `take` selects the chunk's tokens from a [b, s, ...] array, and `put` writes [n, ...] back into a [b * s, ...]
    array. The last chunk is padded with zeros (False in a mask), whose results are dropped.
    """
    size = mask.size
    chunk = min(chunk, size)
    num_scored = jnp.sum(mask, dtype=jnp.int32)
    order = jnp.argsort(~mask.reshape(-1), stable=True)
    order = jnp.where(jnp.arange(size) < num_scored, order, size)
    order = jnp.concatenate([order, jnp.full(-size % chunk, size, order.dtype)])

    def one(i, carry):
        places = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk)

        def take(x: Array) -> Array:
            return x.reshape(size, *x.shape[2:]).at[places].get(mode="fill", fill_value=0)

        def put(into: Any, values: Any) -> Any:
            return jax.tree.map(lambda x, v: x.at[places].set(v, mode="drop", unique_indices=True), into, values)

        return visit(carry, take, put)

    return jax.lax.fori_loop(0, -(-num_scored // chunk), one, start)


def _weight_spec(head: Head, weight: Array) -> PartitionSpec:
    """Returns the head's spec for the chunks: vocabulary split over `tensor`, other dim whole."""
    if head.mesh is not None and weight.shape[0] % head.mesh.shape["tensor"]:
        raise ValueError(
            f"a vocabulary of {weight.shape[0]} does not divide by mesh.tensor={head.mesh.shape['tensor']}; "
            "choose another tensor"
        )
    return PartitionSpec("tensor", None)


def _on_mesh(head: Head, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    if not head.is_spread:
        return lambda *arrays: function(*jax.tree.map(jnp.asarray, arrays))
    return jax.shard_map(function, mesh=head.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_split(head: Head, axis: str) -> bool:
    return head.mesh is not None and head.mesh.shape[axis] > 1


def _sum_over(head: Head, axes: str | tuple[str, ...], x: Any) -> Any:
    return jax.lax.psum(x, axes) if head.is_spread else x


def _max_over(head: Head, axis: str, x: Array) -> Array:
    return jax.lax.pmax(x, axis) if _is_split(head, axis) else x


def _unflatten(tree: Any, shape: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)


def _check(hidden: Array, weight: Array, targets: Array, mask: Array) -> None:
    if hidden.ndim != 3 or weight.ndim != 2 or not targets.shape == mask.shape == hidden.shape[:2]:
        raise ValueError(
            "shapes: expected [B, S, D], [V, D], [B, S], [B, S]; "
            f"got {hidden.shape}, {weight.shape}, {targets.shape}, {mask.shape}"
        )
    if hidden.shape[2] != weight.shape[1]:
        raise ValueError(f"hidden is {hidden.shape[2]} wide, head is {weight.shape[1]}")
