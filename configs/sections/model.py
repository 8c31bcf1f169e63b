"""The policy, and the precisions it is held in."""

import dataclasses
from typing import Literal

from bridge.thinking import is_marks
from configs.checks import Count, CountOrZero, check_ranges
from configs.paths import LocalPath, expand_home

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder, and the precisions it is held in."""

    path: LocalPath = ""
    """A Hugging Face folder (config.json, safetensors, tokenizer.json). Empty: the tiny recipe below,
    made once and cached."""
    param_dtype: Dtype = "float32"
    """Master weights. `bfloat16`: each update is rounded stochastically, so that it learns as in float32 does, with
    more noise; the optimizer's moments stay in float32 (optimizer.mu_dtype)."""
    compute_dtype: Dtype = "float32"
    """Matrix products in the learner."""
    served_dtype: Dtype = "float32"
    """What is published and what the engine computes in."""
    remat: Literal["auto", "full", "attention", "dots", "none"] = "auto"
    """What the backward pass recomputes: whole layers, all but attention (with the splash and xla implementations;
    cuDNN and Pallas are recomputed), all but attention and the projections, nothing. auto: as little as the memory
    there is allows (`learner/update/choose_remat.py`); the log and loss.json say what that came to."""
    attention: Literal["auto", "splash", "cudnn", "pallas", "xla"] = "auto"
    """Implementation in the learner: auto takes the platform's (`learner/model/attention/dispatch.py`)."""
    logit_chunk_tokens: CountOrZero = 0
    """Tokens a device whose logits exist at once; 0: 128 or 256 on a CPU, elsewhere what fits 512 MiB."""
    thinking_marks: str = "auto"
    """Marks around the model's thinking. Verifiers, environments and the judge read the answer outside them. A response
    that ends within its thinking has no answer. `auto`: the marks of published models, of the chat template and of the
    tokenizer. `off`: nothing is thinking. Any other value: both marks with `...` between, as `<reason>...</reason>`."""
    max_tokens: Count = 64
    """Longest prompt and response together; also the engine's context length."""

    def __post_init__(self) -> None:
        expand_home(self)
        check_ranges("model", self)
        if not is_marks(self.thinking_marks):
            raise ValueError(
                f"model.thinking_marks: expected auto, off or OPENING...CLOSING, got {self.thinking_marks!r}"
            )
