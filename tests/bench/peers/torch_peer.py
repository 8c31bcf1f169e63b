"""PyTorch with transformers' Qwen3 as a side of the learner bench: packed, SDPA, AdamW.

As fast as it goes without leaving the two libraries: sequences packed under a block-causal mask, logits only where
a token is scored, gradients dropped instead of zeroed, the fused AdamW (`--adamw=foreach` for the other). Adam's
moments are made before memory is read, by a step on zero gradients that changes no parameter: torch makes them
only at the first step, JAX's optimizers before it.
"""

import pathlib
import sys

import torch
import transformers

from tests.bench.peers import workload
from tests.bench.peers.serve import NUM_THREADS, serve


class TorchSide:
    """See `tests.bench.peers.serve.Side`."""

    gradient_bytes = 0
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"

    def __init__(self, folder: pathlib.Path, batch_name: str) -> None:
        torch.set_num_threads(NUM_THREADS)
        self._model = transformers.Qwen3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.config.use_cache = False
        self._model.train()
        self._optimizer = self._adamw()
        batch = workload.packed(workload.make_batch(batch_name))
        segments = torch.from_numpy(batch.segment_ids)
        causal = torch.ones(2 * (segments.shape[1],), dtype=torch.bool).tril()
        # transformers adds a float mask to the scores; [rows, 1, T, T] with 0 where the query may look.
        may_look = (segments[:, :, None] == segments[:, None, :]) & causal
        self._mask = torch.where(may_look, 0.0, torch.finfo(torch.float32).min)[:, None]
        self._tokens = torch.from_numpy(batch.tokens).long()
        self._positions = torch.from_numpy(batch.positions).long()
        # The hidden state before a response token predicts it.
        scored = torch.from_numpy(batch.is_response).reshape(-1).nonzero()[:, 0]
        self._before = scored - 1
        self._targets = self._tokens.reshape(-1)[scored]
        self._behavior = torch.from_numpy(batch.behavior_logprobs).reshape(-1)[scored]
        self._advantages = torch.from_numpy(batch.advantages).reshape(-1)[scored]
        self._loss = torch.tensor(0.0)

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        hidden = self._model.model(
            input_ids=self._tokens, attention_mask=self._mask, position_ids=self._positions
        ).last_hidden_state
        logits = self._model.lm_head(hidden.flatten(0, 1)[self._before])
        logprobs = -torch.nn.functional.cross_entropy(logits, self._targets, reduction="none")
        ratio = torch.exp(logprobs - self._behavior)
        bounded = ratio.clamp(1 - workload.CLIP, 1 + workload.CLIP)
        self._loss = -torch.minimum(ratio * self._advantages, bounded * self._advantages).mean()
        self._loss.backward()
        self._optimizer.step()

    def numbers(self) -> tuple[float, float]:
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        return self._loss.item(), torch.stack(norms).norm().item()

    def _adamw(self) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=workload.LEARNING_RATE,
            betas=(workload.BETA1, workload.BETA2),
            eps=workload.ADAM_EPS,
            weight_decay=0.0,
            fused="--adamw=foreach" not in sys.argv,
            foreach="--adamw=foreach" in sys.argv,
        )
        for p in self._model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for state in optimizer.state.values():
            state["step"].zero_()  # so that the first real step is bias-corrected as the first
        optimizer.zero_grad(set_to_none=True)
        return optimizer


if __name__ == "__main__":
    serve(TorchSide)
