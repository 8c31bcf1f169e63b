"""A vLLM worker extension whose weights can be changed behind the engine's back."""

import torch

from actor.vllm import worker


class Worker(worker.WorkerPlugin):
    """Named as vLLM's worker extension."""

    def corrupt(self) -> None:
        """Changes a tensor that is being served, as a defect would: nobody is told."""
        norm = self.model_runner.model.model.norm.weight  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            norm.add_(torch.randn_like(norm), alpha=0.5)
