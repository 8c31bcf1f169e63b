"""Differentiated function: weighted sum of token losses, and its statistics."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from configs.schema import Config
from configs.sections import LoraConfig, LossConfig
from learner.distributed.channel import Processes
from learner.model.architecture import Architecture
from learner.model.decoder import NO_LORA, Apply, Params, make_apply, output_head
from learner.model.logprobs import Head, token_loss_sum, token_scores
from learner.objective import losses
from learner.objective.losses import TokenInputs
from learner.update import diagnostics
from learner.update.auto_remat import Policy, choose_remat
from learner.update.frozen_policies import FrozenLogprobs, ProximalPolicy, proximal_policy
from learner.update.packing import PackedBatch
from learner.update.reductions import segment_means

_LOGIT_BYTES = 512 * 2**20
"""Maximum bytes of a chunk's logits on an accelerator."""
_WIDE = 512
"""Hidden size from which a CPU is faster with 256 tokens per chunk than with 128."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossFn:
    """Loss of a run's policy on a micro-batch, and its scores of the trained tokens; pure, for jit."""

    config: LossConfig
    proximal: ProximalPolicy | None
    forward: Apply
    head: Head
    remat: Policy
    """Rematerialization policy of the backward pass of `forward`."""

    def __call__(
        self, params: Params, step: Array, batch: PackedBatch, anchors: FrozenLogprobs, is_first: Array
    ) -> tuple[Array, tuple[diagnostics.Stats, Float[Array, "B S"]]]:
        """Returns the weighted sum of the trained tokens' losses, their statistics and their logprobs.

        The output at i - 1 predicts the token at i, so values of a token are moved there and back; the first token of a
        row is never trained.
        """
        hidden, head = self._hidden(params, batch), output_head(params)
        targets, mask = _to_predictor(batch.tokens), _to_predictor(batch.loss_mask)
        inputs = TokenInputs(
            behavior_logprobs=jnp.asarray(batch.behavior_logprobs),
            advantages=jnp.asarray(batch.advantages),
            loss_mask=jnp.asarray(batch.loss_mask),
            proximal_logprobs=None if anchors.proximal is None else jnp.asarray(anchors.proximal),
            reference_logprobs=None if anchors.reference is None else jnp.asarray(anchors.reference),
            sequence_log_ratio=self._sequence_log_ratio(hidden, head, targets, mask, batch),
        )
        is_start = jnp.broadcast_to(is_first, batch.tokens.shape) if self.proximal == "first_pass" else None

        def loss(
            logprobs: Array, entropy: Array, of_token: tuple[TokenInputs, Array, Array | None]
        ) -> tuple[Array, Any]:
            inputs, weights, is_start = of_token
            if self.proximal in ("first_pass", "current"):
                # Parameters are constant during an epoch, so in the first one these are also the logprobs at the
                # batch's start.
                proximal = jax.lax.stop_gradient(logprobs)
                if is_start is not None and inputs.proximal_logprobs is not None:
                    proximal = jnp.where(is_start, proximal, inputs.proximal_logprobs)
                inputs = dataclasses.replace(inputs, proximal_logprobs=proximal)
            result = losses.token_loss(logprobs, entropy, inputs, self.config)
            return result.loss * weights, (result.clipped, result.kl)

        of_tokens = jax.tree.map(_to_predictor, (inputs, jnp.asarray(batch.token_weights), is_start))
        total, (scores, (clipped, kl)) = token_loss_sum(self.head, loss, hidden, head, targets, mask, of_tokens)
        logprobs, entropy, clipped, kl = jax.tree.map(_to_token, (*scores, clipped, kl))
        stats = diagnostics.measure(batch, logprobs=logprobs, entropy=entropy, clipped=clipped, kl=kl, step=step)
        return total, jax.lax.stop_gradient((stats, logprobs))

    def _sequence_log_ratio(
        self, hidden: Array, head: Array, targets: Array, mask: Bool[Array, "B S"], batch: PackedBatch
    ) -> Float[Array, "B S"] | None:
        """Returns at each trained token the sequence's mean of log pi - log mu; costs a pass over the head."""
        if not losses.needs(self.config).sequence_ratio:
            return None
        logprobs = _to_token(token_scores(self.head, hidden, head, targets, mask).logprobs)
        log_ratio = jnp.where(batch.loss_mask, logprobs - batch.behavior_logprobs, 0.0)
        return segment_means(log_ratio, jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids))

    def score(self, params: Params, batch: PackedBatch) -> Float[Array, "B S"]:
        """Returns log pi of each trained token given its predecessors, at its own position; 0 elsewhere."""
        hidden = self._hidden(params, batch)
        targets, mask = _to_predictor(batch.tokens), _to_predictor(batch.loss_mask)
        return _to_token(token_scores(self.head, hidden, output_head(params), targets, mask).logprobs)

    def _hidden(self, params: Params, batch: PackedBatch) -> Float[Array, "B S D"]:
        return self.forward(params, batch.tokens, batch.positions, batch.segment_ids, batch.prefix_ids)


def _to_predictor(x: Any) -> Array:
    """Moves values of the token at i to i - 1."""
    return jnp.roll(jnp.asarray(x), -1, axis=1)


def _to_token(x: Array) -> Array:
    """Inverts `_to_predictor`."""
    return jnp.roll(x, 1, axis=1)


def make_loss_fn(model_config: Architecture, config: Config, mesh: Mesh, hosts: Processes) -> LossFn:
    """Returns the loss function of a run's model, loss and sampling on its devices; all processes call it."""
    chunk = config.model.logit_chunk_tokens or default_logit_chunk(model_config, mesh)
    remat = choose_remat(model_config, config, mesh, hosts, logit_chunk=chunk)
    head = Head(
        temperature=config.sampling.temperature,
        soft_cap=model_config.logit_soft_cap,
        chunk=chunk,
        words_last=mesh.devices.flat[0].platform == "cpu",
        mesh=mesh,
        is_trained=not config.lora.is_on,
    )
    forward = make_forward(model_config, config, mesh, config.lora, remat=remat)
    return LossFn(config=config.loss, proximal=proximal_policy(config), forward=forward, head=head, remat=remat)


def without_adapters(loss_sum: LossFn, model_config: Architecture, config: Config, mesh: Mesh) -> LossFn:
    """Returns the loss function for the model's own parameters, with its adapters off."""
    forward = make_forward(model_config, config, mesh, NO_LORA, remat=loss_sum.remat)
    return dataclasses.replace(loss_sum, forward=forward)


def make_forward(model_config: Architecture, config: Config, mesh: Mesh, lora: LoraConfig, *, remat: Policy) -> Apply:
    """Returns the forward function of a run's model with adapters `lora`, on its devices."""
    return make_apply(
        model_config,
        compute_dtype=config.model.compute_dtype,
        remat=remat,
        attention_path=config.model.attention,
        max_segments=config.packing.max_row_sequences,
        mesh=mesh,
        lora=lora,
    )


def default_logit_chunk(model: Architecture, mesh: Mesh) -> int:
    """Returns the tokens per device of a chunk of logits, sized for a CPU's caches or a chip's memory."""
    if mesh.devices.flat[0].platform == "cpu":
        # Each chunk adds to the whole gradient of the head: the wider the head, the more tokens must share the
        # addition.
        return 128 if model.hidden_size < _WIDE else 256
    words = -(-model.vocab_size // mesh.shape["tensor"])
    return max(128, 1 << (_LOGIT_BYTES // (4 * words)).bit_length() - 1)
