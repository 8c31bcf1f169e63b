"""Differentiated function: weighted sum of token losses, and its statistics."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from configs.schema import Config
from configs.sections import LoraConfig, LossConfig
from learner.distributed.channel import Processes
from learner.distributed.sharding import BATCH_AXES
from learner.model.architecture import Architecture
from learner.model.attention.dispatch import choose_path
from learner.model.decoder import NO_LORA, Apply, Params, make_apply, output_head
from learner.model.logprobs import Head, TopTokens, token_loss_sum, token_scores, top_tokens
from learner.objective import losses
from learner.objective.distillation import divergence
from learner.objective.losses import TokenInputs
from learner.update import diagnostics
from learner.update.auto_remat import Policy, choose_remat
from learner.update.corrections import Correction, correct, normalize, turn_ids
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
    max_response_tokens: int
    """Constant of normalization=constant."""
    proximal: ProximalPolicy | None
    forward: Apply
    head: Head
    remat: Policy
    """Rematerialization policy of the backward pass of `forward`."""

    def __call__(
        self, params: Params, step: Array, batch: PackedBatch, anchors: FrozenLogprobs, is_first: Array
    ) -> tuple[Array, tuple[diagnostics.Stats, Float[Array, "B S"], Float[Array, ""]]]:
        """Returns the weighted sum of the trained tokens' losses, their statistics, logprobs and rejected denominator.

        The last is the part of the batch's denominator that belongs to rejected tokens. The output at i - 1 predicts
        the token at i, so values of a token are moved there and back; the first token of a row is never trained.
        """
        hidden, head = self._hidden(params, batch), output_head(params)
        targets, mask = _to_predictor(batch.tokens), _to_predictor(batch.loss_mask)
        weights, rejected, correction = jnp.asarray(batch.token_weights), jnp.float32(0), None
        sequence_ratio = turn_ratio = None
        if self.config.correction.is_on or losses.needs(self.config).ratios:
            # A ratio of several tokens is needed before their losses, which costs another pass over the head.
            current = _to_token(token_scores(self.head, hidden, head, targets, mask).logprobs)
            correction = self._correction(current, batch, anchors, is_first)
            kept = jnp.asarray(batch.loss_mask) if correction is None else correction.kept
            sequence_ratio, turn_ratio = self._mean_log_ratios(current, batch, kept)
        if correction is not None and self.config.correction.rejects:
            weights, divisor = normalize(
                correction.kept, jnp.asarray(batch.segment_ids), self.config.normalized_by, self.max_response_tokens
            )
            rejected = jnp.asarray(batch.denominator) - divisor
        inputs = TokenInputs(
            behavior_logprobs=jnp.asarray(batch.behavior_logprobs),
            advantages=jnp.asarray(batch.advantages),
            loss_mask=jnp.asarray(batch.loss_mask) if correction is None else correction.kept,
            proximal_logprobs=None if anchors.proximal is None else jnp.asarray(anchors.proximal),
            reference_logprobs=None if anchors.reference is None else jnp.asarray(anchors.reference),
            teacher_logprobs=None if anchors.teacher is None else jnp.asarray(anchors.teacher),
            has_teacher=jnp.asarray(batch.teacher_ids) > 0 if self.config.teacher_coef > 0 else None,
            sequence_log_ratio=sequence_ratio,
            turn_log_ratio=turn_ratio,
            correction_weight=None if correction is None else correction.weight,
        )
        is_start = jnp.broadcast_to(is_first, batch.tokens.shape) if self.proximal == "first_pass" else None

        def loss(
            logprobs: Array,
            entropy: Array,
            of_top: Array | None,
            of_token: tuple[TokenInputs, Array, Array | None, Array | None],
        ) -> tuple[Array, Any]:
            inputs, weights, is_start, of_teacher = of_token
            if self.proximal in ("first_pass", "current"):
                # Parameters are constant during an epoch, so in the first one these are also the logprobs at the
                # batch's start.
                proximal = jax.lax.stop_gradient(logprobs)
                if is_start is not None and inputs.proximal_logprobs is not None:
                    proximal = jnp.where(is_start, proximal, inputs.proximal_logprobs)
                inputs = dataclasses.replace(inputs, proximal_logprobs=proximal)
            kl_to_teacher = None
            if of_top is not None and of_teacher is not None:
                kl_to_teacher = divergence(of_top, of_teacher, self.config.teacher_divergence)
            result = losses.token_loss(logprobs, entropy, inputs, self.config, kl_to_teacher)
            return result.loss * weights, (result.clipped, result.kl, result.teacher_kl)

        others, of_teacher = (None, None) if anchors.top is None else jax.tree.map(_to_predictor, anchors.top)
        of_tokens = (*jax.tree.map(_to_predictor, (inputs, weights, is_start)), of_teacher)
        total, (scores, more) = token_loss_sum(self.head, loss, hidden, head, targets, mask, of_tokens, others)
        logprobs, entropy, clipped, kl, teacher_kl = jax.tree.map(_to_token, (*scores, *more))
        if correction is not None:
            clipped = clipped | correction.bounded
        stats = diagnostics.measure(
            batch,
            logprobs=logprobs,
            entropy=entropy,
            clipped=clipped,
            kl=kl,
            teacher_kl=teacher_kl,
            step=step,
            correction=correction,
        )
        return total, jax.lax.stop_gradient((stats, logprobs, rejected))

    def _mean_log_ratios(
        self, current: Float[Array, "B S"], batch: PackedBatch, kept: Bool[Array, "B S"]
    ) -> tuple[Float[Array, "B S"] | None, Float[Array, "B S"] | None]:
        """Returns the mean of log pi - log mu over the kept tokens of each token's sequence and turn, if needed."""
        needed, mask = losses.needs(self.config), jnp.asarray(batch.loss_mask)
        log_ratio, segment_ids = current - batch.behavior_logprobs, jnp.asarray(batch.segment_ids)
        return (
            segment_means(log_ratio, kept, segment_ids) if needed.sequence_ratio else None,
            segment_means(log_ratio, kept, turn_ids(mask)) if needed.turn_ratio else None,
        )

    def _correction(
        self, current: Float[Array, "B S"], batch: PackedBatch, anchors: FrozenLogprobs, is_first: Array
    ) -> Correction | None:
        """Returns the configured correction, given the policy's current logprobs; None if it is off."""
        config = self.config.correction
        if not config.is_on:
            return None
        logprobs = current
        if config.policy == "proximal" and anchors.proximal is not None:
            first = is_first if self.proximal == "first_pass" else False
            logprobs = jnp.where(first, current, anchors.proximal)
        correction = correct(
            logprobs - batch.behavior_logprobs,
            jnp.asarray(batch.loss_mask),
            jnp.asarray(batch.segment_ids),
            None if batch.group_ids is None else jnp.asarray(batch.group_ids),
            config,
        )
        return jax.lax.stop_gradient(correction)

    def score(self, params: Params, batch: PackedBatch) -> Float[Array, "B S"]:
        """Returns log pi of each trained token given its predecessors, at its own position; 0 elsewhere."""
        hidden = self._hidden(params, batch)
        targets, mask = _to_predictor(batch.tokens), _to_predictor(batch.loss_mask)
        return _to_token(token_scores(self.head, hidden, output_head(params), targets, mask).logprobs)

    def top_tokens(self, params: Params, batch: PackedBatch, *, k: int, num_words: int) -> TopTokens:
        """Returns the k likeliest of the first `num_words` tokens in place of each trained token; 0 elsewhere."""
        hidden, mask = self._hidden(params, batch), _to_predictor(batch.loss_mask)
        found = top_tokens(self.head, hidden, output_head(params)[:num_words], mask, k=k)
        return jax.tree.map(_to_token, found)

    def _hidden(self, params: Params, batch: PackedBatch) -> Float[Array, "B S D"]:
        return self.forward(
            params, batch.tokens, batch.positions, batch.segment_ids, batch.prefix_ids, batch.routed_experts
        )


