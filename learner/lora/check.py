"""What adapters a model can have; no arrays here."""

from configs.sections.lora import OF_MLP, LoraConfig
from learner.model.config import Architecture


def check_lora(config: LoraConfig, architecture: Architecture, *, publishes_adapters: bool) -> None:
    """Refuses adapters that this model can't have.

    Raises:
      ValueError: says which.
    """
    if not config.is_on or not architecture.num_experts:
        return
    in_mlp = [target for target in OF_MLP if f"{target}_proj" in config.modules]
    if in_mlp:
        raise ValueError(
            f"lora.targets: {','.join(in_mlp)} of a mixture of experts have no adapters here; take lora.targets=q,k,v,o"
        )
    if publishes_adapters:
        raise ValueError(
            "publish.lora=adapter is not served beside a mixture of experts (vLLM wraps its experts, which then can't "
            "be proved); take publish.lora=merged"
        )
