"""PyTorch with transformers' models as a side of the learner bench: packed, SDPA, AdamW.

As fast as it goes without leaving the two libraries: sequences packed under a block-causal mask, or, where all are as
long as a row, without padding and without a mask (SDPA's own causal one); nothing recomputed; logits only where a token
is scored; the faster of PyTorch's two libraries for matmuls (`faster_linear`); gradients dropped instead of zeroed; the
fused AdamW (`--adamw=foreach` for the other). Adam's moments are made before memory is read, by a step on zero
gradients that changes no parameter: torch makes them only at the first step, JAX's optimizers before it.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

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
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            workload.model_folder(folder, batch_name), dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.config.use_cache = False
        self._model.train()
        self._optimizer = self._adamw()
        batch = workload.packed(workload.make_batch(batch_name))
        segments = torch.from_numpy(batch.segment_ids)
        self._mask = None if bool((segments == 1).all()) else block_causal(segments)
        self._tokens = torch.from_numpy(batch.tokens).long()
        self.slots = self._tokens.numel()
        self._positions = torch.from_numpy(batch.positions).long()
        # The hidden state before a response token predicts it.
        scored = torch.from_numpy(batch.is_response).reshape(-1).nonzero()[:, 0]
        self._before = scored - 1
        self._targets = self._tokens.reshape(-1)[scored]
        self._behavior = torch.from_numpy(batch.behavior_logprobs).reshape(-1)[scored]
        self._advantages = torch.from_numpy(batch.advantages).reshape(-1)[scored]
        self._loss = torch.tensor(0.0)
        linear = faster_linear(self._tokens.numel(), self._model.config)
        if linear is not torch.nn.functional.linear:
            for module in self._model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.forward = functools.partial(apply_linear, linear, module)  # pyright: ignore[reportAttributeAccessIssue]
        self.version += f", matmuls by {'MKL' if linear is torch.nn.functional.linear else 'oneDNN'}"

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


class OneDnnLinear(torch.autograd.Function):
    """x W^T by oneDNN, which PyTorch leaves to MKL in float32; MKL has no AVX-512 kernels for AMD's processors."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Y = x W^T."""
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Dx = dy W, dW = dy^T x."""
        x, weight = ctx.saved_tensors
        return _onednn(dy, weight.t()), _onednn(dy.flatten(0, -2).t(), x.flatten(0, -2).t())


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def apply_linear(linear: Callable[..., torch.Tensor], module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What replaces the forward of a layer without bias."""
    assert module.bias is None
    return linear(x, module.weight)


def faster_linear(num_tokens: int, config: Any) -> Callable[..., torch.Tensor]:
    """PyTorch's own linear, or `OneDnnLinear` where that is faster, forward and backward, at the MLP's two shapes."""
    known: tuple[Callable[..., torch.Tensor], ...] = (torch.nn.functional.linear, OneDnnLinear.apply)
    seconds = []
    for linear in known:
        weights = [torch.randn(config.intermediate_size, config.hidden_size) for _ in range(2)]
        up, down = weights[0].requires_grad_(), weights[1].t().contiguous().requires_grad_()
        x = torch.randn(num_tokens, config.hidden_size, requires_grad=True)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            linear(linear(x, up), down).sum().backward()
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return known[0] if seconds[0] <= 1.05 * seconds[1] else known[1]


def block_causal(segments: torch.Tensor) -> torch.Tensor:
    """What transformers adds to the scores: [rows, 1, T, T] with 0 where the query may look."""
    causal = torch.ones(2 * (segments.shape[1],), dtype=torch.bool).tril()
    may_look = (segments[:, :, None] == segments[:, None, :]) & causal
    return torch.where(may_look, 0.0, torch.finfo(torch.float32).min)[:, None]


if __name__ == "__main__":
    serve(TorchSide)