def _to_predictor(x: Any) -> Array:
    """Moves values of the token at i to i - 1."""
    return jnp.roll(jnp.asarray(x), -1, axis=1)


def _to_token(x: Array) -> Array:
    """Inverts `_to_predictor`."""
    return jnp.roll(x, 1, axis=1)


def make_loss_fn(model_config: Architecture, config: Config, mesh: Mesh, hosts: Processes) -> LossFn:
    """Returns the loss function of a run's model, loss and sampling on its devices; all processes call it."""
    head = _head(model_config, config, mesh, is_trained=not config.lora.is_on)
    remat = choose_remat(model_config, config, mesh, hosts, logit_chunk=head.chunk)
    forward = make_forward(model_config, config, mesh, config.lora, remat=remat)
    return LossFn(
        config=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        proximal=proximal_policy(config),
        forward=forward,
        head=head,
        remat=remat,
    )


def without_adapters(loss_sum: LossFn, model_config: Architecture, config: Config, mesh: Mesh) -> LossFn:
    """Returns the loss function for the model's own parameters, with its adapters off."""
    forward = make_forward(model_config, config, mesh, NO_LORA, remat=loss_sum.remat)
    return dataclasses.replace(loss_sum, forward=forward)


def frozen_loss_fn(model_config: Architecture, config: Config, mesh: Mesh) -> LossFn:
    """Returns the loss function of a model that is only scored, of any architecture."""
    head = _head(model_config, config, mesh, is_trained=False)
    forward = make_forward(model_config, config, mesh, NO_LORA, remat="none")
    return LossFn(
        config=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        proximal=None,
        forward=forward,
        head=head,
        remat="none",
    )


