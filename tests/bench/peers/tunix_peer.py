"""google-tunix from PyPI as a side of the learner bench: its GRPO loss in its own trainer's jitted step.

`--layout=padded` is how it ships: one sequence a row, prompts padded to 128 and responses to 384 tokens.
`--layout=packed` uses its sequence packing: everything in `completion_ids`, with segment ids. Without splash
attention (TPU only) its Qwen3 then applies no attention mask at all, so on a CPU a packed token sees the future
and the other sequences; the bench shows by how much the numbers differ.

Its own defaults (no remat, no flash attention, full logits) except: beta 0, so that no reference model is needed, and
loss_agg_mode `token-mean`, the one normalisation that means the same in all layouts and frameworks.
"""

import importlib.metadata
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
from tunix.models.qwen3 import params as qwen3_params  # pyright: ignore[reportMissingImports]
from tunix.rl import algo_core, common  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo import grpo_learner  # pyright: ignore[reportMissingImports]
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

from tests.bench.peers import workload
from tests.bench.peers.models import MODELS
from tests.bench.peers.serve import serve

NEVER = 10**9


class TunixSide:
    """See `tests.bench.peers.serve.Side`."""

    gradient_bytes = 0
    version = f"google-tunix {importlib.metadata.version('google-tunix')}, jax {jax.__version__}"

    def __init__(self, folder: pathlib.Path, batch_name: str) -> None:
        jax.clear_caches()
        model_config = MODELS[workload.BATCHES[batch_name].model]
        folder = workload.model_folder(folder, batch_name)
        shape = qwen3.ModelConfig(
            num_layers=model_config["num_hidden_layers"],
            vocab_size=model_config["vocab_size"],
            embed_dim=model_config["hidden_size"],
            hidden_dim=model_config["intermediate_size"],
            num_heads=model_config["num_attention_heads"],
            head_dim=model_config["head_dim"],
            num_kv_heads=model_config["num_key_value_heads"],
            rope_theta=int(model_config["rope_theta"]),
            norm_eps=model_config["rms_norm_eps"],
            use_tied_embedding=True,
        )
        model = qwen3_params.create_model_from_safe_tensors(str(folder), shape, dtype=jnp.float32)
        optimizer = optax.adamw(
            workload.LEARNING_RATE,
            b1=workload.BETA1,
            b2=workload.BETA2,
            eps=workload.ADAM_EPS,
            weight_decay=0.0,
        )
        training = peft_trainer.TrainingConfig(eval_every_n_steps=NEVER, max_steps=NEVER)
        self._trainer = peft_trainer.PeftTrainer(model, optimizer, training)
        algorithm = grpo_learner.GRPOConfig(
            num_generations=workload.GROUP_SIZE, beta=0.0, epsilon=workload.CLIP, loss_agg_mode="token-mean"
        )
        algorithm.temperature = 1.0

        def loss(model, train_example, algo_config):
            return algo_core.grpo_loss_fn(
                model, train_example, algo_config, pad_id=workload.PAD_ID, eos_id=workload.BOS_ID
            )

        self._trainer.with_loss_fn(loss, has_aux=True)
        self._trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
        # What its train() calls: jitted, with the module graph cached.
        self._train_step, _ = self._trainer.jit_train_and_eval_step(skip_jit=False, cache_nnx_graph=True)
        batch = workload.make_batch(batch_name)
        self._example = jax.block_until_ready(packed(batch) if "--layout=packed" in sys.argv else padded(batch))
        self.slots = workload.MAX_TOKENS * len(batch.prompts)
        if "--layout=packed" in sys.argv:
            self.slots = workload.packed(batch).tokens.size
        self._numbers = (jnp.float32(0), jnp.float32(0))

    def step(self) -> None:
        loss, aux, grad_norm = self._train_step(self._example)
        jax.block_until_ready((loss, aux, grad_norm))
        self._numbers = loss, grad_norm

    def numbers(self) -> tuple[float, float]:
        loss, grad_norm = self._numbers
        return float(loss), float(grad_norm)


def padded(batch: workload.Batch) -> common.TrainExample:
    """Its usual example: prompts and responses apart."""
    p = workload.padded(batch)
    return common.TrainExample(
        prompt_ids=jnp.asarray(p.prompts),
        prompt_mask=jnp.asarray(p.prompts != workload.PAD_ID),
        completion_ids=jnp.asarray(p.responses),
        completion_mask=jnp.asarray(p.responses != workload.PAD_ID),
        advantages=jnp.asarray(p.advantages),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(p.behavior_logprobs),
    )


def packed(batch: workload.Batch) -> common.TrainExample:
    """Its packed example: everything is completion, masked where it is prompt or padding."""
    p = workload.packed(batch)
    nothing = jnp.zeros((p.tokens.shape[0], 0), jnp.int32)
    return common.TrainExample(
        prompt_ids=nothing,
        prompt_mask=nothing,
        completion_ids=jnp.asarray(p.tokens),
        completion_mask=jnp.asarray(p.is_response),
        advantages=jnp.asarray(p.advantages),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(p.behavior_logprobs),
        segment_ids=jnp.asarray(p.segment_ids),
        segment_positions=jnp.asarray(p.positions),
    )


if __name__ == "__main__":
    serve(TunixSide)