def _head(model_config: Architecture, config: Config, mesh: Mesh, *, is_trained: bool) -> Head:
    return Head(
        temperature=config.sampling.temperature,
        soft_cap=model_config.logit_soft_cap,
        chunk=config.model.logit_chunk_tokens or default_logit_chunk(model_config, mesh),
        words_last=mesh.devices.flat[0].platform == "cpu",
        mesh=mesh,
        is_trained=is_trained,
    )


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


def attention_paths(
    model_config: Architecture, config: Config, mesh: Mesh, *, whose: str = "the model's"
) -> dict[int | None, str]:
    """Returns the attention path by the window of its layers; None is the key of layers without a window.

    Raises ValueError if the mesh does not divide the batch's rows or their tokens, or the model's heads or vocabulary,
    or if model.attention does not support this model on these devices.
    """
    for name, size, parts in (
        ("packing.rows", config.packing.rows, math.prod(mesh.shape[a] for a in BATCH_AXES)),
        ("packing.row_tokens", config.packing.row_tokens, mesh.shape["sequence"]),
        (f"{whose} num_attention_heads", model_config.num_heads, mesh.shape["tensor"]),
        (f"{whose} vocab_size", model_config.vocab_size, mesh.shape["tensor"]),
    ):
        if size % parts:
            raise ValueError(f"{name} ({size}) must be a multiple of {parts} for the mesh {dict(mesh.shape)}")
    windows = {
        model_config.sliding_window if windowed else None for windowed in model_config.windowed_layers or (False,)
    }
    return {
        window: choose_path(
            config.model.attention,
            device=mesh.devices.flat[0],
            dtype=jnp.dtype(config.model.compute_dtype),
            head_dim=model_config.head_dim,
            window=window,
            soft_cap=model_config.attention_soft_cap,
            sequence=mesh.shape["sequence"],
            has_prefixes=config.packing.share_prompts,
        )
        for window in windows
    }
